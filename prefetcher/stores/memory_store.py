"""Keeps rows in this process's memory, one after the other as they are first written."""

import os

import numpy as np

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.row_loops import gather_for, scatter_for
from rowcast.prefetcher.stores.store import ABSENT, FINISHED, Finished, Keys, Records, RowStore
from rowcast.prefetcher.stores.touched_rows import NumberedRows, numbered, reserved
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.stages import ThreadPool


def open_store(job: Job, group: GroupSpec) -> "MemoryStore":
    return MemoryStore(group)


class MemoryStore(RowStore):
    """All rows of a group in one lazily committed array. Nothing outlives the process."""

    def __init__(self, group: GroupSpec) -> None:
        nbytes, width = group.num_rows * group.record_bytes, group.record_bytes // 8
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        try:
            numbers = numbered(group, min(group.num_rows, memory_bytes // group.record_bytes))
            words = reserved(numbers.most * width, huge_pages=True).reshape(numbers.most, width)
        except MemoryError:
            raise ConfigError(
                f"tables of group {group.name} need {nbytes / 2**30:.1f} GiB of addresses, more than this process may "
                "reserve; allow it more (ulimit -v, vm.overcommit_memory), or use fewer rows"
            ) from None
        self.numbers: NumberedRows = numbers
        self._name, self.words = group.name, words  # u64 [numbers.most, record_bytes / 8]
        self._scatter = scatter_for(words)
        self.pool = ThreadPool()

    def use_threads(self, pool: ThreadPool) -> None:
        self.pool = self.numbers.pool = pool

    def read(self, keys: Keys, out: Records) -> Finished:
        self._check_open(len(keys))
        numbers, words = self.numbers.of(keys), out.view(np.uint64)
        gather = gather_for(words)

        def work(first: int, end: int) -> int:
            return gather(self.words, numbers[first:end], words[first:end])

        if any(self.pool.share(work, 0, len(keys))):
            return Finished(absent=np.flatnonzero(numbers == ABSENT))
        return FINISHED

    def write(self, keys: Keys, rows: Records) -> Finished:
        return self.write_numbered(keys, self.numbers.added(keys), rows)

    def write_numbered(self, keys: Keys, numbers: I64, rows: Records) -> Finished:
        self._check_open(len(keys))
        words = rows.view(np.uint64)

        def work(first: int, end: int) -> None:
            self._scatter(words[first:end], numbers[first:end], self.words)

        self.pool.share(work, 0, len(keys))
        return FINISHED

    def close(self) -> None:
        self.words = np.empty((0, 0), np.uint64)

    def _check_open(self, num_rows: int) -> None:
        assert len(self.words), (
            f"the store of group {self._name} is closed, but {num_rows} rows were requested or written"
        )
