"""Device memory that rows pass through, in pieces that use it one after the other: one for fills, one for victims.

    | piece 7 ....... | piece 8 .. | piece 5 (used) | piece 6 .. |
                                   ^ the next one, where piece 5 lay

A piece is written on one stream and used on another, in the same order. Its bytes are taken again once its use was *issued*; the writing
stream then waits for the event of that use, never the host. So whoever gets None asks again after the next fill or copy was issued.

No wait forms a cycle (E6). The oldest piece in fill staging belongs to the oldest plan that is not filled; its fill waits for steps before
it, and for room in evict staging. The oldest piece there waits for the sender, which waits for the back ring alone, and write-back, which
empties that, waits for no other stage.
"""

from collections import deque
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from rowcast.job.tables import aligned
from rowcast.protocol.packing import ARRAY_ALIGNMENT
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.execute.streams import Event, Streams


@dataclass(slots=True, eq=False)
class StagingSpan:
    """Bytes for one piece. `used` is set when the work that reads them was issued, by whichever thread issues it."""

    begin: int  # counting all bytes ever taken
    content: Tensor  # u8, aligned to 64 bytes in the staging
    after: Event | None  # to wait for before they are written
    used: Event | None = None


class Staging:
    """Runs on the main thread. Places are used in the order in which they are taken."""

    def __init__(self, streams: Streams, nbytes: int) -> None:
        """Raises ConfigError where the device has not the memory."""
        try:
            self._content = streams.allocate(nbytes)
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise ConfigError(
                f"no room for {nbytes} bytes of staging on {streams.device} ({first_line}); make cache.capacity or data.batch_size smaller"
            ) from None
        self.nbytes = nbytes
        self._end = 0  # of the newest place
        self._places: deque[StagingSpan] = deque()  # those whose bytes were not taken again

    def take(self, nbytes: int) -> StagingSpan | None:
        """At most `self.nbytes`. None while a place that lies there has no `used`: nothing has changed then."""
        assert nbytes <= self.nbytes, f"a piece of {nbytes} bytes of rows, and {self.nbytes} bytes of staging"
        begin, size = self._end, aligned(nbytes, ARRAY_ALIGNMENT)
        if begin % self.nbytes + size > self.nbytes:
            begin = aligned(begin, self.nbytes)
        over = list(takewhile(lambda place: place.begin < begin + size - self.nbytes, self._places))
        if any(place.used is None for place in over):
            return None
        for _ in over:
            self._places.popleft()
        start = begin % self.nbytes
        place = StagingSpan(
            begin=begin, content=self._content[start : start + nbytes], after=over[-1].used if over else None
        )
        self._places.append(place)
        self._end = begin + size
        return place
