"""Keeps the rows of a group in one array: the common part of the memory and the mapped store."""

import numpy as np

from rowcast.prefetcher.stores.row_loops import Marks, Words, gather_for, scatter_for
from rowcast.prefetcher.stores.store import ABSENT, FINISHED, Finished, Keys, Records, RowNumbers, RowStore
from rowcast.runtime.arrays import I64
from rowcast.runtime.stages import ThreadPool


class TableStore(RowStore):
    def __init__(self, name: str, numbers: RowNumbers, words: Words, marks: Marks) -> None:
        """`name`: the group's. u64 `words` [numbers.most, record_bytes / 8], u8 `marks` [numbers.most]: `row_loops`."""
        self.numbers: RowNumbers = numbers
        self._name, self._words, self._marks = name, words, marks
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

    def close(self, checkpoint: str | None = None) -> None:
        self._words, self._marks = np.empty((0, 0), np.uint64), np.empty(0, np.uint8)

    def _numbers_for(self, keys: Keys) -> RowNumbers:
        assert len(self._marks), f"the store of group {self._name} is closed, but {len(keys)} rows were requested"
        return self.numbers
