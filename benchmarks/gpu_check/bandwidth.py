"""GB/s of each kernel, with the plan of a real batch and caches swept before each launch.

GB/s are the bytes that a kernel must move (`kernel_bytes.py`) over its time; `of_copy` is the share of what a
copy on the device reaches. Other block shapes are tried on a device only, and must have the same bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_check.findings import NO_DEVICE, Findings
from benchmarks.gpu_check.jobs import batches_of, make_job, sizes
from benchmarks.gpu_check.kernel_bytes import lookup_bytes, moved_bytes, reduce_bytes, update_bytes
from benchmarks.gpu_check.kernels import equal
from benchmarks.training.resident import ResidentRun
from rowcast.analysis.estimate.measure import Stopwatch
from rowcast.job.tables import group_specs
from rowcast.trainer.device.streams import gather, move, scatter
from rowcast.trainer.kernels import rows_of, rule_at
from rowcast.trainer.kernels.choose import choose_kernels
from rowcast.trainer.models.runner import step_lookups

BATCHES = 4  # the rows of the last one lie between those of the others
COPIED_BYTES = {"cuda": 2**29, "cpu": 2**25}
REPEATS = 5
SHAPES: dict[str, tuple[Any, ...]] = {  # rows of chunks and of other rows, warps of both; rows and warps of joins
    "2 rows, 2 warps; join 2 rows, 2 warps": ((2, 2, 2), (2, 2)),
    "1 row, 1 warp; join 1 row, 1 warp": ((1, 1, 1), (1, 1)),
    "2 rows, 1 warp; join 1 row, 2 warps": ((1, 2, 1), (1, 2)),
    "4 rows, 2 warps; join 1 row, 8 warps": ((2, 4, 2), (1, 8)),
}
Launch = tuple[Callable[[], Any], int]  # the kernels of one call, and the bytes that it must move


class RealBatch:
    def __init__(self, device: torch.device) -> None:
        size = sizes(device)[1]
        self.job = make_job(size, device)
        run = ResidentRun(self.job, batches_of(size, device)[:BATCHES], device)
        self.device, self.dim, self.records = device, size.dim, run.records[0]
        (self.lookup,) = step_lookups(run.steps[-1])
        self.rows = rows_of(self.records, group_specs(self.job)[0])
        self.grads = torch.randn(len(self.lookup.slots), size.dim, device=device)
        self.kernels = choose_kernels(device, self.job)
        self.rule = rule_at(self.job.optimizer.sparse, 2)

    def update(self) -> None:
        self.kernels.update(self.rows, self.grads, self.lookup, None, self.rule)

    def launches(self) -> dict[str, Launch]:
        slots = self.lookup.unique_slots
        staged = torch.empty(len(slots), self.records.shape[1], device=self.device)
        source = torch.zeros(COPIED_BYTES[self.device.type], dtype=torch.uint8, device=self.device)
        out = torch.empty_like(source)
        return {
            "copy": (lambda: out.copy_(source), 2 * source.nbytes),
            "look-up": (
                partial(self.kernels.lookup, self.rows, self.lookup, None),
                lookup_bytes(self.rows, self.lookup),
            ),
            "gradients and update": (self.update, update_bytes(self.rows, self.lookup)),
            "gradients alone": (
                partial(self.kernels.reduce, self.grads, self.lookup, None),
                reduce_bytes(self.dim, self.lookup),
            ),
            "gather": (partial(gather, [move(self.records, slots, staged)]), moved_bytes(self.records, slots)),
            "scatter": (partial(scatter, [move(self.records, slots.long(), staged)]), moved_bytes(self.records, slots)),
        }


def check_bandwidth(findings: Findings, device: torch.device) -> None:
    batch, watch = RealBatch(device), Stopwatch(device, 1)
    copied_gbs: list[float] = []

    def measured(work: Callable[[], Any], nbytes: int) -> dict[str, Any]:
        seconds = min(watch.seconds(work) for _ in range(REPEATS))
        gbs = nbytes / seconds / 1e9
        copied_gbs.append(gbs)
        return {"ms": 1e3 * seconds, "megabytes": nbytes / 1e6, "gbs": gbs, "of_copy": gbs / copied_gbs[0]}

    long_rows, chunk_offsets, _ = batch.lookup.chunks
    facts = {
        "lookups": len(batch.lookup.slots),
        "rows": len(batch.lookup.unique_slots),
        "long_rows": len(long_rows),
        "most_chunks": int(chunk_offsets.diff().max()) if len(long_rows) else 0,
    }
    findings.item("batch", lambda: facts)
    for name, (work, nbytes) in batch.launches().items():
        findings.item(name, partial(measured, work, nbytes))
    for name, shapes in SHAPES.items():
        if device.type == "cuda":
            findings.item(name, partial(other_shape, batch, watch, shapes))
        else:
            findings.not_here(name, NO_DEVICE)


def other_shape(batch: RealBatch, watch: Stopwatch, shapes: tuple[Any, ...]) -> dict[str, Any]:
    records = batch.records.clone()

    def trained() -> Tensor:
        batch.records.copy_(records)
        batch.update()
        return batch.records.clone()

    expected = trained()
    with table_with(batch.dim, shapes):
        own = trained()
        seconds = min(watch.seconds(batch.update) for _ in range(REPEATS))
    batch.records.copy_(records)
    return {"ms": 1e3 * seconds, "passed": equal(own, expected)}


@contextmanager
def table_with(dim: int, shapes: tuple[Any, ...]) -> Iterator[None]:
    """Block shapes of the update instead of the table's, for this dimension."""
    from rowcast.trainer.kernels import triton_ops

    columns = triton_ops.blocks_for(dim, 4).columns
    derived = (triton_ops.blocks_for, triton_ops.lookup_options, triton_ops.reduce_options, triton_ops.train_options)
    try:
        with patch.dict(triton_ops.BLOCK_TABLE, {columns: (*triton_ops.BLOCK_TABLE[columns][:2], *shapes)}):
            for cached in derived:
                cached.cache_clear()
            yield
    finally:
        for cached in derived:
            cached.cache_clear()


def run_once(findings: Findings, device: torch.device) -> None:
    """Each kernel twice, for a tool that counts what they do."""

    def twice(work: Callable[[], Any]) -> dict[str, Any]:
        work()
        work()
        return {}

    for name, (work, _) in RealBatch(device).launches().items():
        findings.item(name, partial(twice, work))
