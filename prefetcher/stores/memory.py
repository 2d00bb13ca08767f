"""Rows in this process's memory. A row takes memory only once it was trained; until then its first value is computed when it is read."""

import mmap
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from prefetcher.compiled import compiled_loop, prefetch
from prefetcher.stores.base import FINISHED, Finished, Keys, Records
from prefetcher.stores.initializer import initial_rows
from protocol.errors import ConfigError
from protocol.tables import KEY_SHIFT, ROW_MASK, GroupSpec, make_keys

Words = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]

ROWS_AHEAD = 8  # asked for before they are copied
LINE_WORDS = 8  # of a cache line


@compiled_loop
def gather(source: Words, positions: Positions, out: Words) -> None:
    """out[i] = source[positions[i]], row by row."""
    width, words = source.shape[1], source.reshape(-1)
    for i in range(len(positions)):
        if i + ROWS_AHEAD < len(positions):
            for word in range(0, width, LINE_WORDS):
                prefetch(words, positions[i + ROWS_AHEAD] * width + word)
        row = positions[i]
        for word in range(width):
            out[i, word] = source[row, word]


@compiled_loop
def scatter(source: Words, positions: Positions, out: Words, present: npt.NDArray[np.bool_]) -> None:
    """out[positions[i]] = source[i], and marks the rows present."""
    for i in range(len(positions)):
        row = positions[i]
        present[row] = True
        for word in range(source.shape[1]):
            out[row, word] = source[i, word]


def lazy_array(num_rows: int, num_words: int) -> Words:
    """u64 [num_rows, num_words] of zeros that take memory page by page, as they are written. Raises MemoryError.

    numpy would ask for huge pages: then the first write of a row clears 2 MiB, and a sparse table takes all of its memory at once.
    """
    try:
        memory = mmap.mmap(-1, max(1, num_rows * num_words * 8))
    except (OSError, OverflowError, ValueError):
        raise MemoryError from None
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint64, num_rows * num_words).reshape(num_rows, num_words)


class MemoryStore:
    """All tables of a group in one lazily committed array, table after table."""

    def __init__(self, group: GroupSpec, seed: int) -> None:
        self._group = group
        self._seed = seed
        self._tables = {table.index: table for table in group.tables}
        sizes = [table.num_embeddings for table in group.tables]
        self._first = dict(zip(self._tables, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
        try:
            self._words: Words = lazy_array(sum(sizes), group.record_bytes // 8)
            self._present = np.zeros(sum(sizes), np.bool_)
        except MemoryError:
            raise ConfigError(
                f"tables of group {group.name} need {sum(sizes) * group.record_bytes / 2**30:.1f} GiB, more than this machine can "
                f"address; use fewer rows or a smaller embedding_dim"
            ) from None

    def read(self, keys: Keys, out: Records) -> Finished:
        positions = self._positions(keys)
        present = self._present[positions]
        if present.all():
            gather(self._words, positions, out.view(np.uint64))
            return FINISHED
        words = out.view(np.uint64)
        here = np.flatnonzero(present)
        if len(here):
            rows = np.empty((len(here), words.shape[1]), np.uint64)
            gather(self._words, positions[here], rows)
            words[here] = rows
        absent = np.flatnonzero(~present)
        out[absent] = first_records(self._group, self._seed, keys[absent])
        return FINISHED

    def write(self, keys: Keys, rows: Records, step: int | None) -> Finished:
        scatter(rows.view(np.uint64), self._positions(keys), self._words, self._present)
        return FINISHED

    def hint(self, keys: Keys, needed_at_step: int) -> None:
        """Memory needs no warning."""

    def scan(self, table: int, block: int) -> Iterator[tuple[Keys, Records]]:
        first, size = self._first[table], self._tables[table].num_embeddings
        rows = np.flatnonzero(self._present[first : first + size])
        for start in range(0, len(rows), block):
            chosen = rows[start : start + block]
            records = np.empty((len(chosen), self._words.shape[1]), np.uint64)
            gather(self._words, chosen + first, records)
            yield make_keys(table, chosen), records.view(np.uint8)

    @property
    def host_bytes(self) -> int:
        return int(self._present.sum()) * self._group.record_bytes + len(self._present)

    def close(self) -> None:
        self._words = np.empty((0, 0), np.uint64)

    def _positions(self, keys: Keys) -> Positions:
        """Where keys lie in the array; keys are ascending or ascending in two parts, so table by table costs little."""
        positions = keys & ROW_MASK
        tables = keys >> KEY_SHIFT
        for table in np.unique(tables).tolist():
            positions[tables == table] += self._first[table]
        return positions


def first_records(group: GroupSpec, seed: int, keys: Keys) -> Records:
    """Records of rows that were never trained: initial weights, initial optimizer state, zero padding. u8 [n, record_bytes]."""
    records = np.zeros((len(keys), group.record_floats), np.float32)
    tables = keys >> KEY_SHIFT
    for table in group.tables:
        chosen = np.flatnonzero(tables == table.index)
        if len(chosen):
            records[chosen, : group.embedding_dim] = initial_rows(seed, table, keys[chosen] & ROW_MASK)
    for part in group.parts:
        if part.initial:
            records[:, part.offset : part.offset + part.width] = part.initial
    return records.view(np.uint8)
