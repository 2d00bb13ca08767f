"""Numbers the rows of a group, so that one array, or one bit, has a place for each of them."""

import os
from collections.abc import Iterator

import numpy as np

from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec, make_keys
from rowcast.prefetcher.stores.row_loops import find_bits
from rowcast.prefetcher.stores.store import Keys
from rowcast.runtime.arrays import I64, U64


class RowsInOrder:
    """Every row has a number, table after table."""

    def __init__(self, group: GroupSpec) -> None:
        self.most = group.num_rows
        sizes = [table.num_embeddings for table in group.tables]
        ends = np.cumsum([0, *sizes])
        self._ranges = {table.index: (int(ends[i]), int(ends[i + 1])) for i, table in enumerate(group.tables)}
        self._first = np.zeros(max(self._ranges) + 1, np.int64)  # number of each table's first row
        self._first[list(self._ranges)] = ends[:-1]

    def of(self, keys: Keys) -> I64:
        numbers: I64 = self._first[keys >> KEY_SHIFT]
        numbers += keys & ROW_MASK
        return numbers

    def added(self, keys: Keys) -> I64:
        return self.of(keys)

    def found(self, bits: U64, table: int, block: int) -> Iterator[tuple[Keys, I64]]:
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
