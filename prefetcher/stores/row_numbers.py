"""Numbers the rows of a group, to index arrays and bits."""

import os
from collections.abc import Iterator, Sequence

import numpy as np

from rowcast.job.tables import KEY_SHIFT, GroupSpec, make_keys
from rowcast.prefetcher.stores.row_loops import find_bits
from rowcast.prefetcher.stores.store import Keys
from rowcast.runtime.arrays import I64, U64
from rowcast.runtime.stages import ThreadPool


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
            for numbers in find_numbers(bits, first, end, block):
                yield make_keys(table, numbers - first), numbers


def find_numbers(bits: U64, first: int, end: int, block: int) -> Iterator[I64]:
    """Yields the numbers from `first` to `end` - 1 whose bit is set, ascending, at most `block` at a time."""
    while first < end:
        numbers: I64 = np.empty(block, np.int64)
        count, first = find_bits(bits, first, end, numbers)
        if count:
            yield numbers[:count]


def physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
