"""Contestant: FBGEMM's table-batched embeddings with rows in host memory and its cache of rows on the device
(`MANAGED_CACHING`), where fbgemm_gpu is installed. Model, row optimizer and batches are those of `speed.py`.

without prefetch    rows come when a step looks them up
with prefetch       the rows of the next batch come on a stream of their own, as in TorchRec's prefetch pipeline

TorchRec's pipeline itself takes torch.distributed and a sharding plan, and is not measured. On a CPU the same code runs
with all rows in memory and without a cache, to try it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.findings import NO_DEVICE, Findings, NotHere
from benchmarks.gpu_check.jobs import batches_of, make_job, sizes, with_touched_rows
from benchmarks.gpu_check.timed import timed
from rowcast.job.schema import Job
from rowcast.protocol.batch import ScheduledBatch
from rowcast.trainer.models.job_model import JobModel

SHARE = 0.2  # of the rows, in the cache
GUESS_S = 20.0


class Fbgemm:
    def __init__(self, job: Job, batches: Sequence[ScheduledBatch], device: torch.device, *, prefetches: bool) -> None:
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            EmbeddingLocation,
            OptimType,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        cached = EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA
        where = cached if device.type == "cuda" else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        settings = job.optimizer.sparse
        self._layer = SplitTableBatchedEmbeddingBagsCodegen(
            [(table.num_embeddings, table.embedding_dim, *where) for table in job.tables],
            optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=settings.lr,
            eps=settings.epsilon,
            **({"cache_load_factor": SHARE, "prefetch_pipeline": prefetches} if device.type == "cuda" else {}),
        )
        self._layer.init_embedding_weights_uniform(-0.01, 0.01)
        self._model = JobModel(job, batches[0].batch.dense.shape[1], device)
        self._inputs = [
            [torch.from_numpy(array).to(device) for array in (own.batch.ids, own.batch.dense, own.batch.labels)]
            for own in batches
        ]
        self._offsets = torch.arange(len(batches[0].batch.ids) + 1, device=device)
        self._shape = (-1, len(job.tables), job.tables[0].embedding_dim)
        self._stream = torch.cuda.Stream(device) if prefetches else None  # type: ignore[no-untyped-call]

    def step(self, number: int) -> Tensor:
        ids, dense, labels = self._inputs[number]
        if self._stream is not None and number == 0:
            self._prefetch(0)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        pooled = self._layer(ids, self._offsets).view(self._shape).unbind(1)
        if self._stream is not None and number + 1 < len(self._inputs):
            self._prefetch(number + 1)
        loss = self._model.loss(self._model.forward(dense, pooled, {}, training=True), labels)
        torch.autograd.backward(loss)
        self._model.step(number)
        return loss.detach()

    def _prefetch(self, number: int) -> None:
        forward = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            self._layer.prefetch(self._inputs[number][0], self._offsets, forward_stream=forward)


def measured(job: Job, batches: Sequence[ScheduledBatch], device: torch.device, *, prefetches: bool) -> dict[str, Any]:
    """The job and the batches come from `with_touched_rows`. An error of the contestant fails nothing."""
    try:
        return timed(Fbgemm(job, batches, device, prefetches=prefetches), len(batches))
    except Exception as error:
        raise NotHere(f"{type(error).__name__}: {error}") from error


def check_peers(findings: Findings, device: torch.device) -> None:
    findings.not_here("TorchRec's prefetch pipeline", "it takes torch.distributed and a sharding plan")
    try:
        import fbgemm_gpu  # noqa: F401
    except (ImportError, OSError) as error:
        findings.not_here("FBGEMM", f"fbgemm_gpu cannot be imported: {error}")
        return
    for size in sizes(device):
        job, batches = with_touched_rows(make_job(size, device), batches_of(size, device))
        for prefetches in (False, True):
            name = f"FBGEMM, batch {size.batch_size}, fp32, {'with' if prefetches else 'without'} prefetch"
            if prefetches and device.type != "cuda":
                findings.not_here(name, NO_DEVICE)
            else:
                findings.item(name, partial(measured, job, batches, device, prefetches=prefetches), "", GUESS_S)
