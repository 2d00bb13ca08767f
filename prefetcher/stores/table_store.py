"""Keeps the rows of a group in one array, table after table: the common part of the memory and the mapped store."""

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.row_loops import Marks, Words, gather, scatter
from rowcast.prefetcher.stores.store import FINISHED, Finished, Keys, Records, RowNumbers, RowStore
from rowcast.runtime.arrays import I64


class TableStore(RowStore):
    """Takes u64 `words` [num_rows, record_bytes / 8] and u8 `marks` [num_rows], see `row_loops`."""

    def __init__(self, group: GroupSpec, words: Words, marks: Marks) -> None:
        self._name, self._numbers = group.name, RowNumbers(group)
        self._words, self._marks = words, marks

    def read(self, keys: Keys, out: Records) -> Finished:
        numbers = self._numbers_of(keys)
        if gather(self._words, self._marks, numbers, out.view(np.uint64)):
            return Finished(absent=np.flatnonzero(self._marks[numbers] == 0))
        return FINISHED

    def write(self, keys: Keys, rows: Records) -> Finished:
        scatter(rows.view(np.uint64), self._numbers_of(keys), self._words, self._marks)
        return FINISHED

    def close(self, checkpoint: str | None = None) -> None:
        self._words, self._marks = np.empty((0, 0), np.uint64), np.empty(0, np.uint8)

    def _numbers_of(self, keys: Keys) -> I64:
        assert len(self._marks), f"the store of group {self._name} is closed, but {len(keys)} rows were requested"
        return self._numbers.of(keys)
