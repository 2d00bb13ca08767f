"""The device's kernels against plain torch operations.

look-ups, row gradients    the bits of `reference.py`: promised, so another bit fails the check
the fused update           the bits of its two halves: promised as well
trained rows               within TOLERANCE of plain torch operations on the same device, relative to the largest value;
                           `update_bits` says whether they have the bits of `reference.py` too
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.equality import SIZE
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.jobs import make_job
from benchmarks.gpu_check.reference import as_on_a_device, reduce_in_chunks
from rowcast.job.embedding_tables import RowType
from rowcast.job.optimizers import ROW_OPTIMIZERS, SparseOptimizer
from rowcast.job.tables import record_parts
from rowcast.trainer.kernels import GroupLookup, Kernels, RecordViews, part_of, rule_at, torch_ops
from rowcast.trainer.kernels.choose import choose_kernels, fill_randomly, group_lookup, lookup_arrays, moved

KINDS = tuple(ROW_OPTIMIZERS)
DIMS = (4, 16, 33, 64, 128, 256)
TOLERANCE: dict[RowType, float] = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}  # a rounding of the dtype
MOST_LOOKUPS = 4  # of a bag


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    slots: int
    bags: int
    rows: int  # distinct rows, at most


ON_A_DEVICE = Sizes(slots=4096, bags=2048, rows=1000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    kind: str
    dim: int
    dtype: RowType = "fp32"
    master: bool = False
    single: bool = False  # one look-up without a weight in each bag

    def __str__(self) -> str:
        master, bags = " with master" if self.master else "", "single look-ups" if self.single else "weighted bags"
        return f"{self.kind}, dimension {self.dim}, {self.dtype}{master}, {bags}"


CORE = (
    *(Case(kind=kind, dim=128, single=single) for kind in KINDS for single in (True, False)),
    *(Case(kind=kind, dim=128, dtype="bf16", master=True) for kind in KINDS),
    Case(kind="adagrad", dim=128, dtype="fp16"),
    *(Case(kind="rowwise_adagrad", dim=dim) for dim in (4, 33, 256)),
)
ALL = (
    *(Case(kind=kind, dim=dim) for kind in KINDS for dim in DIMS),
    *(
        Case(kind=kind, dim=128, dtype=dtype, master=master)
        for kind in KINDS
        for dtype in ("fp16", "bf16")
        for master in (False, True)
    ),
)
REST = tuple(case for case in ALL if case not in CORE)


def random_lookup(case: Case, sizes: Sizes, rng: np.random.Generator) -> GroupLookup:
    """Skewed: one row is looked up very often. Weighted bags are jagged, and some are empty."""
    counts = np.ones(sizes.bags, np.int64) if case.single else rng.integers(0, MOST_LOOKUPS, sizes.bags, endpoint=True)
    rows = (rng.random(counts.sum()) ** 4 * sizes.rows).astype(np.int32)
    slots = rng.permutation(sizes.slots).astype(np.int32)[rows]
    if case.single:
        return group_lookup(lookup_arrays(rows, slots), sizes.bags)
    weights = rng.standard_normal(len(rows), np.float32)
    return group_lookup(lookup_arrays(rows, slots, counts, weights), sizes.bags)


class Records:
    """Rows of a case, all parts in one record, as in a run."""

    def __init__(self, case: Case, content: Tensor) -> None:
        """`content`: f32 [slots, record floats]."""
        self.content, self._case = content, case
        self._parts, _ = record_parts(settings(case), case.dtype, case.dim)

    @classmethod
    def random(cls, case: Case, num_slots: int) -> "Records":
        _, record_bytes = record_parts(settings(case), case.dtype, case.dim)
        made = cls(case, torch.full((num_slots, record_bytes // 4), 9.0))
        fill_randomly(made.rows, torch.Generator().manual_seed(3))
        return made

    @property
    def rows(self) -> RecordViews:
        views = {part.name: part_of(self.content, part) for part in self._parts}
        return RecordViews(weight=views.pop("weight"), master=views.pop("master", None), states=tuple(views.values()))

    def copy(self, device: torch.device) -> "Records":
        return Records(self._case, self.content.to(device, copy=True))

    def after(self, train: Callable[[RecordViews], None]) -> "Records":
        """A copy, trained."""
        trained = self.copy(self.content.device)
        train(trained.rows)
        return trained

    def has_bits_of(self, other: "Records") -> bool:
        return torch.equal(self.content.cpu().view(torch.int32), other.content.cpu().view(torch.int32))

    def away_from(self, other: "Records") -> float:
        return max(difference(own, theirs) for own, theirs in zip(self._values(), other._values(), strict=True))

    def _values(self) -> list[Tensor]:
        return [part_of(self.content, part) for part in self._parts]


def settings(case: Case) -> SparseOptimizer:
    return ROW_OPTIMIZERS[case.kind].settings(kind=case.kind, lr=0.05, eps=1e-8, master=case.master)


def difference(own: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return ((own.float() - other.float()).abs().max() / other.float().abs().max()).item()


def equal(own: Tensor, other: Tensor) -> bool:
    return torch.equal(own.cpu().view(torch.int32), other.cpu().view(torch.int32))


def check_case(
    case: Case, kernels: Kernels, device: torch.device, sizes: Sizes = ON_A_DEVICE, *, in_chunks: bool = True
) -> dict[str, Any]:
    """`in_chunks`: the kernels have the bits of a device, not those of a CPU."""
    plain_group, plain = random_lookup(case, sizes, np.random.default_rng(5)), Records.random(case, sizes.slots)
    group, records = moved(plain_group, device), plain.copy(device)
    rule = rule_at(settings(case), 2)
    plain_grads = torch.randn(sizes.bags, case.dim, generator=torch.Generator().manual_seed(4))
    grads = plain_grads.to(device)
    pooled, row_grads = kernels.lookup(records.rows, group, None), kernels.reduce(grads, group, None)
    fused = records.after(lambda rows: kernels.update(rows, grads, group, None, rule))
    halves = records.after(lambda rows: kernels.apply(rows, group.unique_slots, row_grads, rule))
    torch_on_device = records.after(lambda rows: torch_ops.update(rows, grads, group, None, rule))
    with as_on_a_device() if in_chunks else nullcontext():
        plain_row_grads = (reduce_in_chunks if in_chunks else torch_ops.reduce)(plain_grads, plain_group, None)
        slots = plain_group.unique_slots
        expected = plain.after(lambda rows: torch_ops.apply(rows, slots, plain_row_grads, rule))
    away = fused.away_from(torch_on_device)
    promised = {
        "lookup_bits": equal(pooled, torch_ops.lookup(plain.rows, plain_group, None)),
        "row_gradient_bits": equal(row_grads, plain_row_grads),
        "update_has_bits_of_its_halves": fused.has_bits_of(halves),
        "update_within_tolerance": away <= TOLERANCE[case.dtype],
    }
    return {
        **promised,
        "update_bits": fused.has_bits_of(expected),
        "update_away": away,
        "tolerance": TOLERANCE[case.dtype],
        "passed": all(promised.values()),
    }


def check_kernels(findings: Findings, device: torch.device, cases: Sequence[Case]) -> None:
    """On CUDA it checks Triton's kernels, also where a run would not choose them."""
    kernels = triton_kernels() if device.type == "cuda" else choose_kernels(device)

    def chosen() -> dict[str, Any]:
        found = choose_kernels(device, make_job(SIZE, device))
        is_same = type(found) is type(kernels) if device.type == "cpu" else found is kernels
        return {
            "chosen": getattr(found, "__name__", type(found).__name__),
            "passed": is_same and found is not torch_ops,
        }

    findings.item("a run chooses the fast kernels", chosen)
    in_chunks = device.type == "cuda" and kernels is not torch_ops
    for case in cases:
        findings.item(str(case), partial(check_case, case, kernels, device, in_chunks=in_chunks))


def triton_kernels() -> Kernels:
    """Triton's; plain torch operations without Triton."""
    try:
        from rowcast.trainer.kernels import triton_ops
    except ImportError:
        return torch_ops
    return triton_ops
