"""Keeps the records of a store in this process's memory, in whole cache lines if they are long."""

import numpy as np

from rowcast.prefetcher.stores.row_loops import Words, gather_for, scatter_for, stored_bytes
from rowcast.prefetcher.stores.store import Records
from rowcast.prefetcher.stores.touched_rows import reserved
from rowcast.runtime.arrays import I64
from rowcast.runtime.stages import ThreadPool


class StoredRows:
    def __init__(self, num_rows: int, record_bytes: int) -> None:
        """Zeros, which take memory as rows are written. Raises MemoryError."""
        width = stored_bytes(record_bytes) // 8
        self.words: Words = reserved(num_rows * width, huge_pages=True).reshape(num_rows, width)
        self._scatter = scatter_for(self.words)

    @property
    def span(self) -> tuple[int, int]:
        """The addresses of the first byte and after the last."""
        first = self.words.ctypes.data
        return first, first + self.words.nbytes

    def read(self, rows: I64, out: Records, pool: ThreadPool) -> int:
        """Sets out[i] to the record of row rows[i], and leaves it if that is negative. Returns how many it left."""
        words = out.view(np.uint64)
        gather = gather_for(words)
        return sum(pool.share(lambda *own: gather(self.words, rows[slice(*own)], words[slice(*own)]), 0, len(rows)))

    def write(self, rows: I64, records: Records, pool: ThreadPool) -> None:
        """Sets row rows[i] to records[i]; passes over negative ones."""
        words = records.view(np.uint64)
        pool.share(lambda *own: self._scatter(words[slice(*own)], rows[slice(*own)], self.words), 0, len(rows))
