"""A plan: one move of rows, and the steps that it serves. The prefetcher makes it and the trainer executes it.

It is one block of bytes, cut into pieces that fit half a ring.

    block     | dense | labels | 0.slots | 0.unique_slots | ... |     of each step; each array starts at 64 n bytes
    piece 0   | block ........................ | rows of group 0 | rows of group 1 |
    piece 1   |                                | more rows ...   |                    only if piece 0 was full

Rows have the order of the plan's fetch, so a span of rows [start, start + count) of a group also identifies its
victims.

If every bag holds one look-up, a plan has `order` instead of `slots` and `bag_order`, and `arrange` makes these two:

    order             1 0 2 | 0 1     look-ups by row, counted from their table's first
    starts            0       3   5   of the tables
    segment_offsets   0 1 3       5   of the rows
    unique_slots      8 4 6
    bag_order         1 0 2   3 4     start of the table + order
    slots             4 8 4   6 6     of the look-ups 0, 1, ...

Each table's part of `order` must be a permutation; otherwise some slots would be left unset. A table has at most
MOST_ORDERED look-ups, so two bytes hold each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from rowcast.job.tables import GroupSpec, aligned
from rowcast.protocol.batch import Kind, Samples
from rowcast.protocol.parts import PREFIX
from rowcast.protocol.plan_layout import (
    EXCHANGE_ARRAYS,
    GROUP_ARRAYS,
    ArraySpan,
    ArraySpec,
    BatchShare,
    ExchangeArrays,
    GroupArrays,
    GroupHeader,
    RowSpan,
    ShareHeader,
    StepHeader,
)
from rowcast.runtime.arrays import I32, I64, U16, Bytes
from rowcast.runtime.compiled import arrays_of, compiled_loop

Array = npt.NDArray[Any]
ARRAY_ALIGNMENT = 64
BARRIER_STAMP = 1 << 62
DENSE_STAMP = 1 << 61
CHECKSUM_EVERY = 64  # in shared memory, one plan in 64 has checksums on its pieces; guards are always checked


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMove:
    """A group's dirty rows at a barrier: row keys[i] has slot slots[i]; slots are distinct."""

    keys: I64  # [n]
    slots: I32  # [n]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupShare(ExchangeArrays[npt.NDArray[Any]]):
    """A rank's exchange with the others: arrays for the trainer, and the numbers that divide them."""

    header: ShareHeader


