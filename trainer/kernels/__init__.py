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
from functools import cache, cached_property
from itertools import accumulate
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rowcast.job.embedding_tables import RowType
from rowcast.job.optimizers import SparseOptimizer, learning_rate
from rowcast.job.tables import GroupSpec, RecordPart
from rowcast.protocol.plan import ARRAY_ALIGNMENT, arrange_each, table_starts
from rowcast.protocol.plan_layout import LookupArrays
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled_loop, compiled_part

CHUNK_LOOKUPS = 128  # a row with more look-ups in a step is a long row
ARRAY_ITEMS = ARRAY_ALIGNMENT // 4
SPARE_ITEMS = (4 + 1) * ARRAY_ITEMS  # of a group, before its arrays and for the first row that may be long

A = TypeVar("A")  # a numpy array on the host, a tensor on the device


class Chunks(NamedTuple, Generic[A]):
    """P chunks of the look-ups of K long rows; all but the last chunk of a row have CHUNK_LOOKUPS look-ups."""

    long_rows: A  # i32 [K] the long rows, as positions in unique_slots
    chunk_offsets: A  # i32 [K + 1] start of each long row's chunks
    chunk_rows: A  # i32 [P] the long row of each chunk, as a position in long_rows


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


def cut_long_rows(segment_offsets: I32) -> Chunks[I32]:
    """Returns the chunks. `segment_offsets` i32 [U + 1]: start and end of each row's look-ups."""
    places = [(0, len(segment_offsets) - 1, 0, 0)]
    room = most_chunk_items(int(segment_offsets[-1])) + SPARE_ITEMS
    items, bounds = derived_items(segment_offsets, places, room)
    return Chunks(*(items[first:end] for first, end in bounds[0, :-1].tolist()))


def derived_items(words: I32, places: Sequence[tuple[int, ...]], room: int) -> tuple[I32, I64]:
    """Returns the chunks of several groups and their fetch_slots as i64, each array from a multiple of ARRAY_ITEMS; and
    where these four arrays of each group begin and end, [groups, 4, 2].

    places: of each group, where its segment_offsets begin in `words`, its rows, where its fetch_slots begin, and how
    many these are. room: at least as many items as all take."""
    items, bounds = np.zeros(room, np.int32), np.empty((len(places), len(Chunks._fields) + 1, 2), np.int64)
    return items[: derive_each(words, np.array(places, np.int64), CHUNK_LOOKUPS, items, bounds)], bounds


@compiled_loop
def derive_each(words: I32, places: I64, longest: int, items: I32, bounds: I64) -> int:
    end = 0
    for k in range(len(places)):
        segments, fetch, size = places[k, 0], places[k, 2], places[k, 3]
        begin, num_long, num_chunks = end, 0, 0
        for row in range(places[k, 1]):
            items[begin + num_long] = row
            num_long += words[segments + row + 1] - words[segments + row] > longest
        bounds[k, 0, 0], bounds[k, 0, 1] = begin, begin + num_long
        offsets = after(begin + num_long)
        items[offsets] = 0
        for i in range(num_long):
            row = segments + items[begin + i]
            num_chunks += -(-(words[row + 1] - words[row]) // longest)
            items[offsets + 1 + i] = num_chunks
        bounds[k, 1, 0], bounds[k, 1, 1] = offsets, offsets + num_long + 1
        rows = after(offsets + num_long + 1)
        for i in range(num_long):
            for chunk in range(items[offsets + i], items[offsets + 1 + i]):
                items[rows + chunk] = i
        bounds[k, 2, 0], bounds[k, 2, 1] = rows, rows + num_chunks
        slots = after(rows + num_chunks)
        for i in range(size):
            items[slots + 2 * i], items[slots + 2 * i + 1] = words[fetch + i], 0
        bounds[k, 3, 0], bounds[k, 3, 1] = slots, slots + 2 * size
        end = after(slots + 2 * size)
    return end


@compiled_part
def after(end: int) -> int:
    """Where the array after the one that ends there begins."""
    return (end + ARRAY_ITEMS - 1) // ARRAY_ITEMS * ARRAY_ITEMS


def most_chunk_items(num_lookups: int) -> int:
    """Returns an upper bound of the number of items in a group's three arrays."""
    long_rows = num_lookups // (CHUNK_LOOKUPS + 1)
    return long_rows + (long_rows + 1) + (num_lookups // CHUNK_LOOKUPS + long_rows)


class SlotArranger:
    """Makes `slots` and `bag_order` of all groups in one compiled call on a CPU."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._groups = groups
        starts = [table_starts(group, 1) for group in groups]
        self._starts = np.concatenate(starts)
        self._firsts = list(accumulate(map(len, starts), initial=0))

    def arrange(self, batch_size: int, plans: Sequence[tuple[int, ...]]) -> None:
        """Writes `slots` and `bag_order`, i32 [N], of each plan: the group's number, its look-ups, its distinct rows,
        and the addresses on the host of its `order`, u16 [N], checked, `segment_offsets` and `unique_slots`, as in
        `LookupArrays`, and of the two."""
        places = [(self._firsts[g], len(self._groups[g].tables), *plan) for g, *plan in plans]
        arrange_each(np.array(places, np.int64).reshape(-1, 9), self._starts * batch_size)


def arrange_in_torch(
    group: GroupSpec, order: Tensor, segment_offsets: Tensor, unique_slots: Tensor, slots: Tensor, bag_order: Tensor
) -> None:
    """Does the same for one group in a few operations of torch, without a wait for the device."""
    batch_size = len(order) // group.num_features
    by_feature = bag_order.view(group.num_features, batch_size)
    by_feature.copy_(order.view_as(by_feature))
    by_feature.add_(first_features(tuple(table_starts(group, 1).tolist()), order.device)[:, None], alpha=batch_size)
    positions = torch.arange(len(order), dtype=torch.int32, device=order.device)
    rows = torch.searchsorted(segment_offsets[1:], positions, right=True, out_int32=True)
    slots.index_copy_(0, bag_order.long(), unique_slots.index_select(0, rows))


@cache
def first_features(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns i32 [F]: for each feature the first one of its table. `starts`: each table's first feature, and the
    end."""
    firsts = torch.tensor(starts, dtype=torch.int32, device="cpu")
    return firsts[:-1].repeat_interleave(firsts.diff()).to(device)
