"""The segments of a file and their pages: which are in use, how many of their rows live, which holds may read them.

    free -> open     rows are appended; one segment at a time
         -> sealed   full and on the file
         -> emptied  its last row was freed; it is free once every earlier hold has been left

    u64 word    0           1 ...               1 + rows ...
    page        checksum    keys of its rows    their records, side by side

The checksum starts from the page's identity, which no other page and no earlier content of this page has. It adds
everything else on the page, as 32-bit words w0, w1, ...: w0 * c0 + w1 * c1 + ... modulo 2^64, with odd constants. It
detects every change of one word and every stale or misplaced page, and misses one in 2^64 of all other changes.

Nothing here locks or does any I/O.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rowcast.prefetcher.stores.row_loops import Words
from rowcast.prefetcher.stores.store import Places
from rowcast.runtime.arrays import GOLDEN, I32, I64, U64, mix
from rowcast.runtime.compiled import c_posix_fadvise, c_pread, compiled_loop, compiled_part

WORD_BYTES = 8
BLOCK_BYTES = 4096  # a page is a multiple of it

PAGES_AHEAD = 256  # how many pages ahead the disk reads
WILL_NEED = 3  # POSIX_FADV_WILLNEED

# outcomes of `read_rows`
DONE, UNREADABLE, CHANGED, OTHER_ROW = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class PageLayout:
    nbytes: int
    num_rows: int

    @property
    def num_words(self) -> int:
        return self.nbytes // WORD_BYTES


def page_layout(record_bytes: int) -> PageLayout:
    """Chooses the smallest page that rows fill to three quarters; disks read 4 and 16 KiB at the same rate."""
    row_bytes, nbytes = WORD_BYTES + record_bytes, BLOCK_BYTES
    while 4 * ((nbytes - WORD_BYTES) // row_bytes) * row_bytes < 3 * nbytes:
        nbytes += BLOCK_BYTES
    return PageLayout(nbytes, (nbytes - WORD_BYTES) // row_bytes)


def column_constants(num_words: int) -> I64:
    """Returns the odd constant of each 32-bit word of a record, i64 [num_words]: SplitMix64 with the lowest bit set."""
    index = np.arange(1, num_words + 1, dtype=np.uint64)
    return (mix(index * GOLDEN) | np.uint64(1)).view(np.int64)


@compiled_part
def checksum(halves: I32, page: int, constants: I64, identity: int) -> int:
    """Returns the checksum of halves[page], without the checksum's word. `halves`: pages as 32-bit words."""
    content, weights = halves[page, 2:], constants[2:]
    total: int = (identity + 1) * constants[0]
    for half in range(len(content)):  # from 0: nine times as fast, because the loop vectorizes
        total += content[half] * weights[half]
    return total


@compiled_loop
def seal(pages: U64, halves: I32, constants: I64, identities: I64) -> None:
    """Sets the pages' checksums. `halves`: the same memory as `pages`."""
    for page in range(len(pages)):
        pages[page, 0] = checksum(halves, page, constants, identities[page])


@compiled_loop
def whole_pages(pages: U64, halves: I32, constants: I64, identities: I64) -> int:
    """Returns how many pages there are before the first one with a wrong checksum."""
    for page in range(len(pages)):
        if pages[page, 0] != np.uint64(checksum(halves, page, constants, identities[page])):
            return page
    return len(pages)


@compiled_loop
def put_rows(pages: U64, rows: int, first: int, keys: I64, records: Words) -> None:
    """Writes rows at the places `first`, `first` + 1, ... of `pages`, which have `rows` rows each."""
    width = records.shape[1]
    for i in range(len(keys)):
        page, row = (first + i) // rows, (first + i) % rows
        pages[page, 1 + row] = keys[i]
        start = 1 + rows + row * width
        for word in range(width):
            pages[page, start + word] = records[i, word]


@compiled_part
def take_row(pages: U64, page: int, rows: int, row: int, key: int, out: Words, at: int) -> bool:
    """Sets out[at] to a row's record. Returns whether it is there."""
    if pages[page, 1 + row] != key:
        return False
    start = 1 + rows + row * out.shape[1]
    for word in range(out.shape[1]):
        out[at, word] = pages[page, start + word]
    return True


@compiled_loop
def take_rows(pages: U64, rows: int, places: I64, order: I64, keys: I64, out: Words) -> int:
    """Sets out[order[n]] to the record at places[n] of `pages`. Returns how many it found before the first missing
    one."""
    for n in range(len(places)):
        i = order[n]
        if not take_row(pages, places[n] // rows, rows, places[n] % rows, keys[i], out, i):
            return n
    return len(places)


@compiled_loop
def read_rows(
    descriptor: int,
    layout: tuple[int, int],
    segment_pages: int,
    identities: I64,
    constants: I64,
    page: U64,
    halves: I32,
    places: I64,
    order: I64,
    keys: I64,
    out: Words,
) -> tuple[int, int, int]:
    """Sets out[order[n]] to the record at places[n] of the file; places ascend.

    `layout`: bytes and rows of a page. `identities`: of the first page of each segment. Overwrites `page` u64 [1,
    words]; `halves` is the same memory. Returns an outcome, the rows that were read, and the pages."""
    nbytes, rows = layout
    asked, last_asked, pages_asked = 0, -1, 0
    current, num_pages = -1, 0
    for n in range(len(places)):
        while asked < len(places) and pages_asked < num_pages + PAGES_AHEAD:
            if places[asked] // rows != last_asked:
                last_asked = places[asked] // rows
                c_posix_fadvise(descriptor, last_asked * nbytes, nbytes, WILL_NEED)
                pages_asked += 1
            asked += 1
        if places[n] // rows != current:
            current = places[n] // rows
            if c_pread(descriptor, page.ctypes.data, nbytes, current * nbytes) != nbytes:
                return UNREADABLE, n, num_pages
            num_pages += 1
            identity = identities[current // segment_pages] + current % segment_pages
            if page[0, 0] != np.uint64(checksum(halves, 0, constants, identity)):
                return CHANGED, n, num_pages
        i = order[n]
        if not take_row(page, 0, rows, places[n] % rows, keys[i], out, i):
            return OTHER_ROW, n, num_pages
    return DONE, len(places), num_pages


SPARE = 1  # segments that only rows of tidied segments may begin
FEW = 32  # garbage is also collected when less than one segment in FEW is free


class SegmentPiece(NamedTuple):
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
        self._piece: SegmentPiece | None = None  # the newest one, if its segment has more
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
            self._sealed[segment] = False
            self.num_garbage -= self.num_rows
            self._emptied.append((self._newest_hold, segment))
            if self._piece is not None and self._piece.segment == segment:
                self._piece = None

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

    def next_piece(self, most_pages: int, room: int, *, urgent: bool) -> SegmentPiece | None:
        """Returns what to move next; None if there is not much garbage or, if `urgent`, if there is none.

        `room`: rows that fit into the open segment. Chooses a segment only if all its rows fit: even if the tiered
        store frees them slowly, the newest such segment can be emptied later."""
        piece = self._piece
        if piece is None:
            segment = self._victim(room, urgent=urgent)
            if segment is None:
                return None
            piece = SegmentPiece(segment, 0, 0)
        segment, first = piece.segment, piece.first_page + piece.num_pages
        piece = SegmentPiece(segment, first, min(most_pages, self.num_pages - first))
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
