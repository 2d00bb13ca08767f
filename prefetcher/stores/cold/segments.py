"""Tracks which segments of a file are in use, how many of their rows are live, and which holds may still read them.

    free -> open     rows are appended; one segment at a time
         -> sealed   full and on the file
         -> emptied  its last row was freed; it is free once every earlier hold has been left

Nothing here locks or does any I/O.
"""

import heapq
from collections import deque
from typing import NamedTuple

import numpy as np

from rowcast.prefetcher.stores.cold.cold_rows import Places
from rowcast.runtime.arrays import I64

SPARE = 1  # segments that only rows of tidied segments may begin
FEW = 32  # garbage is also collected when less than one segment in FEW is free


class Piece(NamedTuple):
    """Pages of a sealed segment whose rows tidying moves next."""

    segment: int
    first_page: int  # within the segment
    num_pages: int


class Segments:
    def __init__(self, count: int, num_pages: int, num_rows: int) -> None:
        """`num_pages`, `num_rows`: of each segment."""
        self.count, self.num_pages, self.num_rows = count, num_pages, num_rows
        self.uses: I64 = np.zeros(count, np.int64)  # how often each was begun
        self.num_garbage = 0  # rows that were freed, in segments that are open or sealed
        self.num_live = 0
        self._live: I64 = np.zeros(count, np.int64)
        self._sealed = np.zeros(count, np.bool_)
        self._free = list(range(count))  # a heap
        self._emptied = deque[tuple[int, int]]()  # the newest hold at that time, and the segment
        self._holds = dict[int, None]()  # entered and not left, ascending
        self._newest_hold = 0
        self._piece: Piece | None = None  # the newest one, if its segment has more
        self._cleared = np.zeros(count, np.bool_)  # all its pieces were given out in this use

    # segments

    def num_free(self) -> int:
        while self._emptied and (not self._holds or next(iter(self._holds)) > self._emptied[0][0]):
            heapq.heappush(self._free, self._emptied.popleft()[1])
        return len(self._free)

    def next_free(self, count: int) -> list[int]:
        """Returns the segments that begin next, in that order."""
        return heapq.nsmallest(count, self._free)

    def begin(self) -> int:
        segment = heapq.heappop(self._free)
        self.uses[segment] += 1
        self._cleared[segment] = False
        return segment

    def seal(self, segment: int) -> None:
        """Seals a full segment; its last rows are still live."""
        self._sealed[segment] = True

    def _empty(self, segment: int) -> None:
        self._sealed[segment] = False
        self.num_garbage -= self.num_rows
        self._emptied.append((self._newest_hold, segment))
        if self._piece is not None and self._piece.segment == segment:
            self._piece = None

    # rows

    def add(self, segment: int, num_rows: int) -> None:
        self._live[segment] += num_rows
        self.num_live += num_rows

    def free(self, places: Places) -> None:
        freed = np.bincount(places // np.uint32(self.num_rows), minlength=self.count)
        changed = np.flatnonzero(freed)
        self._live[changed] -= freed[changed]
        assert (self._live[changed] >= 0).all(), "more rows of a segment are freed than are live in it"
        self.num_live -= len(places)
        self.num_garbage += len(places)
        for segment in changed[(self._live[changed] == 0) & self._sealed[changed]].tolist():
            self._empty(segment)

    # holds

    def enter_hold(self) -> int:
        self._newest_hold += 1
        self._holds[self._newest_hold] = None
        return self._newest_hold

    def leave_hold(self, hold: int) -> None:
        del self._holds[hold]

    @property
    def any_held(self) -> bool:
        """Whether an emptied segment waits for holds to be left."""
        return self.num_free() >= 0 and len(self._emptied) > 0

    # garbage

    def next_piece(self, most_pages: int, room: int, *, urgent: bool) -> Piece | None:
        """Returns what to move next; None if there is not much garbage or, if `urgent`, if there is none.

        `room`: rows that fit into the open segment. Chooses a segment only if all its rows fit: even if the tiered
        store frees them slowly, the newest such segment can be emptied later."""
        piece = self._piece
        if piece is None:
            segment = self._victim(room, urgent=urgent)
            if segment is None:
                return None
            piece = Piece(segment, 0, 0)
        segment, first = piece.segment, piece.first_page + piece.num_pages
        piece = Piece(segment, first, min(most_pages, self.num_pages - first))
        self._cleared[segment] = first + piece.num_pages == self.num_pages
        self._piece = None if self._cleared[segment] else piece
        return piece

    def try_again(self) -> bool:
        """Makes segments eligible again whose pieces were all given out and whose rows the tiered store has not yet
        freed or settled. Returns whether there are any."""
        again = self._sealed & self._cleared
        self._cleared[again] = False
        return bool(again.any())

    def _victim(self, room: int, *, urgent: bool) -> int | None:
        """Returns the sealed segment with the fewest live rows, if it is worth emptying."""
        sealed = np.flatnonzero(self._sealed & ~self._cleared)
        if not len(sealed):
            return None
        segment = int(sealed[np.argmin(self._live[sealed])])
        num_live = int(self._live[segment])
        num_dead = self.num_rows - num_live
        if num_live > room + self.num_free() * self.num_rows:
            return None
        if urgent:
            return segment if num_dead else None
        much = 2 * self.num_garbage > len(sealed) * self.num_rows and 2 * num_dead > self.num_rows
        few_free = FEW * self.num_free() < self.count and 8 * num_dead > self.num_rows
        return segment if much or few_free else None
