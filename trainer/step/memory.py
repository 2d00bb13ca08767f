"""Holds what a step needs on the device: rows in slots, the staging that they pass through, the arrays of plans.

Staging is the device memory that rows pass through in pieces: one buffer for fills, one for victims.

    | piece 7 ....... | piece 8 .. | piece 5 (used) | piece 6 .. |
                                   ^ the next piece goes here, over piece 5

One stream writes a piece and a second one uses it, in the same order. Its bytes are reusable once that use was
*issued*; the writing stream, not the host, then waits for the event of that use. A caller that gets None retries after
the next fill or copy was issued.

No wait forms a cycle (E6). The oldest piece in fill staging belongs to the oldest plan that is not filled; its fill
waits for earlier steps and for room in evict staging. The oldest piece in evict staging waits for the sender, which
waits only for the back ring; write-back, which empties that ring, waits for no other stage.

    block    | dense | labels | 0.order | ... | 0.long_rows | ... | 0.fill_slots | ... | 0.slots | 0.bag_order | ... |
               from the ring, piece by piece    from page-locked memory                  made on the device

Arrays of a plan that follow from others are not sent: the mail thread derives the short ones. The main thread copies
them to the device before the block's last piece, on the same stream, so the copy needs no separate event. The long ones
are made on the device, after that piece (`kernels/__init__.py`).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from rowcast.job.tables import GroupSpec, aligned
from rowcast.protocol.plan import ARRAY_ALIGNMENT
from rowcast.protocol.plan_layout import ArraySpec, RowSpan, StepHeader
from rowcast.runtime.arrays import I32, Bytes
from rowcast.trainer.device.streams import Event, Move, Streams, memory_for
from rowcast.trainer.kernels import (
    SPARE_ITEMS,
    Chunks,
    SlotArranger,
    arrange_in_torch,
    derived_items,
    most_chunk_items,
)
from rowcast.trainer.models.runner import PlanArrays, array_names
from rowcast.trainer.step.plan_check import ordered

ARRANGED = ("order", "segment_offsets", "unique_slots", "slots", "bag_order")


@dataclass(frozen=True, slots=True)
class DerivedArrays:
    """The arrays derived from a plan's arrays, on the host."""

    items: I32  # all of them, each from a multiple of ARRAY_ALIGNMENT bytes
    places: list[dict[str, tuple[int, int]]]  # of each step: start and end of each array in `items`
    indices: list[str]  # those of int64, as torch requires for positions to write to


