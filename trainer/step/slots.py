"""Holds the rows on the device, one per slot, and moves them between slots and staging.

Staging is the device memory that rows pass through in pieces: one buffer for fills, one for victims.

    | piece 7 ....... | piece 8 .. | piece 5 (used) | piece 6 .. |
                                   ^ the next piece goes here, over piece 5

One stream writes a piece and a second one uses it, in the same order. Its bytes are reusable once that use was
*issued*; the writing stream, not the host, then waits for the event of that use. A caller that gets None retries after
the next fill or copy was issued.

No wait forms a cycle (E6). The oldest piece in fill staging belongs to the oldest plan that is not filled; its fill
waits for earlier steps and for room in evict staging. The oldest piece in evict staging waits for the sender, which
waits only for the back ring; write-back, which empties that ring, waits for no other stage.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from rowcast.job.tables import GroupSpec, aligned
from rowcast.protocol.messages import RowSpan
from rowcast.protocol.packing import ARRAY_ALIGNMENT
from rowcast.trainer.device.streams import Event, Streams, memory_for


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
