"""Numbers the rows of a group as they are first written, to index arrays and bits.

`IndexedRows` keeps 4 bytes for each row of a group. In larger groups, `TouchedRows` keeps at most 12 bytes for each
touched row: cells (`number_loops.py`) map a row to its number and back to its key.
"""

import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from rowcast.job.tables import KEY_SHIFT, GroupSpec, make_keys
from rowcast.prefetcher.stores.number_loops import (
    BUCKET,
    FULL_PERCENT,
    MOVED_AT_ONCE,
    REACH,
    SIZE,
    add,
    add_to_index,
    find,
    find_in_index,
    layout_for,
    select,
    select_in_index,
)
from rowcast.prefetcher.stores.store import Keys
from rowcast.runtime.arrays import I64, U32, U64
from rowcast.runtime.errors import RowcastError
from rowcast.runtime.stages import ThreadPool

MOST_INDEXED = 2**24  # rows of a group, so an index takes at most 64 MiB
NUMBER_BYTES = 4  # for each row of a group
ROW_BYTES = 12  # at most, for each touched row
MOST_IMPLIED = 12  # bits of a hash; each doubles the smallest directory, 64 MiB at this number
SORTED_AT_ONCE = 2**20  # rows, or a sixteenth of them if that is more; at most twice as many
BUCKETS_AT_ONCE = 2**13  # visited while other threads wait
HASHES = 2**32  # highest halves of hashes
MEMORY_LIMIT = "but this machine's memory holds at most {most}; use store.kind tiered, or a machine with more memory"
INDEX_LIMIT = (
    "but an index of its {rows} rows holds at most {most}; lower num_embeddings of its tables: half the rows make room "
    "for twice as many trained ones"
)
HUGE_PAGE = 2**21
MAP_NORESERVE = 0x4000  # Linux; mmap has it from Python 3.13 on


class SharedLock:
    """Any number of threads hold it to read, or one thread to change what they read."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._num_reading, self._num_changing = 0, 0  # the latter with those that wait for the readers

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._free:
            self._free.wait_for(lambda: not self._num_changing)
            self._num_reading += 1
        try:
            yield
        finally:
            with self._free:
                self._num_reading -= 1
                self._free.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Later readers wait, so that a stream of them cannot block this thread."""
        with self._free:
            self._num_changing += 1
            try:
                self._free.wait_for(lambda: not self._num_reading)
                yield  # holds the condition, so that nobody else reads or changes
            finally:
                self._num_changing -= 1
                self._free.notify_all()


def reserved(num_words: int, *, huge_pages: bool = False) -> U64:
    """Returns u64 [num_words] of zeros that take memory page by page as they are written. Raises MemoryError.

    They may exceed the machine's memory. `huge_pages`: use them if the system grants them and the words fill one. Only
    for words that are written from one end: elsewhere the first write of a row would clear 2 MiB."""
    huge_pages = huge_pages and num_words * 8 >= HUGE_PAGE
    nbytes = max(1, num_words) * 8 + (HUGE_PAGE if huge_pages else 0)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, OverflowError, ValueError):
        raise MemoryError from None
    memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    words: U64 = np.frombuffer(memory, np.uint64)
    first = -words.ctypes.data % HUGE_PAGE // 8 if huge_pages else 0  # few kernels begin a map at one
    return words[first : first + num_words]


def most_indexed(num_rows: int) -> int:
    """Returns how many of a group's `num_rows` rows can be numbered, as a cell's bits allow."""
    return int(2 ** (64 + MOST_IMPLIED - (num_rows - 1).bit_length())) - 1


def numbered(group: GroupSpec, most: int) -> "NumberedRows":
    """Returns numbers for at most `most` rows of the group. Raises MemoryError."""
    return IndexedRows(group, most) if group.num_rows <= MOST_INDEXED else TouchedRows(group, most)


class NumberedRows(ABC):
    """Rows have numbers 0 to `count` - 1. Threads look rows up together; one that adds rows excludes the others."""

    def __init__(self, group: GroupSpec, most: int, limit: str = MEMORY_LIMIT) -> None:
        """`most`: how many rows may be added. `limit`: what sets it, and what to change."""
        self.count, self.most = 0, most
        self._group, self._limit = group, limit
        ends = np.cumsum([0, *(table.num_embeddings for table in group.tables)]).tolist()
        # where each table's rows begin and end in the group
        self._ranges = {table.index: (ends[i], ends[i + 1]) for i, table in enumerate(group.tables)}
        self.shifts: I64 = np.zeros(max(self._ranges) + 1, np.int64)  # a row's position in the group, less its key
        for table, (first, _) in self._ranges.items():
            self.shifts[table] = first - (table << KEY_SHIFT)
        self._lock = SharedLock()
        self.pool = ThreadPool()

    def of(self, keys: Keys) -> I64:
        """Returns the rows' numbers, ABSENT for rows that were never added."""
        return self._looked_up(keys)[0]

    def added(self, keys: Keys) -> I64:
        """Returns the rows' numbers; new rows get the next ones. Beyond `most`, adds none and raises RowcastError."""
        count = self.count
        numbers, num_new = self._looked_up(keys)
        if not num_new:
            return numbers
        with self._lock.changing():
            if self.count != count:  # another thread has added some since
                num_new = self._find(keys, numbers)
            if self.count + num_new > self.most:
                raise RowcastError(
                    f"group {self._group.name} has {self.count + num_new} trained rows, "
                    f"{self._limit.format(most=self.most, rows=self._group.num_rows)}"
                )
            self.count = self._add(keys, numbers)
        return numbers

    def _looked_up(self, keys: Keys) -> tuple[I64, int]:
        numbers = np.empty(len(keys), np.int64)
        with self._lock.reading():
            absent = self.pool.share(lambda *own: self._find(keys[slice(*own)], numbers[slice(*own)]), 0, len(keys))
        return numbers, sum(absent)

    @abstractmethod
    def _find(self, keys: Keys, numbers: I64) -> int:
        """Sets the numbers. Returns how many are ABSENT. The lock is held."""

    @abstractmethod
    def _add(self, keys: Keys, numbers: I64) -> int:
        """Numbers the ABSENT rows. Returns how many rows have a number then. No other thread looks rows up."""

    @abstractmethod
    def found(self, bits: U64, tables: Sequence[int], block: int) -> Iterator[tuple[Keys, I64]]: ...


