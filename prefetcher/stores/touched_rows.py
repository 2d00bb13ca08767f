"""Numbers the rows of a group, to index arrays and bits: all of them, or those that are touched, by first write.

Cells (`cell_loops.py`) map a row to its number and back to its key, in at most 12 bytes per touched row.
"""

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from rowcast.job.tables import KEY_SHIFT, GroupSpec, make_keys
from rowcast.prefetcher.stores.cell_loops import (
    BUCKET,
    FULL_PERCENT,
    MOVED_AT_ONCE,
    REACH,
    SIZE,
    add,
    find,
    layout_for,
    select,
)
from rowcast.prefetcher.stores.row_loops import find_bits
from rowcast.prefetcher.stores.store import Keys
from rowcast.runtime.arrays import I64, U64
from rowcast.runtime.errors import RowcastError
from rowcast.runtime.stages import ThreadPool

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
MAP_NORESERVE = 0x4000  # Linux; mmap has it from Python 3.13 on


class RowsInOrder:
    """Every row has a number, table after table."""

    def __init__(self, group: GroupSpec) -> None:
        self.most, self.pool = group.num_rows, ThreadPool()  # numbers take less than a thread's wake-up
        tables, sizes = [table.index for table in group.tables], [table.num_embeddings for table in group.tables]
        ends: I64 = np.cumsum([0, *sizes])
        self._ranges = {table: (int(ends[i]), int(ends[i + 1])) for i, table in enumerate(tables)}
        self._first_keys = np.array(tables, np.int64) << KEY_SHIFT  # of each table
        self._shifts = ends[:-1] - self._first_keys  # from a table's keys to its numbers

    def of(self, keys: Keys) -> I64:
        bounds = np.append(np.searchsorted(keys, self._first_keys), len(keys))  # a table's keys are contiguous
        numbers: I64 = keys + np.repeat(self._shifts, np.diff(bounds))
        return numbers

    def added(self, keys: Keys) -> I64:
        return self.of(keys)

    def range_of(self, table: int) -> tuple[int, int]:
        """Returns the number of a table's first row, and the number after its last row's."""
        return self._ranges[table]

    def shifts(self) -> I64:
        """Returns i64 [tables of the job, up to the group's last]: key + shift is the row's number."""
        shifts = np.zeros(max(self._ranges) + 1, np.int64)
        shifts[self._first_keys >> KEY_SHIFT] = self._shifts
        return shifts

    def found(self, bits: U64, tables: Sequence[int], block: int) -> Iterator[tuple[Keys, I64]]:
        for table in tables:
            first, end = self._ranges[table]
            at = first
            while at < end:
                numbers: I64 = np.empty(block, np.int64)
                count, at = find_bits(bits, at, end, numbers)
                if count:
                    yield make_keys(table, numbers[:count] - first), numbers[:count]


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
        """Readers that come later wait, so that a stream of them cannot keep this thread waiting."""
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

    They may exceed the machine's memory. `huge_pages`: use them if the system grants them. Only for words that are
    written from one end: elsewhere the first write of a row would clear 2 MiB."""
    try:
        memory = mmap.mmap(-1, max(1, num_words) * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, OverflowError, ValueError):
        raise MemoryError from None
    memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint64, num_words)


def most_indexed(num_rows: int) -> int:
    """Returns how many of a group's `num_rows` rows can be numbered, as a cell's bits allow."""
    return int(2 ** (64 + MOST_IMPLIED - (num_rows - 1).bit_length())) - 1


class TouchedRows:
    """Rows have numbers 0 to `count` - 1. Threads look rows up together; one that adds rows excludes the others."""

    def __init__(self, group: GroupSpec, most: int, limit: str = MEMORY_LIMIT) -> None:
        """`most`: how many rows may be added, or fewer if a cell's bits do not suffice. `limit`: what sets `most`, and
        what to change. Raises MemoryError."""
        indexed = most_indexed(group.num_rows)
        self.count, self.most = 0, min(most, indexed)
        self._group, self._in_order = group, RowsInOrder(group)
        self._limit = limit if most <= indexed else INDEX_LIMIT
        self._layout = layout_for(group.num_rows, self.most)
        size = REACH << int(self._layout.implied)
        self._most_buckets = max(size, 100 * self.most // (FULL_PERCENT * BUCKET) + 1)
        self._cells = reserved((self._most_buckets + REACH) * BUCKET, huge_pages=True)
        self._sizes = np.array([size, size, 0], np.int64)
        self._spare = np.empty(((MOVED_AT_ONCE + 2 * REACH) * BUCKET, 2), np.uint64)
        self._shifts = self._in_order.shifts()
        self._lock = SharedLock()
        self.pool = ThreadPool()

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return int(self._sizes[SIZE]) * BUCKET * 8

    def of(self, keys: Keys) -> I64:
        """Returns the rows' numbers, ABSENT for rows that were never added."""
        return self._looked_up(keys)[0]

    def added(self, keys: Keys) -> I64:
        """Returns the rows' numbers; new rows get the next ones. Beyond `most`, adds none and raises RowcastError."""
        numbers, num_new = self._looked_up(keys)
        if not num_new:
            return numbers
        with self._lock.changing():
            num_new = self._find(keys, numbers)  # another thread may have added some since
            if self.count + num_new > self.most:
                raise RowcastError(
                    f"group {self._group.name} has {self.count + num_new} trained rows, "
                    f"{self._limit.format(most=self.most, rows=self._group.num_rows)}"
                )
            self.count = add(
                self._cells,
                self._sizes,
                self._layout,
                self._spare,
                self._shifts,
                keys,
                numbers,
                self.count,
                self._most_buckets,
            )
        return numbers

    def _looked_up(self, keys: Keys) -> tuple[I64, int]:
        numbers = np.empty(len(keys), np.int64)
        with self._lock.reading():
            absent = self.pool.share(lambda *own: self._find(keys[slice(*own)], numbers[slice(*own)]), 0, len(keys))
        return numbers, sum(absent)

    def _find(self, keys: Keys, numbers: I64) -> int:
        """Sets the numbers. Returns how many are ABSENT. The lock is held."""
        return find(self._cells, self._sizes, self._layout, self._shifts, keys, numbers)

    def found(self, bits: U64, tables: Sequence[int], block: int) -> Iterator[tuple[Keys, I64]]:
        ranges = [self._in_order.range_of(table) for table in tables]
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
