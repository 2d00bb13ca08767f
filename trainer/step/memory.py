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
are made on the device, after that piece (`kernels/derived.py`).
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
from rowcast.protocol.messages import ArraySpec, PlanHeader, RowSpan
from rowcast.protocol.plan import ARRAY_ALIGNMENT
from rowcast.protocol.plan_layout import ITEM_BYTES, Dtype
from rowcast.runtime.arrays import I32, Bytes
from rowcast.runtime.errors import RemoteProtocolError
from rowcast.trainer.device.streams import Event, Streams, memory_for
from rowcast.trainer.kernels.derived import Arranger, Chunks, chunk_arrays, most_chunk_items
from rowcast.trainer.step.plan_check import i32_of, ordered

DTYPES: dict[Dtype, torch.dtype] = {
    "b1": torch.bool,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "u2": torch.uint16,
    "u4": torch.uint32,
    "u8": torch.uint64,
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
}


@dataclass(frozen=True, slots=True)
class DerivedArrays:
    """The arrays derived from a plan's arrays, on the host."""

    items: I32  # all of them, each from a multiple of ARRAY_ALIGNMENT bytes
    places: dict[str, tuple[int, int]]  # start and end of each array in `items`
    indices: list[str]  # those of int64, as torch requires for positions to write to


class Slots:
    """Everything here is work of the fill stream, issued by the main thread."""

    def __init__(self, groups: tuple[GroupSpec, ...], num_slots: Sequence[int], streams: Streams) -> None:
        """Raises ConfigError if device memory is short."""
        self.groups = groups
        self.records = make_records(num_slots, groups, streams.device)
        self.streams = streams
        self._widths = [group.record_floats for group in groups]

    @property
    def cache_bytes(self) -> int:
        return sum(records.nbytes for records in self.records)

    @property
    def table_bytes(self) -> int:
        """Of all rows of all tables, on the device or not."""
        return sum(group.num_rows * group.record_bytes for group in self.groups)

    def gather(self, spans: Sequence[RowSpan], slots: Sequence[Tensor], out: Tensor) -> list[Tensor]:
        """Issues copies of rows from their slots to `out`, in staging; returns the rows of each span there."""
        sources, floats = [], out.view(torch.float32)
        for span, span_slots in zip(spans, slots, strict=True):
            sources.append(rows := self._rows(floats, span, span.offset))
            self.streams.fill.gather(self.records[span.group], span_slots, rows)
        return sources

    def scatter(self, content: Tensor, spans: Sequence[RowSpan], slots: Sequence[Tensor]) -> None:
        """Issues copies of rows from `content`, which is in staging and begins with the first span, to `slots`, i64."""
        floats = content.view(torch.float32)
        for span, span_slots in zip(spans, slots, strict=True):
            rows = self._rows(floats, span, span.offset - spans[0].offset)
            self.streams.fill.scatter(rows, span_slots, self.records[span.group])

    def nbytes(self, spans: Sequence[RowSpan]) -> int:
        """Returns the bytes from offset 0 of a piece to the end of its last span."""
        return spans[-1].offset + spans[-1].count * self.groups[spans[-1].group].record_bytes if spans else 0

    def _rows(self, floats: Tensor, span: RowSpan, offset: int) -> Tensor:
        """Returns a span at byte `offset` of staging, as f32 [count, record_floats]."""
        width, first = self._widths[span.group], offset // 4
        return floats[first : first + span.count * width].view(span.count, width)


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
        self._streams = streams
        self._arranger = Arranger(groups)
        self._block = streams.allocate(0)
        self._derived = self._host_memory(0)  # not writable until the step is complete
        self._derived_items: I32 = self._derived.numpy().view(np.int32)

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    def open(self, step: int, header: PlanHeader) -> Tensor:
        """Returns u8 [arrays_bytes] for the plan's arrays. Raises ConfigError if device memory does not suffice."""
        derived = most_derived_bytes(header)
        arranged = sum(2 * arranged_bytes(spec) for _, spec in ordered(header))
        if len(self._block) < header.arrays_bytes + derived + arranged:
            self._block = self._allocate(step, header.arrays_bytes + derived + arranged)
        if len(self._derived) < derived:
            self._derived = self._host_memory(derived * 5 // 4)
            self._derived_items = self._derived.numpy().view(np.int32)
        return self._block[: header.arrays_bytes]

    def put(self, header: PlanHeader, derived: DerivedArrays) -> dict[str, Tensor]:
        """Issues their copy to the device; returns them there."""
        nbytes = derived.items.nbytes
        self._derived_items[: len(derived.items)] = derived.items
        block = self._block[header.arrays_bytes : header.arrays_bytes + nbytes]
        self._streams.copy_in.copy(self._derived[:nbytes], block)
        items = block.view(torch.int32)
        arrays = {name: items[first:last] for name, (first, last) in derived.places.items()}
        for name in derived.indices:
            arrays[name] = arrays[name].view(torch.int64)
        return arrays

    def arrange(self, header: PlanHeader, arrays: dict[str, Tensor]) -> None:
        """Issues the making of `slots` and `bag_order` from each `order`, which they replace in `arrays`. All arrays of
        the plan must have been copied on the same stream.
        """
        begin, end, plans = header.arrays_bytes + most_derived_bytes(header), 0, []
        items = self._block[begin : len(self._block) // 4 * 4].view(torch.int32)
        for group, spec in ordered(header):
            order, made = arrays.pop(spec.name), []
            for name in ("slots", "bag_order"):
                arrays[f"{group}.{name}"] = array = items[end : end + len(order)]
                made.append(array)
                end += arranged_bytes(spec) // 4
            inputs = [arrays[f"{group}.{name}"] for name in ("segment_offsets", "unique_slots")]
            plans.append((group, (order, *inputs, *made)))
        self._streams.copy_in.run(partial(self._arranger.arrange, header.batch_size, plans))

    def _allocate(self, step: int, nbytes: int) -> Tensor:
        what = f"step {step} brings {nbytes} bytes of look-ups, for which {self._streams.device} has no room"
        with memory_for(what, "make data.batch_size or cache.capacity smaller"):
            return self._streams.allocate(nbytes * 5 // 4)

    def _host_memory(self, nbytes: int) -> Tensor:
        is_cuda = self._streams.device.type == "cuda"
        return torch.empty(aligned(nbytes, ARRAY_ALIGNMENT), dtype=torch.uint8, device="cpu", pin_memory=is_cuda)


def derive(header: PlanHeader, content: Bytes) -> DerivedArrays:
    """Computes the chunks of each group's long rows, and its fetch_slots as "<group>.fill_slots", i64.

    `content` u8 [arrays_bytes]: the plan's arrays, checked. Any thread.
    """
    segments = [i32_of(content, spec) for spec in header.arrays if spec.name.endswith(".segment_offsets")]
    fetched = [i32_of(content, spec) for spec in header.arrays if spec.name.endswith(".fetch_slots")]
    indices = {f"{group}.fill_slots": slots.astype(np.int64).view(np.int32) for group, slots in enumerate(fetched)}
    arrays, places, end = chunk_arrays(segments) | indices, {}, 0
    for name, array in arrays.items():
        places[name] = end, end + len(array)
        end = aligned(end + len(array), ARRAY_ALIGNMENT // 4)
    items = np.zeros(end, np.int32)
    for array, (first, last) in zip(arrays.values(), places.values(), strict=True):
        items[first:last] = array
    return DerivedArrays(items, places, list(indices))


def most_derived_bytes(header: PlanHeader) -> int:
    """Returns an upper bound; each array begins at a multiple of ARRAY_ALIGNMENT."""
    spare = (len(Chunks._fields) + 1) * ARRAY_ALIGNMENT
    return sum(
        aligned(4 * most_chunk_items(group.num_lookups) + 8 * group.num_fetch, ARRAY_ALIGNMENT) + spare
        for group in header.groups
    )


def arranged_bytes(spec: ArraySpec) -> int:
    """Returns the bytes of one array that is made from this `order`."""
    return aligned(4 * math.prod(spec.shape), ARRAY_ALIGNMENT)


def unpack(block: Tensor, specs: tuple[ArraySpec, ...]) -> dict[str, Tensor]:
    """Returns named views of a block. Raises RemoteProtocolError if an array is not inside it."""
    nbytes, arrays = len(block), {}
    items = {name: block.view(DTYPES[name]) for name in {spec.dtype for spec in specs}}
    for spec in specs:
        size = ITEM_BYTES[spec.dtype]
        first, count = spec.offset // size, math.prod(spec.shape)
        if (first + count) * size > nbytes:
            raise RemoteProtocolError(
                f"array {spec.name} ends at byte {(first + count) * size} of a block of {nbytes} bytes"
            )
        array = items[spec.dtype][first : first + count]
        arrays[spec.name] = array if len(spec.shape) == 1 else array.view(spec.shape)
    return arrays
