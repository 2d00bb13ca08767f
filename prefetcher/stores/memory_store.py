"""Keeps rows in this process's memory, one after the other as they are first written."""

import os

import numpy as np

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.row_loops import stored_bytes
from rowcast.prefetcher.stores.store import ABSENT, FINISHED, Finished, Keys, Records, RowStore
from rowcast.prefetcher.stores.stored_rows import StoredRows
from rowcast.prefetcher.stores.touched_rows import NumberedRows, numbered
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError


def open_store(job: Job, group: GroupSpec) -> "MemoryStore":
    return MemoryStore(group)


class MemoryStore(RowStore):
    """All rows of a group in one lazily committed array. Nothing outlives the process."""

    def __init__(self, group: GroupSpec) -> None:
        row_bytes = stored_bytes(group.record_bytes)
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        try:
            self.numbers: NumberedRows = numbered(group, min(group.num_rows, memory_bytes // row_bytes))
            self.rows: StoredRows = StoredRows(self.numbers.most, group.record_bytes)
        except MemoryError:
            raise ConfigError(
                f"tables of group {group.name} need {group.num_rows * row_bytes / 2**30:.1f} GiB of addresses, more "
                "than this process may reserve; allow it more (ulimit -v, vm.overcommit_memory), or use fewer rows"
            ) from None
        self._group = group

    def read(self, keys: Keys, out: Records) -> Finished:
        self._check_open(len(keys))
        numbers = self.numbers.of(keys)
        if self.rows.read(numbers, out, self.numbers.pool):
            return Finished(absent=np.flatnonzero(numbers == ABSENT))
        return FINISHED

    def write(self, keys: Keys, rows: Records) -> Finished:
        return self.write_numbered(keys, self.numbers.added(keys), rows)

    def write_numbered(self, keys: Keys, numbers: I64, rows: Records) -> Finished:
        self._check_open(len(keys))
        self.rows.write(numbers, rows, self.numbers.pool)
        return FINISHED

    def close(self) -> None:
        self.rows = StoredRows(0, self._group.record_bytes)

    def _check_open(self, num_rows: int) -> None:
        assert len(self.rows.words), (
            f"the store of group {self._group.name} is closed, but {num_rows} rows were requested or written"
        )