class Slots:
    """Everything here is work of the fill stream, issued by the main thread."""

    def __init__(self, groups: tuple[GroupSpec, ...], num_slots: Sequence[int], streams: Streams) -> None:
        """Raises ConfigError if device memory is short."""
        self.groups = groups
        self.records = make_records(num_slots, groups, streams.device)
        self.streams = streams

    @property
    def cache_bytes(self) -> int:
        return sum(records.nbytes for records in self.records)

    @property
    def table_bytes(self) -> int:
        """Returns the bytes of all rows of all tables, on the device or not."""
        return sum(group.num_rows * group.record_bytes for group in self.groups)

    def gather(self, spans: Sequence[RowSpan], slots: Sequence[Tensor], out: Tensor) -> None:
        """Issues copies of rows from slots to `out`, in staging. `slots`, i32: of all rows of each span's plan."""
        self.streams.fill.gather(self._moves(spans, slots, out, 0))

    def scatter(self, content: Tensor, spans: Sequence[RowSpan], slots: Sequence[Tensor]) -> None:
        """Issues copies of rows from `content`, which is in staging and begins with the first span, to `slots`, i64: of
        all rows of each span's plan."""
        self.streams.fill.scatter(self._moves(spans, slots, content, spans[0].offset))

    def nbytes(self, spans: Sequence[RowSpan]) -> int:
        """Returns the bytes from offset 0 of a piece to the end of its last span."""
        return spans[-1].offset + spans[-1].count * self.groups[spans[-1].group].record_bytes if spans else 0

    def _moves(self, spans: Sequence[RowSpan], slots: Sequence[Tensor], staged: Tensor, begin: int) -> list[Move]:
        """`staged`: bytes of staging, the first of which is at offset `begin`."""
        floats = staged.view(torch.float32)
        return [
            Move(self.records[span.group], group_slots, span.start, span.count, floats, (span.offset - begin) // 4)
            for span, group_slots in zip(spans, slots, strict=True)
        ]


@dataclass(slots=True, eq=False)
class StagingSpan:
    """Bytes of one piece. The thread that issues the work that reads them sets `used`."""

    begin: int  # position among all bytes ever allocated
    content: Tensor  # u8, aligned to 64 bytes within the staging
    after: Event | None  # the stream that writes must wait for this event
    used: Event | None = None


class Staging:
    """Runs on the main thread. Spans must be used in the order in which they are taken."""

    def __init__(self, streams: Streams, nbytes: int) -> None:
        """Raises ConfigError if device memory does not suffice."""
        what = f"no room for {nbytes} bytes of staging on {streams.device}"
        with memory_for(what, "make cache.capacity or data.batch_size smaller"):
            self._content = streams.allocate(nbytes)
        self.nbytes = nbytes
        self._end = 0  # where the newest span ends
        self._spans: deque[StagingSpan] = deque()  # spans whose bytes were not reused

    def take(self, nbytes: int) -> StagingSpan | None:
        """Takes at most `self.nbytes`. Returns None, and changes nothing, while a span in those bytes is not `used`."""
        assert nbytes <= self.nbytes, f"a piece of {nbytes} bytes of rows, and {self.nbytes} bytes of staging"
        begin, size = self._end, aligned(nbytes, ARRAY_ALIGNMENT)
        if begin % self.nbytes + size > self.nbytes:
            begin = aligned(begin, self.nbytes)
        replaced = list(takewhile(lambda span: span.begin < begin + size - self.nbytes, self._spans))
        if any(span.used is None for span in replaced):
            return None
        for _ in replaced:
            self._spans.popleft()
        start = begin % self.nbytes
        after = replaced[-1].used if replaced else None
        span = StagingSpan(begin=begin, content=self._content[start : start + nbytes], after=after)
        self._spans.append(span)
        self._end = begin + size
        return span


def make_records(slots: Sequence[int], groups: Sequence[GroupSpec], device: torch.device) -> list[Tensor]:
    """Allocates the slots of each group, f32 [slots, record_floats]. Raises ConfigError if device memory is short."""
    nbytes = sum(rows * group.record_bytes for rows, group in zip(slots, groups, strict=True))
    with memory_for(f"cache.capacity: no room for {nbytes} bytes of slots on {device}", "make it smaller"):
        return [
            torch.zeros(rows, group.record_floats, dtype=torch.float32, device=device)
            for rows, group in zip(slots, groups, strict=True)
        ]


class PlanMemory:
    """Memory for one plan, reused for the next when the previous plan's step is complete. Runs on the main thread."""

    def __init__(self, streams: Streams, groups: Sequence[GroupSpec]) -> None:
        self._streams, self._groups = streams, groups
        self._arranger = SlotArranger(groups)
        self._block = streams.allocate(0)
        self._derived = self._host_memory(0)  # not writable until the step is complete
        self._derived_items: I32 = self._derived.numpy().view(np.int32)

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    def open(self, plan: int, headers: Sequence[StepHeader]) -> list[PlanArrays]:
        """Returns the arrays of each step of a plan, which lie at the start of a block. Raises ConfigError if device
        memory does not suffice."""
        sent, derived = headers[-1].arrays_bytes, sum(map(most_derived_bytes, headers))
        arranged = sum(2 * arranged_bytes(spec) for header in headers for _, spec in ordered(header))
        if len(self._block) < sent + derived + arranged:
            nbytes = sent + derived + arranged
            what = f"plan {plan} brings {nbytes} bytes of look-ups, for which {self._streams.device} has no room"
            with memory_for(what, "make data.batch_size or cache.capacity smaller"):
                self._block = self._streams.allocate(nbytes * 5 // 4)
        if len(self._derived) < derived:
            self._derived = self._host_memory(derived * 5 // 4)
            self._derived_items = self._derived.numpy().view(np.int32)
        return [PlanArrays(self._block, header.arrays) for header in headers]

    def put(self, headers: Sequence[StepHeader], derived: DerivedArrays, arrays: Sequence[PlanArrays]) -> None:
        """Issues the copy of derived arrays to the device, and adds them to `arrays`, of each step."""
        sent, nbytes = headers[-1].arrays_bytes, derived.items.nbytes
        self._derived_items[: len(derived.items)] = derived.items
        self._streams.copy_in.copy(self._derived[:nbytes], self._block[sent : sent + nbytes])
        for step_arrays, places in zip(arrays, derived.places, strict=True):
            for name, (first, end) in places.items():
                step_arrays.places[name] = sent + 4 * first, torch.int32, (end - first,)
            for name in derived.indices:
                offset, _, (size,) = step_arrays.places[name]
                step_arrays.places[name] = offset, torch.int64, (size // 2,)

    def arrange(self, headers: Sequence[StepHeader], arrays: Sequence[PlanArrays]) -> None:
        """Issues the making of `slots` and `bag_order` from each `order`, which they replace in `arrays`, of each step.
        All arrays of the plan must have been copied on the same stream.
        """
        end = headers[-1].arrays_bytes + sum(map(most_derived_bytes, headers))
        for header, step_arrays in zip(headers, arrays, strict=True):
            groups = list[int]()
            for group, spec in ordered(header):
                for name in ("slots", "bag_order"):
                    step_arrays.places[f"{group}.{name}"] = end, torch.int32, spec.shape
                    end += arranged_bytes(spec)
                groups.append(group)
            self._streams.copy_in.run(partial(self._arrange, header, step_arrays, groups))

    def _arrange(self, header: StepHeader, arrays: PlanArrays, groups: Sequence[int]) -> None:
        if self._streams.device.type == "cpu":
            of_groups = [(group, header.groups[group]) for group in groups]
            places = [
                (group, one.num_lookups, one.num_unique, *arrays.addresses(array_names(group, ARRANGED)))
                for group, one in of_groups
            ]
            self._arranger.arrange(header.batch_size, places)
        else:
            for group in groups:
                arrange_in_torch(self._groups[group], *(arrays[name] for name in array_names(group, ARRANGED)))

    def _host_memory(self, nbytes: int) -> Tensor:
        is_cuda = self._streams.device.type == "cuda"
        return torch.empty(aligned(nbytes, ARRAY_ALIGNMENT), dtype=torch.uint8, device="cpu", pin_memory=is_cuda)


def derive(headers: Sequence[StepHeader], content: Bytes) -> DerivedArrays:
    """Computes the chunks of each group's long rows, and its fetch_slots as "<group>.fill_slots", i64, of each step.

    `content` u8 [arrays_bytes]: the plan's arrays, checked. Any thread.
    """
    specs = [spec for header in headers for spec in header.arrays]
    segments = [spec for spec in specs if spec.name.endswith(".segment_offsets")]
    fetched = [spec for spec in specs if spec.name.endswith(".fetch_slots")]
    of_groups = [
        (offsets.offset // 4, offsets.shape[0] - 1, slots.offset // 4, slots.shape[0])
        for offsets, slots in zip(segments, fetched, strict=True)
    ]
    items, bounds = derived_items(content.view(np.int32), of_groups, sum(map(most_derived_bytes, headers)) // 4)
    num_groups, of_all = len(segments) // len(headers), bounds.tolist()
    places = [
        {
            f"{group}.{name}": (first, end)
            for group, bounds_of_group in enumerate(of_all[at : at + num_groups])
            for name, (first, end) in zip((*Chunks._fields, "fill_slots"), bounds_of_group, strict=True)
        }
        for at in range(0, len(of_all), num_groups)
    ]
    return DerivedArrays(items, places, [f"{group}.fill_slots" for group in range(num_groups)])


def most_derived_bytes(header: StepHeader) -> int:
    """Returns an upper bound; each array begins at a multiple of ARRAY_ALIGNMENT."""
    return sum(
        aligned(4 * (most_chunk_items(group.num_lookups) + SPARE_ITEMS) + 8 * group.num_fetch, ARRAY_ALIGNMENT)
        for group in header.groups
    )


def arranged_bytes(spec: ArraySpec) -> int:
    """Returns the bytes of one array that is made from this `order`."""
    return aligned(4 * math.prod(spec.shape), ARRAY_ALIGNMENT)
