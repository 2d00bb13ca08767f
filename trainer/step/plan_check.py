"""Checks all data from the prefetcher once, on the host, before any byte is used as an index or a size.

    PlanReady    headers: exactly the arrays that the counts of its steps imply, one after another; rows in their piece
                 arrays, when the last byte of the block has arrived: see below
    Flush        the same for a barrier's slots

Operations on a device cannot report a wrong position. So each value of an array of positions must be in its range in
`protocol/plan_layout.py`; then every operation stays inside its tensors. The planner decides whether the
rows are the *right* ones; dense features, labels, weights and rows may have any value.

A peer could change bytes in a shared ring after the check. It runs as the same user, who could do worse; over TCP each
process has a separate ring, so no checked byte changes. Only over TCP are slots checked to be distinct, which costs
more than all other checks. A slot that is written twice makes the numbers wrong, as a wrong row does, but does no other
harm. The bytes of bool arrays are checked too: torch's kernels may count with other values than 0 and 1.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from rowcast.job.tables import GroupSpec, aligned, unpooled_places
from rowcast.protocol.messages import Flush, PlanReady
from rowcast.protocol.parts import PREFIX, UNDIVIDED, InputSpec, Rank, part_bounds, part_sizes, sources_of
from rowcast.protocol.plan import ARRAY_ALIGNMENT, MOST_ORDERED, first_not_ordered, first_not_rising, table_starts
from rowcast.protocol.plan_layout import (
    EXCHANGE_ARRAYS,
    GROUP_ARRAYS,
    ITEM_BYTES,
    OPTIONAL,
    ArrayLayout,
    ArraySpec,
    Counts,
    Dtype,
    GroupHeader,
    ShareHeader,
    StepHeader,
)
from rowcast.runtime.arrays import I32, I64, Bytes
from rowcast.runtime.errors import RemoteProtocolError

ExpectedArray = tuple[str, Dtype, tuple[int, ...]]  # name, dtype, shape
Layouts = list[tuple[str, ArrayLayout]]  # of one group's arrays, by name
POSITION_LIMIT = 2**31  # look-ups and bags are counted in int32


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise RemoteProtocolError(sentence)


@dataclass(kw_only=True, slots=True)
class DueChecks:
    """The pending checks of a step's arrays."""

    flags: list[ArraySpec]  # of bool
    starts: I64  # of each table's look-ups, group by group
    limited: list[tuple[ArraySpec, int]] = field(default_factory=list)  # values are from 0 to this - 1; none is empty
    # a row, its first item in the block, its items, and what it rises to
    rising: list[tuple[ArraySpec, int, int, int, int]] = field(default_factory=list)
    # the first item in the block, the items, and which of `starts` are the group's
    ordered: list[tuple[ArraySpec, int, int, int, int]] = field(default_factory=list)
    distinct: list[ArraySpec] = field(default_factory=list)

    def too_large(self, block: Bytes) -> list[tuple[ArraySpec, int]]:
        """Returns which of `limited` hold a value outside their limits, in one pass. A negative value is large when
        unsigned."""
        if not self.limited:
            return []
        words = block.view(np.uint32)
        bounds = [at for spec, _ in self.limited for at in (spec.offset // 4, spec.offset // 4 + spec.shape[0])]
        largest = np.maximum.reduceat(words, bounds[:-1] if bounds[-1] == len(words) else bounds)[::2]
        outside = np.flatnonzero(largest >= np.array([limit for _, limit in self.limited]))
        return [self.limited[index] for index in outside]  # every second region is between two arrays

    def check(self, step: int, block: Bytes, marks: Bytes) -> None:
        """Raises RemoteProtocolError. `marks`: as in `first_not_permuted`."""
        words = block.view(np.int32)
        for spec in self.flags:
            most = block[spec.offset : spec.offset + math.prod(spec.shape)].max(initial=0)
            require(most <= 1, f"step {step}: {spec.name} holds {most} instead of 0 or 1")
        for spec, limit in self.too_large(block):
            below(i32_of(block, spec), limit, f"step {step}: {spec.name}")
        for spec in self.distinct:
            distinct(i32_of(block, spec), f"step {step}: {spec.name}")
        falling = first_not_rising(words, np.array([entry[2:] for entry in self.rising], np.int64).reshape(-1, 3))
        if falling >= 0:
            spec, row, first, size, end = self.rising[falling]
            name = f"step {step}: {spec.name}"
            rising(words[first : first + size], end, name if len(spec.shape) == 1 else f"{name}[{row}]")
        places = np.array([entry[1:] for entry in self.ordered], np.int64).reshape(-1, 4)
        table = first_not_ordered(block.view(np.uint16), places, self.starts, marks)
        if table >= 0:
            spec = next(spec for spec, _, _, first, end in self.ordered if first <= table < end)
            lookups = f"{self.starts[table]} to {self.starts[table + 1] - 1}"
            raise RemoteProtocolError(f"step {step}: {spec.name} is no permutation of the look-ups {lookups}")


class PlanCheck:
    """One per incarnation. The mail thread calls `message` for each message in order, and `arrays`; the main thread
    calls the rest, so that it issues work instead of looking at plans.

    All methods raise RemoteProtocolError.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        slots: Sequence[int],
        inputs: Sequence[InputSpec],
        first_train_step: int,
        staging_bytes: int,
        *,
        is_tcp: bool,
        rank: Rank = UNDIVIDED,
    ) -> None:
        """`slots` of each group; `inputs`: the batch's arrays, which `check_inputs` has passed; `staging_bytes` for the
        rows of a piece.
        """
        self._groups = tuple(groups)
        self._num_slots = tuple(slots)
        self._inputs, self._places = tuple(inputs), unpooled_places(groups)
        self._train_step = first_train_step  # the next plan's
        self._staging_bytes = staging_bytes
        self._is_tcp = is_tcp
        self._rank = rank
        self._due: dict[int, list[tuple[int, DueChecks]]] = {}  # by plan with unchecked arrays: of each step
        self._optional = [[(f"{group}.{name}", name) for name in OPTIONAL] for group in range(len(self._groups))]
        # of each group: the part and the pooled features of each source
        self._sources = [
            [
                (source.part, len(set(source.features).difference(group.unpooled_features)))
                for source in sources_of(group, rank)
            ]
            for group in self._groups
        ]
        self._known_layouts: dict[tuple[int, frozenset[str], int], Layouts] = {}
        self._marks = np.empty(MOST_ORDERED, np.uint8)
        starts = [table_starts(group, 1) for group in groups]
        self._starts = np.concatenate(starts)  # of each table's look-ups in a batch of one sample
        self._first_starts = [0, *accumulate(map(len, starts))]

    def message(self, message: PlanReady) -> None:
        if message.steps:
            ends = [0, *(header.arrays_bytes for header in message.steps)]
            due = [
                (header.step, self._header(header.step, header, end))
                for header, end in zip(message.steps, ends, strict=False)
            ]
            self._due[message.plan] = due
        end = 0
        for span in message.rows:
            if span.group >= len(self._groups):
                raise RemoteProtocolError(f"rows of group {span.group} came; there are {len(self._groups)} groups")
            if span.offset < end:
                raise RemoteProtocolError(
                    f"rows of plan {message.plan} at byte {span.offset} overlap those that end at {end}"
                )
            end = span.offset + span.count * self._groups[span.group].record_bytes
        nbytes = 0 if message.payload is None else message.payload.nbytes
        if end > nbytes:
            raise RemoteProtocolError(f"rows of plan {message.plan} end at byte {end} of a payload of {nbytes}")
        staged = nbytes - message.rows[0].offset if message.rows else 0
        if staged > self._staging_bytes:
            raise RemoteProtocolError(
                f"plan {message.plan} has {staged} bytes of rows in a piece, staging {self._staging_bytes}"
            )

    def _header(self, step: int, plan: StepHeader, begin: int) -> DueChecks:
        """`begin`: where its arrays begin in the plan's block. Returns the checks of these."""
        if len(plan.groups) != len(self._groups):
            raise RemoteProtocolError(f"step {step} has {len(plan.groups)} groups instead of {len(self._groups)}")
        in_order = plan.kind == "eval" or plan.train_step == self._train_step
        if not in_order:
            raise RemoteProtocolError(f"step {step} is train step {plan.train_step} instead of {self._train_step}")
        if self._batch_size(step, plan) <= 0:
            raise RemoteProtocolError(f"step {step} has an empty batch")
        group_counts = self._counts(plan)
        if plan.share is not None:
            for index, (share, counts) in enumerate(zip(plan.share.groups, group_counts, strict=True)):
                check_share(f"step {step}, group {index}", share, counts, plan.groups[index], self._rank)
        for index, (counts, spec) in enumerate(zip(group_counts, self._groups, strict=True)):
            unpooled = len(spec.unpooled_features)
            if counts.sequences != unpooled:
                raise RemoteProtocolError(
                    f"step {step} has {counts.sequences} features of sequences in group {index} instead of {unpooled}"
                )
            if counts.unique > counts.sources * counts.readable:
                raise RemoteProtocolError(
                    f"step {step} touches {counts.unique} rows of group {index}, which has {counts.readable} slots"
                )
            if counts.fetch > counts.slots:
                raise RemoteProtocolError(f"step {step} fetches {counts.fetch} rows into {counts.slots} slots")
            if max(counts.lookups, counts.bags) >= POSITION_LIMIT:
                raise RemoteProtocolError(f"step {step} has {counts.lookups} look-ups in {counts.bags} bags")
            if "offsets" not in counts.present and counts.lookups != counts.bags:
                raise RemoteProtocolError(f"step {step} has {counts.lookups} look-ups in {counts.bags} bags of one")
            more = counts.present & {"offsets", "weights"}
            if "order" in counts.present and (more or counts.sequences or counts.exchanges):
                raise RemoteProtocolError(
                    f"step {step} has the order of group {index} alone, whose bags are not all of one look-up"
                )
        layouts = list(map(self._layouts, range(len(group_counts)), group_counts))
        expected = self._plan_arrays(plan, group_counts, layouts)
        check_layout(f"step {step}", plan.arrays, plan.arrays_bytes, expected, begin)
        self._train_step += plan.kind == "train"
        return self._checks_of(plan, group_counts, layouts)

    def _batch_size(self, step: int, plan: StepHeader) -> int:
        """Returns the samples of the batch over all ranks."""
        divided = self._rank.is_divided
        asked, came = ("the share of a rank", "a whole batch") if divided else ("a whole batch", "a share")
        require(divided == (plan.share is not None), f"step {step} brings {came} instead of {asked}")
        if plan.share is None:
            return plan.batch_size
        groups, size = len(plan.share.groups), plan.share.batch_size
        require(groups == len(self._groups), f"step {step} shares {groups} groups instead of {len(self._groups)}")
        num_samples = sum(part_sizes(size, self._rank))
        require(
            plan.batch_size == num_samples,
            f"step {step} brings {plan.batch_size} samples; the parts of this rank have {num_samples} of {size}",
        )
        return size

    def _counts(self, plan: StepHeader) -> list[Counts]:
        names = {spec.name for spec in plan.arrays}
        ends = part_bounds(plan.batch_size if plan.share is None else plan.share.batch_size, self._rank.parts)
        group_counts = []
        for index, (group, sources) in enumerate(zip(plan.groups, self._sources, strict=True)):
            bags = [count * (ends[part + 1] - ends[part]) for part, count in sources]
            counts = Counts(
                samples=plan.batch_size,
                lookups=group.num_lookups,
                unique=group.num_unique,
                bags=sum(bags) + sum(group.sequence_lookups),
                sources=len(sources),
                sequence_lookups=group.sequence_lookups,
                fetch=group.num_fetch,
                evict=group.num_evict,
                slots=self._num_slots[index],
                readable=self._num_slots[index],
                present=frozenset([short for name, short in self._optional[index] if name in names]),
            )
            if plan.share is not None:
                counts = shared(counts, plan.share.groups[index], train=plan.kind == "train")
            group_counts.append(counts)
        return group_counts

    def _layouts(self, group: int, counts: Counts) -> Layouts:
        """Returns the group's arrays by name: those of two steps differ only in the optional ones."""
        key = group, counts.present, counts.sequences
        if key not in self._known_layouts:
            arrays = (GROUP_ARRAYS | EXCHANGE_ARRAYS).items()
            self._known_layouts[key] = [(f"{group}.{name}", layout) for name, layout in arrays if layout.where(counts)]
        return self._known_layouts[key]

    def _plan_arrays(
        self, plan: StepHeader, group_counts: Sequence[Counts], layouts: Sequence[Layouts]
    ) -> Iterator[ExpectedArray]:
        for number, spec in enumerate(self._inputs):
            name = spec.name if number < 2 else PREFIX + spec.name
            yield name, spec.dtype, (self._entries(spec, plan), *spec.shape)
        for counts, own_layouts in zip(group_counts, layouts, strict=True):
            for name, layout in own_layouts:
                yield name, layout.dtype, layout.shape_of(counts)

    def _entries(self, spec: InputSpec, plan: StepHeader) -> int:
        """Returns how many entries an array of the batch has: those of its samples, or of a feature's look-ups."""
        if not spec.of:
            return plan.batch_size
        group, number = self._places[spec.of]
        shares = (
            (plan.groups[group].sequence_lookups,)
            if plan.share is None
            else (plan.share.groups[group].sequence_lookups)
        )
        of_parts = [lookups[number] for lookups in shares]
        require(min(of_parts) >= 0, f"feature {spec.of} has {of_parts} look-ups")
        is_whole = any(spec.of in table.batch_features for table in self._groups[group].tables)
        return max(of_parts) if is_whole else sum(of_parts)

    def _checks_of(self, plan: StepHeader, group_counts: Sequence[Counts], layouts: Sequence[Layouts]) -> DueChecks:
        specs = iter(plan.arrays[len(self._inputs) :])
        flags = [spec for spec in plan.arrays if spec.dtype == "b1"]
        due = DueChecks(flags=flags, starts=self._starts * plan.batch_size)
        for group, counts in enumerate(group_counts):
            for _, layout in layouts[group]:
                spec = next(specs)
                if layout.below is not None and spec.shape[0]:
                    due.limited.append((spec, layout.below.of(counts)))
                if layout.rises_to is not None:
                    first, size = spec.offset // 4, spec.shape[-1]
                    ends = enumerate(layout.ends_of(counts))
                    due.rising += [(spec, row, first + row * size, size, end) for row, end in ends]
                if layout.dtype == "u2":
                    begin, end = self._first_starts[group : group + 2]
                    due.ordered.append((spec, spec.offset // 2, spec.shape[0], begin, end))
                if self._is_tcp and layout.distinct(counts):
                    due.distinct.append(spec)
        return due

    def arrays(self, plan: int, block: Bytes) -> None:
        """Checks the whole block u8 [arrays_bytes] of a plan whose headers have passed."""
        for step, due in self._due.pop(plan):
            due.check(step, block, self._marks)

    def barrier(self, message: Flush, first: Flush | None) -> None:
        """Checks one piece of a barrier's slots; `first` is piece 0, or None if this is piece 0."""
        name = f"barrier {message.barrier}"
        if first is not None:
            here = (message.num_dirty, message.arrays, message.arrays_bytes, message.checkpoint)
            there = (first.num_dirty, first.arrays, first.arrays_bytes, first.checkpoint)
            require(here == there, f"piece {message.piece} of {name} announces another barrier than its first piece")
            return
        fits = len(message.num_dirty) == len(self._groups) and all(map(int.__le__, message.num_dirty, self._num_slots))
        require(fits, f"{name} brings {message.num_dirty} rows home from {self._num_slots} slots")
        slots: list[ExpectedArray] = [
            (f"{index}.slots", "i4", (count,)) for index, count in enumerate(message.num_dirty)
        ]
        check_layout(name, message.arrays, message.arrays_bytes, slots)

    def barrier_arrays(self, message: Flush, block: Bytes) -> None:
        for spec in message.arrays:
            index, name = int(spec.name.partition(".")[0]), f"barrier {message.barrier}: {spec.name}"
            below(i32_of(block, spec), self._num_slots[index], name)
            if self._is_tcp:
                distinct(i32_of(block, spec), name)


def shared(counts: Counts, share: ShareHeader, *, train: bool) -> Counts:
    """Returns the counts of a group with those of its exchange."""
    received = sum(share.receive_counts)
    return replace(
        counts,
        readable=received,
        exchanges=True,
        sent=sum(share.send_counts),
        returned=received if train else 0,
        trained=share.num_own if train else 0,
        home_additions=share.home_levels[-1] if share.home_levels else 0,
        additions=share.levels[-1] if share.levels else 0,
    )


def check_share(name: str, share: ShareHeader, counts: Counts, group: GroupHeader, rank: Rank) -> None:
    """Raises unless the numbers of a group's exchange are consistent."""
    for what, of_ranks in (("sends to", share.send_counts), ("receives from", share.receive_counts)):
        require(len(of_ranks) == rank.count, f"{name} {what} {len(of_ranks)} ranks instead of {rank.count}")
    require(
        max(counts.sent, counts.readable) < POSITION_LIMIT,
        f"{name} sends {counts.sent} rows and receives {counts.readable}",
    )
    for levels, most in ((share.home_levels, counts.unique), (share.levels, counts.sent)):
        require(
            list(levels) == sorted(levels) and max(levels, default=0) <= most,
            f"{name} has additions up to {levels} of {most} gradients",
        )
    sums = tuple(map(sum, zip(*share.sequence_lookups, strict=True))) if share.sequence_lookups else ()
    require(
        len(share.sequence_lookups) == rank.parts_per_rank and sums == group.sequence_lookups,
        f"{name} has sequences of {share.sequence_lookups} look-ups in its parts, {group.sequence_lookups} in all",
    )


def check_layout(
    name: str, specs: Sequence[ArraySpec], nbytes: int, expected: Iterable[ExpectedArray], begin: int = 0
) -> None:
    """Raises unless these are exactly the expected arrays, in their order, laid out as by `plan.make_block` from byte
    `begin` on."""
    end = begin
    arrived = iter(specs)
    for array, dtype, shape in expected:
        spec = next(arrived, None)
        if spec is None or (spec.name, spec.dtype, spec.shape, spec.offset) != (array, dtype, shape, end):
            raise RemoteProtocolError(
                f"{name}: array {array} should be {dtype} {shape} at byte {end}, and {described(spec)} came"
            )
        end = aligned(end + math.prod(shape) * ITEM_BYTES[dtype], ARRAY_ALIGNMENT)
    if extra := next(arrived, None):
        raise RemoteProtocolError(f"{name}: {described(extra)} came, which belongs to no plan or barrier")
    require(end == nbytes, f"{name}: a block of {nbytes} bytes came instead of {end}")


def described(spec: ArraySpec | None) -> str:
    return "nothing" if spec is None else f"{spec.name}, {spec.dtype} {spec.shape} at byte {spec.offset},"


def i32_of(block: Bytes, spec: ArraySpec) -> I32:
    content: npt.NDArray[Any] = block[spec.offset : spec.offset + 4 * math.prod(spec.shape)]
    return content.view(np.int32)


def below(positions: I32, limit: int, name: str) -> None:
    """Raises unless all values are from 0 to `limit` - 1. A negative value is large when read as unsigned."""
    largest = positions.view(np.uint32).max(initial=0)
    if len(positions) and largest >= limit:
        raise RemoteProtocolError(f"{name} holds {largest.astype(np.int32)}, which is not from 0 to {limit - 1}")


def distinct(positions: I32, name: str) -> None:
    """Raises if two values are equal."""
    in_order = np.sort(positions)
    require(bool((in_order[1:] != in_order[:-1]).all()), f"{name} names a slot twice")


def ordered(plan: StepHeader) -> Iterator[tuple[int, ArraySpec]]:
    """Yields the groups whose plan has an `order`, with its spec."""
    for spec in plan.arrays:
        if spec.dtype == "u2" and spec.name.endswith(".order"):
            yield int(spec.name.partition(".")[0]), spec


def rising(offsets: I32, end: int, name: str) -> None:
    """Raises unless the offsets go from 0 to `end` and never fall."""
    first, last = int(offsets[0]), int(offsets[-1])
    if (first, last) != (0, end):
        raise RemoteProtocolError(f"{name} goes from {first} to {last} instead of from 0 to {end}")
    if not (offsets[1:] >= offsets[:-1]).all():
        raise RemoteProtocolError(f"{name} falls")
