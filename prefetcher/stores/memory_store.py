"""Keeps rows in this process's memory, allocated on first write."""

import os

import numpy as np

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.row_loops import gather_for, scatter_for
from rowcast.prefetcher.stores.store import ABSENT, FINISHED, Finished, Keys, Records, RowNumbers, RowStore
from rowcast.prefetcher.stores.touched_rows import RowsInOrder, TouchedRows, reserved
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.stages import ThreadPool

# Rows of a group up to this size are stored in key order, which is faster to read. In a larger group they are stored in
# order of first write: otherwise, if few rows are trained, each would take a separate page.
IN_ORDER_BYTES = 2**30


def open_store(job: Job, group: GroupSpec) -> "MemoryStore":
    return MemoryStore(group)


class MemoryStore(RowStore):
    """All tables of a group in one lazily committed array. Nothing outlives the process."""

    def __init__(self, group: GroupSpec) -> None:
        nbytes, width = group.num_rows * group.record_bytes, group.record_bytes // 8
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        try:
            numbers: RowNumbers = (
                RowsInOrder(group)
                if nbytes <= IN_ORDER_BYTES
                else TouchedRows(group, min(group.num_rows, memory_bytes // group.record_bytes))
            )
            from_one_end = isinstance(numbers, TouchedRows)
            words = reserved(numbers.most * width, huge_pages=from_one_end).reshape(numbers.most, width)
            marks = reserved(-(-numbers.most // 8), huge_pages=from_one_end).view(np.uint8)[: numbers.most]
        except MemoryError:
            raise ConfigError(
                f"tables of group {group.name} need {nbytes / 2**30:.1f} GiB of addresses, more than this process may "
                "reserve; allow it more (ulimit -v, vm.overcommit_memory), or use fewer rows"
            ) from None
        self.numbers: RowNumbers = numbers
        # u64 [numbers.most, record_bytes / 8] and u8 [numbers.most]: `row_loops`
        self._name, self._words, self._marks = group.name, words, marks
        self._scatter = scatter_for(words)
        self._pool = ThreadPool()

    def use_threads(self, pool: ThreadPool) -> None:
        self._pool = self.numbers.pool = pool

    def read(self, keys: Keys, out: Records) -> Finished:
        numbers, words = self._numbers_for(keys).of(keys), out.view(np.uint64)
        gather = gather_for(words)

        def work(first: int, end: int) -> int:
            return gather(self._words, self._marks, numbers[first:end], words[first:end])

        if any(self._pool.share(work, 0, len(keys))):
            return Finished(absent=np.flatnonzero((numbers == ABSENT) | (self._marks[numbers] == 0)))
        return FINISHED

    def write(self, keys: Keys, rows: Records) -> Finished:
        return self.write_numbered(keys, self._numbers_for(keys).added(keys), rows)

    def write_numbered(self, keys: Keys, numbers: I64, rows: Records) -> Finished:
        assert len(self._marks), f"the store of group {self._name} is closed, but {len(keys)} rows were written"
        words = rows.view(np.uint64)

        def work(first: int, end: int) -> None:
            self._scatter(words[first:end], numbers[first:end], self._words, self._marks)

        self._pool.share(work, 0, len(keys))
        return FINISHED

    def close(self) -> None:
        self._words, self._marks = np.empty((0, 0), np.uint64), np.empty(0, np.uint8)

    def _numbers_for(self, keys: Keys) -> RowNumbers:
        assert len(self._marks), f"the store of group {self._name} is closed, but {len(keys)} rows were requested"
        return self.numbers
