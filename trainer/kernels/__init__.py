"""Defines the kernels of an embedding layer: pooled look-ups, and the row optimizer on the gradients of their rows.

On the CPU, every implementation has the bits of `torch_ops`: the look-ups of a bag or a row are added one by one in
look-up order, starting from 0. Work may be split over columns, bags and rows, never over the look-ups of a bag or row.
On a device, a row with very many look-ups would delay all others. So a device sums each chunk of a long row that way,
and then the chunks' sums:

    look-ups of a long row    | 0 1 2 ... 127 | 128 ... 255 | 256 257 |      CHUNK_LOOKUPS per chunk
    row gradient              0 + (0 + 0 + 1 + ... + 127) + (0 + 128 + ... + 255) + (0 + 256 + 257)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rowcast.job.embedding_tables import RowType
from rowcast.job.optimizers import SparseOptimizer, learning_rate
from rowcast.job.tables import GroupSpec, RecordPart
from rowcast.protocol.plan_layout import LookupArrays
from rowcast.trainer.kernels.derived import Chunks

# of look-ups, what compiled loops take by address
ADDRESSED = ("slots", "offsets", "weights", "bag_order", "segment_offsets", "lookup_order", "unique_slots")


@dataclass(kw_only=True, slots=True)
class GroupLookup(LookupArrays[Tensor]):
    """One group's arrays of a step, on the device: the plan's and those derived from them."""

    slots: Tensor  # a plan with `order` has been arranged
    bag_order: Tensor
    batch_size: int
    sequence_lookups: tuple[int, ...] = ()  # look-ups of each feature that is not pooled
    chunks: Chunks[Tensor]

    def addresses(self) -> list[int]:
        """Of the arrays ADDRESSED; 0 if one is absent."""
        arrays = [getattr(self, name) for name in ADDRESSED]
        return [0 if array is None else array.data_ptr() for array in arrays]

    @property
    def num_lookups(self) -> int:
        return self.slots.numel()  # len() takes several times as long

    @property
    def num_unique(self) -> int:
        return self.unique_slots.numel()


@dataclass(frozen=True, kw_only=True)
class RecordViews:
    """The fields of a group's records: views of the same memory, with any row stride.

    If the stride is a multiple of 16 bytes, each field begins at such a multiple, and the bytes after it, up to the
    next multiple, are its padding. Kernels may read and rewrite the padding, but never change it.
    """

    weight: Tensor  # f32, f16 or bf16 [num_slots, D]: the weights for look-ups
    # f32 [num_slots, D]: the weights before rounding; None: `weight` itself is trained
    master: Tensor | None
    # f32 [num_slots, D], or [num_slots, 1] for a state with one element per row; in the order of the record
    states: tuple[Tensor, ...]

    @cached_property
    def places(self) -> list[tuple[int, int, int]]:
        """Of `weight` and `states`: address, elements from the first to the last, and the stride in elements."""
        return [place_of(field) for field in (self.weight, *self.states)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The row optimizer's settings at one train step."""

    kind: str  # a key of job.row_optimizers.ROW_OPTIMIZERS
    lr: float
    eps: float
    settings: SparseOptimizer  # for settings of this kind only
    step: int  # train steps, this one included: from 1
    # each row's gradient g becomes g * min(1, clip / (||g||2 + 1e-6)) before anything else; None: no clipping
    clip: float | None = None


class Kernels(Protocol):
    """Implemented by modules. Called on the compute stream, without autograd or waits for the device."""

    def lookup(self, rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        """Returns pooled rows f32 [G, D]; an empty bag is zero.

        `divisors` f32 [G, 1]: the divisor of each bag's sum; None if all are 1.
        """

    def reduce(self, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        """Returns row gradients f32 [U, D], in the order of `unique_slots`: the gradient of `lookup` for pooled_grad
        [G, D].

        Uses the plan's grouping: no sort, no hash map, no atomics.
        """

    def apply(self, rows: RecordViews, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
        """Trains the rows in `unique_slots`, i32 [U] and distinct, by one step, in place.

        row_grads f32 [U, D], zero gradients included. Arithmetic is in fp32; weights with fewer bits are rounded to the
        nearest, ties to even, when written.
        """

    def update(
        self, rows: RecordViews, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule
    ) -> None:
        """Does `reduce`, then `apply`, with the same bits and as few passes over the rows as possible."""


Group = tuple[RecordViews, GroupLookup, Tensor | None]  # records, look-ups of a step, and the divisors of their bags


@runtime_checkable
class AllGroups(Protocol):
    """Kernels that take all groups of a step in one call: groups share nothing."""

    def lookup_all(self, groups: Sequence[Group]) -> list[Tensor]:
        """Does `lookup` of each group."""

    def update_all(self, groups: Sequence[Group], pooled_grads: Sequence[Tensor], rule: Rule) -> None:
        """Does `update` of each group."""


class GroupByGroup:
    """Implements `AllGroups` for kernels that take one group: on a device each group has its own launches."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def lookup_all(self, groups: Sequence[Group]) -> list[Tensor]:
        return [self._kernels.lookup(*group) for group in groups]

    def update_all(self, groups: Sequence[Group], pooled_grads: Sequence[Tensor], rule: Rule) -> None:
        for (rows, lookup, divisors), grad in zip(groups, pooled_grads, strict=True):
            self._kernels.update(rows, grad, lookup, divisors, rule)


def all_groups(kernels: Kernels) -> AllGroups:
    return kernels if isinstance(kernels, AllGroups) else GroupByGroup(kernels)


DTYPES: dict[RowType, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def rule_at(settings: SparseOptimizer, train_step: int) -> Rule:
    """`train_step` counts the train batches before this one."""
    return Rule(
        kind=settings.kind,
        lr=learning_rate(settings, train_step),
        eps=settings.epsilon,
        settings=settings,
        step=train_step + 1,
        clip=settings.clip_rows,
    )


def rows_of(records: Tensor, group: GroupSpec) -> RecordViews:
    """Returns the fields of records f32 [num_slots, record_floats], as views."""
    parts = {part.name: part_of(records, part) for part in group.parts}
    return RecordViews(weight=parts.pop("weight"), master=parts.pop("master", None), states=tuple(parts.values()))


def place_of(field: Tensor) -> tuple[int, int, int]:
    num_slots, width = field.shape
    stride = field.stride(0)
    return field.data_ptr(), (num_slots - 1) * stride + width if num_slots else 0, stride


def part_of(records: Tensor, part: RecordPart) -> Tensor:
    """Returns a view [n, width] of a field, in its dtype; `records` are contiguous rows of record_bytes, of any
    dtype."""
    return records.view(DTYPES[part.dtype])[:, part.elements]
