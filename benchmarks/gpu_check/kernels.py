"""The device's kernels against plain torch operations on the same device, and the fused update against its two halves.

Both add look-ups and short rows in the same order, so these agree to the bit; a long row's chunks, and rules whose
operations a kernel fuses, agree within rounding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowcast.job.row_optimizers import ROW_OPTIMIZERS
from rowcast.trainer.kernels import GroupLookup, Kernels, RecordViews, Rule, torch_ops
from rowcast.trainer.kernels.chunks import Chunks, cut_long_rows

KINDS = tuple(ROW_OPTIMIZERS)
DIMS = (4, 16, 33, 64, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NUM_SLOTS, NUM_BAGS, BATCH_SIZE, MOST_LOOKUPS = 4096, 2048, 1024, 4  # look-ups of a bag, at most
# relative to the largest value; a rounding of the dtype
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    dim: int
    dtype: torch.dtype
    master: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind}, dimension {self.dim}, {dtype}{' with master' if self.master else ''}"


def cases() -> Iterator[Case]:
    for kind in KINDS:
        for dim in DIMS:
            yield Case(kind, dim, torch.float32, master=False)
        for dtype in DTYPES[1:]:
            yield Case(kind, 128, dtype, master=False)
            yield Case(kind, 128, dtype, master=True)


def random_lookup(device: torch.device, rng: np.random.Generator) -> GroupLookup:
    """Skewed, jagged and weighted: some bags are empty, and one row is looked up very often."""
    counts = rng.integers(0, MOST_LOOKUPS, NUM_BAGS, endpoint=True)
    rows = (rng.random(counts.sum()) ** 4 * 1000).astype(np.int32)
    places = rng.permutation(NUM_SLOTS).astype(np.int32)
    unique, inverse, uses = np.unique(rows, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable").astype(np.int32)
    bags = np.repeat(np.arange(NUM_BAGS, dtype=np.int32), counts)
    segments = np.concatenate([[0], np.cumsum(uses)]).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    arrays: dict[str, Any] = {
        "slots": places[rows],
        "unique_slots": places[unique],
        "segment_offsets": segments,
        "bag_order": bags[order],
        "lookup_order": order,
        "offsets": offsets,
        "weights": rng.standard_normal(len(rows), np.float32),
    }
    tensors: dict[str, Any] = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    chunks = Chunks(*(torch.from_numpy(array).to(device) for array in cut_long_rows(segments)))
    return GroupLookup(batch_size=BATCH_SIZE, chunks=chunks, **tensors)


def random_rows(case: Case, device: torch.device) -> RecordViews:
    generator = torch.Generator().manual_seed(3)
    widths = [state.width(case.dim) for state in ROW_OPTIMIZERS[case.kind].states]
    master = torch.randn(NUM_SLOTS, case.dim, generator=generator).to(device)
    states = tuple(torch.rand(NUM_SLOTS, width, generator=generator).to(device) for width in widths)
    return RecordViews(weight=master.to(case.dtype), master=master.clone() if case.master else None, states=states)


def copied(rows: RecordViews) -> RecordViews:
    master = None if rows.master is None else rows.master.clone()
    return RecordViews(weight=rows.weight.clone(), master=master, states=tuple(state.clone() for state in rows.states))


def parts(rows: RecordViews) -> list[Tensor]:
    return [rows.weight, *([] if rows.master is None else [rows.master]), *rows.states]


def check_case(case: Case, kernels: Kernels, device: torch.device) -> dict[str, Any]:
    group, rows = random_lookup(device, np.random.default_rng(5)), random_rows(case, device)
    rule = Rule(kind=case.kind, lr=0.05, eps=1e-8, betas=(0.9, 0.999), step=3)
    gradient = torch.randn(NUM_BAGS, case.dim, generator=torch.Generator().manual_seed(4)).to(device)
    fused, halves, plain = copied(rows), copied(rows), copied(rows)
    looked_up = kernels.lookup(rows, group, None), torch_ops.lookup(rows, group, None)
    kernels.update(fused, gradient, group, None, rule)
    kernels.apply(halves, group.unique_slots, kernels.reduce(gradient, group, None), rule)
    torch_ops.update(plain, gradient, group, None, rule)
    away = max(difference(own, other) for own, other in zip(parts(fused), parts(plain), strict=True))
    return {
        "lookup_equal": torch.equal(*looked_up),
        "lookup_away": difference(*looked_up),
        "fused_is_its_halves": all(
            torch.equal(own, other) for own, other in zip(parts(fused), parts(halves), strict=True)
        ),
        "update_away": away,
        "passed": away <= TOLERANCE[case.dtype] and difference(*looked_up) <= TOLERANCE[torch.float32],
    }


def difference(own: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return ((own.float() - other.float()).abs().max() / other.float().abs().max()).item()


def check_kernels(kernels: Kernels, device: torch.device) -> dict[str, Any]:
    found = {str(case): check_case(case, kernels, device) for case in cases()}
    passed = all(own["passed"] and own["fused_is_its_halves"] for own in found.values())
    return {"implementation": getattr(kernels, "__name__", str(kernels)), "cases": found, "passed": passed}
