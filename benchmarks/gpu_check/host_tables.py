"""Contestant: tables in host memory, the dense part on the device, in stock PyTorch: what people do today.

The tables hold the rows that the run touches, so they are smaller, and faster to read, than those of the job. Batches
are made before the clock starts; row optimizer, model and precision are the job's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.training.stock import StockEmbeddings, inputs_of, sparse_optimizer
from rowcast.job.schema import Job
from rowcast.protocol.batch import ScheduledBatch
from rowcast.trainer.models.job_model import JobModel

CPU = torch.device("cpu")


class Inputs(NamedTuple):
    ids: list[tuple[Tensor, Tensor]]  # and offsets, per feature
    dense: Tensor  # page-locked if the device is CUDA
    labels: Tensor


class HostTables:
    def __init__(self, job: Job, batches: Sequence[ScheduledBatch], device: torch.device) -> None:
        """The job and the batches come from `with_touched_rows`."""
        self._device = device
        self.inputs = [self._prepared(scheduled, len(job.features)) for scheduled in batches]
        self._tables = StockEmbeddings(job, CPU)
        self._optimizer = sparse_optimizer(job.optimizer.sparse, self._tables.parameters())
        self._model = JobModel(job, batches[0].batch.dense.shape[1], device)

    def _prepared(self, scheduled: ScheduledBatch, num_features: int) -> Inputs:
        batch = scheduled.batch
        dense, labels = torch.from_numpy(batch.dense), torch.from_numpy(batch.labels)
        if self._device.type == "cuda":
            dense, labels = dense.pin_memory(), labels.pin_memory()
        return Inputs(inputs_of(batch, num_features, CPU), dense, labels)

    def step(self, number: int) -> Tensor:
        ids, dense, labels = self.inputs[number]
        pooled = [own.to(self._device) for own in self._tables(ids)]
        dense, labels = (tensor.to(self._device, non_blocking=True) for tensor in (dense, labels))
        loss = self._model.loss(self._model.forward(dense, pooled, {}, training=True), labels)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._model.step(number)
        self._optimizer.step()
        return loss.detach()