class IndexedRows(NumberedRows):
    """The number of each row of a group, or none, in one array."""

    def __init__(self, group: GroupSpec, most: int) -> None:
        super().__init__(group, most)
        # by position in the group: number + 1, or 0; cleared now, so that no step pays for it
        self.index: U32 = np.full(group.num_rows, 0, np.uint32)

    def _find(self, keys: Keys, numbers: I64) -> int:
        return find_in_index(self.index, self.shifts, keys, numbers)

    def _add(self, keys: Keys, numbers: I64) -> int:
        return add_to_index(self.index, self.shifts, keys, numbers, self.count)

    def found(self, bits: U64, tables: Sequence[int], block: int) -> Iterator[tuple[Keys, I64]]:
        for table in tables:
            first, end = self._ranges[table]
            at = first
            while at < end:
                positions, numbers = np.empty(block, np.int64), np.empty(block, np.int64)
                count, at = select_in_index(self.index, bits, at, end, positions, numbers)
                if count:
                    yield make_keys(table, positions[:count] - first), numbers[:count]


class TouchedRows(NumberedRows):
    """The numbers of touched rows in cells of a hash."""

    def __init__(self, group: GroupSpec, most: int, limit: str = MEMORY_LIMIT) -> None:
        """`most`: how many rows may be added, or fewer if a cell's bits do not suffice. Raises MemoryError."""
        indexed = most_indexed(group.num_rows)
        super().__init__(group, min(most, indexed), limit if most <= indexed else INDEX_LIMIT)
        self._layout = layout_for(group.num_rows, self.most)
        size = REACH << int(self._layout.implied)
        self._most_buckets = max(size, 100 * self.most // (FULL_PERCENT * BUCKET) + 1)
        self._cells = reserved((self._most_buckets + REACH) * BUCKET, huge_pages=True)
        self._sizes = np.array([size, size, 0], np.int64)
        self._spare = np.empty(((MOVED_AT_ONCE + 2 * REACH) * BUCKET, 2), np.uint64)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return int(self._sizes[SIZE]) * BUCKET * 8

    def _find(self, keys: Keys, numbers: I64) -> int:
        return find(self._cells, self._sizes, self._layout, self.shifts, keys, numbers)

    def _add(self, keys: Keys, numbers: I64) -> int:
        cells, layout, most = self._cells, self._layout, self._most_buckets
        return add(cells, self._sizes, layout, self._spare, self.shifts, keys, numbers, self.count, most)

    def found(self, bits: U64, tables: Sequence[int], block: int) -> Iterator[tuple[Keys, I64]]:
        ranges = [self._ranges[table] for table in tables]
        start, end = ranges[0][0], ranges[-1][1]
        while start < end:
            positions, start = self._first_positions(bits, start, end)
            for table, (first, last) in zip(tables, ranges, strict=True):
                own = positions[slice(*np.searchsorted(positions, (first, last)))]
                for at in range(0, len(own), block):
                    keys = make_keys(table, own[at : at + block] - first)
                    yield keys, self.of(keys)

    def _first_positions(self, bits: U64, start: int, end: int) -> tuple[I64, int]:
        """Returns the first positions from `start` whose rows' bits are set, ascending, and where to continue."""
        room = max(SORTED_AT_ONCE, self.count // 16)
        found = np.empty(2 * room + 2 * (BUCKETS_AT_ONCE + 2 * REACH) * BUCKET, np.int64)
        count, low = 0, 0
        while low < HASHES:
            with self._lock.reading():
                high = min(HASHES, low + max(1, HASHES * BUCKETS_AT_ONCE // int(self._sizes[SIZE])))
                count = select(self._cells, self._sizes, self._layout, (low, high), bits, (start, end), found, count)
            low = high
            if count > 2 * room:
                found[:count].partition(room)
                count, end = room, int(found[room])
        found = found[:count]
        found.sort()
        return found, end
