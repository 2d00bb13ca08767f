"""Allocates staging, the device memory that rows pass through in pieces: one buffer for fills, one for victims.

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
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from rowcast.job.tables import aligned
from rowcast.protocol.packing import ARRAY_ALIGNMENT
from rowcast.trainer.device.streams import Event, Streams, memory_for


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
