"""Times a job's model as a whole, and what a step takes of the host beside its kernels."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rowcast.job.device_rates import DeviceRates, HostRates, ModelRates, model_fingerprint
from rowcast.job.schema import Job
from rowcast.job.step_kernels import GroupCounts, StepCounts, model_calls, row_calls
from rowcast.job.tables import group_specs
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.kernels import Kernels
from rowcast.trainer.kernels.self_check import moved
from rowcast.trainer.models.embedding import Embeddings
from rowcast.trainer.models.job_model import JobModel
from rowcast.trainer.rates.layers import small_job
from rowcast.trainer.rates.rows import FEATURES, random_lookup
from rowcast.trainer.rates.stopwatch import Stopwatch

NUM_DENSE = 13
HOST_BATCH, HOST_DIM = 128, 8


class TimedModel:
    """A job's model and one batch for it, made at random."""

    def __init__(self, job: Job, num_dense: int, batch: int, device: torch.device) -> None:
        self._side = JobModel(job, num_dense, device)
        self._dense = torch.randn(batch, num_dense, device=device)
        self._labels = torch.randint(0, 2, (batch, *job.data.columns.label_shape), device=device).float()
        self._rows = [
            torch.randn(batch, table.width, device=device, requires_grad=True)
            for table in job.tables
            for _ in table.features
        ]
        self._loss: Tensor | None = None

    def forward(self) -> None:
        """The loss included."""
        for rows in self._rows:
            rows.grad = None
        self._side.optimizer.zero_grad(set_to_none=True)
        self._loss = self._side.loss(self._side.forward(self._dense, self._rows, training=True), self._labels)

    def backward(self) -> None:
        assert self._loss is not None, "forward comes first"
        torch.autograd.backward(self._loss)

    def update(self) -> None:
        self._side.step(0)

    def up_to_backward(self) -> None:
        self.forward()
        self.backward()


def model_rates(watch: Stopwatch, job: Job, num_dense: int, batches: Sequence[int]) -> ModelRates:
    """Raises ConfigError for a model of sequences, whose time depends on their lengths."""
    for table in job.tables:
        if table.pooling == "none":
            raise ConfigError(
                f'table {table.name} has pooling = "none": the time of the model depends on the lengths of sequences, '
                "which are not known here; leave out --config"
            )
    models = [TimedModel(job, num_dense, batch, watch.device) for batch in batches]
    return ModelRates(
        fingerprint=model_fingerprint(job),
        batch=list(batches),
        forward=[watch.seconds(own.forward) for own in models],
        backward=[watch.seconds(own.backward, own.forward) for own in models],
        update=[watch.seconds(own.update, own.up_to_backward) for own in models],
    )


def host_rates(watch: Stopwatch, kernels: Kernels, measured: DeviceRates) -> HostRates:
    """A step of a small job as the trainer computes it, without the time of its kernels.

    Messages, and checks of plans, are not in it: they need a prefetcher.
    """
    job = small_job(FEATURES, HOST_DIM)
    [group] = group_specs(job)
    lookup = random_lookup(HOST_BATCH, 0.5, np.random.default_rng(0))
    on_device = moved(lookup, watch.device)
    records = torch.zeros(int(lookup.slots.max()) + 1, group.record_floats, device=watch.device)
    embeddings = Embeddings([group], job.optimizer.sparse, [records], kernels)
    side = JobModel(job, NUM_DENSE, watch.device)
    dense, labels = torch.ones(HOST_BATCH, NUM_DENSE, device=watch.device), torch.ones(HOST_BATCH, device=watch.device)

    def step() -> None:
        outputs = side.forward(dense, embeddings([on_device], 0), training=True)
        torch.autograd.backward(side.loss(outputs, labels))
        side.step(0)

    rows = GroupCounts(lookups=len(lookup.slots), rows=len(lookup.unique_slots), fetched=0, written_back=0)
    counts = StepCounts(batch=HOST_BATCH, plan_bytes=0, groups=(rows,))
    calls = [*row_calls(job, [group], counts), *model_calls(job, NUM_DENSE, HOST_BATCH)]
    of_kernels = sum(call.calls * measured.seconds(call.kernel, **call.counts)[0] for call in calls)
    return HostRates(per_step=max(0.0, watch.seconds(step) - of_kernels))