@dataclass(kw_only=True, slots=True)
class GroupPlan(GroupArrays[npt.NDArray[Any]]):
    """One group's part of a step: arrays for the trainer, and keys, which stay in the prefetcher.

    What moves, from `fetch_slots` on, is the whole plan's; the plan's later steps have none of it."""

    fetch_keys: I64  # [fetch] ascending: the rows to bring into fetch_slots
    # [evict] victims, dirty ones first, both kinds ascending; victim i leaves fetch_slots[i]
    evict_keys: I64
    num_dirty: int  # the first victims, which are written back; the others are dropped without a copy
    fill_after: int | None  # the last plan that reads or writes any victim; None without victims
    # for the memory tier; empty if the store has none
    load_keys: I64  # [load] ascending: rows that enter the tier for this plan
    spill_keys: I64  # [spill] rows that leave the tier once this plan's rows are home
    share: GroupShare | None = None  # None: the batch is not divided

    @property
    def num_lookups(self) -> int:
        return int(self.segment_offsets[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    step: int
    kind: Kind
    train_step: int  # training batches before this step
    epoch: int
    batch_size: int  # samples of the batch over all ranks
    groups: tuple[GroupPlan, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSteps:
    """A plan before it is packed."""

    plan: int  # its number: the first of an attempt has that of its first step
    after_plan: int | None  # this plan's rows may be read once the RowsBack of that one are in the store
    steps: tuple[StepPlan, ...]

    @property
    def move(self) -> tuple[GroupPlan, ...]:
        """The groups whose fields say what moves."""
        return self.steps[0].groups


@dataclass(frozen=True, kw_only=True, slots=True)
class BarrierPlan:
    """An entry of the plan stream after a plan: every dirty row is written back and stays resident, clean."""

    barrier: int  # 0, 1, ... over the run
    after_plan: int | None  # the last plan before it; None before the first
    dirty: tuple[RowMove, ...]  # one per group, by ascending key
    reason: str
    finished: bool  # True if the data has ended, False if a stop was requested


def plan_stamp(plan: int, piece: int) -> int:
    """Returns the number at both ends of a piece in the ring, which tells the reader stale bytes from new ones."""
    return plan << 20 | piece


def barrier_stamp(barrier: int, piece: int) -> int:
    return BARRIER_STAMP | plan_stamp(barrier, piece)


def saved_stamp(barrier: int, piece: int) -> int:
    """Returns the stamp of a piece of the model state after a barrier's rows."""
    return DENSE_STAMP | barrier_stamp(barrier, piece)


def dense_stamp(piece: int) -> int:
    """Returns the stamp of a piece of the model state that an incarnation starts from."""
    return DENSE_STAMP | piece


def is_sampled(stamp: int) -> bool:
    """Returns whether the piece with this stamp has a checksum: a function of the plan, so the same in every run."""
    return (stamp >> 20) % CHECKSUM_EVERY == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayBlock:
    """Named arrays laid out as one block of `nbytes`."""

    arrays: tuple[Array, ...]
    specs: tuple[ArraySpec, ...]
    nbytes: int

    def write(self, offset: int, out: Bytes) -> None:
        """Copies bytes [offset, offset + len(out)) of the block, except gaps between arrays."""
        for array, spec in zip(self.arrays, self.specs, strict=True):
            first, last = max(offset, spec.offset), min(offset + len(out), spec.offset + array.nbytes)
            if first < last:
                source = array.reshape(-1).view(np.uint8)
                out[first - offset : last - offset] = source[first - spec.offset : last - spec.offset]


def make_block(arrays: Mapping[str, Array], start: int = 0) -> ArrayBlock:
    """`start`: bytes of the block before these arrays; `nbytes` includes them."""
    specs, end = [], start
    for name, array in arrays.items():
        specs.append(ArraySpec(name=name, dtype=array.dtype.str[1:], shape=array.shape, offset=end))  # type: ignore[arg-type]
        end = aligned(end + array.nbytes, ARRAY_ALIGNMENT)
    return ArrayBlock(
        arrays=tuple(np.ascontiguousarray(array) for array in arrays.values()), specs=tuple(specs), nbytes=end
    )


def step_block(batch: Samples, plan: StepPlan, start: int) -> ArrayBlock:
    """Packs a step: the arrays to look up and train, the slots to check, and those of the plan's move. `start`: as in
    `make_block`."""
    arrays: dict[str, Array] = {"dense": batch.dense, "labels": batch.labels}
    arrays |= {f"{PREFIX}{name}": array for name, array in batch.inputs.items()}
    for index, group in enumerate(plan.groups):
        group_arrays = {name: getattr(group, name) for name in GROUP_ARRAYS}
        group_arrays |= {} if group.share is None else {name: getattr(group.share, name) for name in EXCHANGE_ARRAYS}
        arrays |= {f"{index}.{name}": array for name, array in group_arrays.items() if array is not None}
    return make_block(arrays, start)


def step_header(batch: Samples, plan: StepPlan, block: ArrayBlock) -> StepHeader:
    shares = tuple(group.share.header for group in plan.groups if group.share is not None)
    return StepHeader(
        step=plan.step,
        kind=plan.kind,
        train_step=plan.train_step,
        epoch=plan.epoch,
        batch_size=len(batch.labels),
        groups=group_headers(plan),
        arrays=block.specs,
        arrays_bytes=block.nbytes,
        share=BatchShare(batch_size=plan.batch_size, groups=shares) if shares else None,
    )


def group_headers(plan: StepPlan) -> tuple[GroupHeader, ...]:
    return tuple(
        GroupHeader(
            num_lookups=group.num_lookups,
            num_unique=len(group.unique_slots),
            num_fetch=len(group.fetch_keys),
            num_evict=len(group.evict_keys),
            num_dirty=group.num_dirty,
            fill_after=group.fill_after,
            sequence_lookups=() if group.sequence_offsets is None else tuple(group.sequence_offsets[:, -1].tolist()),
        )
        for group in plan.groups
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The content of one of `count` messages: bytes of the block, then spans of rows."""

    number: int
    count: int
    arrays: ArraySpan | None
    rows: tuple[RowSpan, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A plan as it travels, and the keys that stay home. One for each group: fetched rows and dirty victims."""

    plan: int
    after_plan: int | None  # as in PlannedSteps
    steps: tuple[StepHeader, ...]
    blocks: tuple[ArrayBlock, ...]  # of each step, one after another
    fetch_keys: tuple[I64, ...]
    victims: tuple[I64, ...]

    @property
    def first_step(self) -> int:
        return self.steps[0].step

    @property
    def arrays_bytes(self) -> int:
        return self.blocks[-1].nbytes

    def write(self, offset: int, out: Bytes) -> None:
        """Copies bytes [offset, offset + len(out)) of the plan's block, except gaps between arrays."""
        for block in self.blocks:
            block.write(offset, out)


def pack(samples: Sequence[Samples], plan: PlannedSteps) -> Plan:
    """`samples`: of each step's batch, of this rank's parts."""
    headers, blocks, end = list[StepHeader](), list[ArrayBlock](), 0
    for step_samples, step in zip(samples, plan.steps, strict=True):
        block = step_block(step_samples, step, end)
        headers.append(step_header(step_samples, step, block))
        blocks.append(block)
        end = block.nbytes
    return Plan(
        plan=plan.plan,
        after_plan=plan.after_plan,
        steps=tuple(headers),
        blocks=tuple(blocks),
        fetch_keys=tuple(group.fetch_keys for group in plan.move),
        victims=tuple(group.evict_keys[: group.num_dirty] for group in plan.move),
    )


def cut_bytes(nbytes: int, max_payload: int) -> list[ArraySpan]:
    return [
        ArraySpan(offset=offset, nbytes=min(max_payload, nbytes - offset)) for offset in range(0, nbytes, max_payload)
    ]


def cut(
    block_bytes: int,
    num_rows: Sequence[int],
    record_bytes: Sequence[int],
    max_payload: int,
    staging_bytes: int | None = None,
) -> list[Piece]:
    """Cuts a block and each group's rows into at least one piece, each of at most `max_payload` bytes.

    The rows of a piece take at most `staging_bytes`, if that is given."""
    contents: list[tuple[ArraySpan | None, tuple[RowSpan, ...], int]] = []
    arrays: ArraySpan | None = None
    rows: list[RowSpan] = []
    end = 0

    def finish() -> None:
        nonlocal arrays, rows, end
        contents.append((arrays, tuple(rows), end))
        arrays, rows, end = None, [], 0

    for span in cut_bytes(block_bytes, max_payload):
        if arrays is not None:
            finish()
        arrays, end = span, span.nbytes
    for group, (total, width) in enumerate(zip(num_rows, record_bytes, strict=True)):
        start = 0
        while start < total:
            offset = aligned(end, ARRAY_ALIGNMENT)
            limit = max_payload
            if staging_bytes is not None:
                limit = min(limit, (rows[0].offset if rows else offset) + staging_bytes)
            count = min(total - start, (limit - offset) // width)
            if count <= 0:
                finish()
                continue
            rows.append(RowSpan(group=group, start=start, count=count, offset=offset))
            start, end = start + count, offset + count * width
    finish()
    return [
        Piece(number=number, count=len(contents), arrays=arrays, rows=spans, nbytes=nbytes)
        for number, (arrays, spans, nbytes) in enumerate(contents)
    ]


MOST_ORDERED = 2**16


u16_at, i32_at = arrays_of(np.uint16), arrays_of(np.int32)


def table_starts(group: GroupSpec, batch_size: int) -> I64:
    """Returns [T + 1]: where each table's look-ups start, if every bag holds one."""
    return np.array(list(accumulate((batch_size * len(table.features) for table in group.tables), initial=0)), np.int64)


@compiled_loop
def arrange(
    first: int,
    end: int,
    row: int,
    order: U16 | I32,
    starts: I64,
    segment_offsets: I32,
    unique_slots: I32,
    slots: I32,
    bag_order: I32,
) -> None:
    """Writes both arrays of the tables first to end - 1; `row` is the first one's first row."""
    for t in range(first, end):
        start = np.uint64(starts[t])
        k = starts[t]
        while k < starts[t + 1]:
            stop = min(np.int64(segment_offsets[row + 1]), starts[t + 1])
            slot = unique_slots[row]
            for j in range(k, stop):
                i = start + np.uint64(order[j])
                slots[i] = slot
                bag_order[j] = i
            k = stop
            row += segment_offsets[row + 1] == stop


@compiled_loop
def arrange_each(places: I64, starts: I64) -> None:
    """Arranges several groups. A row of `places` [*, 9] holds where the group's tables begin in `starts` and how many
    there are, its numbers of look-ups and distinct rows, and the addresses of the last five arrays of `arrange`, with
    `order` first."""
    for k in range(len(places)):
        first, num_tables, size, num_unique = places[k, 0], places[k, 1], places[k, 2], places[k, 3]
        arrange(
            0,
            num_tables,
            0,
            u16_at(places[k, 4], size),
            starts[first : first + num_tables + 1],
            i32_at(places[k, 5], num_unique + 1),
            i32_at(places[k, 6], num_unique),
            i32_at(places[k, 7], size),
            i32_at(places[k, 8], size),
        )


@compiled_loop
def first_not_permuted(order: U16, starts: I64, marks: Bytes) -> int:
    """Returns the first table whose part of `order` is not a permutation, or -1. `marks`: [MOST_ORDERED], any
    values."""
    for t in range(len(starts) - 1):
        size = starts[t + 1] - starts[t]
        if size > len(marks):
            return t
        marks[:] = 0
        for k in range(starts[t], starts[t + 1]):
            marks[np.uint32(order[k])] = 1
        num_marked = 0
        for i in range(size):
            num_marked += marks[i]
        if num_marked != size:
            return t
    return -1


@compiled_loop
def first_not_ordered(words: U16, places: I64, starts: I64, marks: Bytes) -> int:
    """Returns the first of `starts` whose table's part of an `order` is not a permutation, or -1. A row of `places` [*,
    4] holds the first item of a group's `order` in `words`, its items, and which of `starts` are the group's."""
    for k in range(len(places)):
        first, size, begin, end = places[k, 0], places[k, 1], places[k, 2], places[k, 3]
        table = first_not_permuted(words[first : first + size], starts[begin:end], marks)
        if table >= 0:
            return int(begin + table)
    return -1


@compiled_loop
def first_not_rising(words: I32, places: I64) -> int:
    """Returns the first of the places whose values do not begin with 0, or fall, or do not end with theirs; or -1. A
    row of `places` [*, 3] holds the first item in `words`, the items, and the last value."""
    for k in range(len(places)):
        first, last = places[k, 0], places[k, 0] + places[k, 1] - 1
        is_right = words[first] == 0 and words[last] == places[k, 2]
        for i in range(first, last):
            is_right &= words[i] <= words[i + 1]
        if not is_right:
            return k
    return -1
