"""Keeps rows in this process's memory, one after the other as they are first written.

`AllStores` reads and writes rows of several groups: those in memory in one compiled call, where one thread serves all.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.number_loops import find_in_index
from rowcast.prefetcher.stores.row_loops import (
    LEAST_TO_PASS,
    Words,
    gather,
    gather_for,
    scatter,
    scatter_for,
    set_bits,
    stored_bytes,
)
from rowcast.prefetcher.stores.store import ABSENT, FINISHED, Finished, Keys, Records, RowStore, Ticket
from rowcast.prefetcher.stores.touched_rows import IndexedRows, NumberedRows, numbered, reserved
from rowcast.prefetcher.stores.tracked_store import FilledRead, TrackedStore
from rowcast.protocol.messages import RowCopies
from rowcast.runtime.arrays import I64
from rowcast.runtime.compiled import arrays_of, compiled_loop
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import mapped_bytes
from rowcast.runtime.stages import ThreadPool


class StoredRows:
    """Records in this process's memory, in whole cache lines if they are long."""

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


Rows = tuple[int, Keys, Records]  # of a group: its number, and keys with their records
ARRAYS = ("index", "shifts", "words", "bits")  # `words`: u64, `stored` a row, of which a record has `width`
PLACE = np.dtype(
    [(name, np.int64) for array in ARRAYS for name in (array, f"num_{array}")]
    + [(name, np.int64) for name in ("stored", "width", "num_keys", "records")]
)
Places = np.ndarray[tuple[int], np.dtype[np.void]]
u32_at, i64_at, u64_at = map(arrays_of, (np.uint32, np.int64, np.uint64))


class AllStores:
    """The stores of all groups; threads as in `TrackedStore`."""

    def __init__(self, stores: Sequence[TrackedStore]) -> None:
        self._stores = stores
        self._places = np.zeros(len(stores), PLACE)
        self._memory: list[MemoryStore | None] = []  # of each group, if the compiled loops can serve it
        self._kept: list[object] = []  # the loops use these arrays by their addresses
        self._nbytes, self._thread_s = 0, 0.0  # of rows that were counted
        for place, own in zip(self._places, stores, strict=True):
            store = own.store
            self._memory.append(None)
            # a class of its own may read and write in another way
            if type(store) is MemoryStore and isinstance(store.numbers, IndexedRows):
                self._memory[-1] = store
                arrays: tuple[npt.NDArray[Any], ...] = (
                    store.numbers.index,
                    store.numbers.shifts,
                    store.rows.words,
                    own.changed_bits,
                )
                self._kept += arrays
                for name, array in zip(ARRAYS, arrays, strict=True):
                    place[name], place[f"num_{name}"] = array.ctypes.data, len(array)
                place["stored"] = store.rows.words.shape[1]

    @contextmanager
    def counted(self, rows: Sequence[Rows]) -> Iterator[None]:
        """Counts these rows, and how long the threads take that share them."""
        began_s = time.perf_counter()
        yield
        num_threads = self._stores[0].numbers.pool.num_shares(max([len(keys) for _, keys, _ in rows], default=0))
        self._thread_s += num_threads * (time.perf_counter() - began_s)
        self._nbytes += sum([records.nbytes for *_, records in rows])

    def read(self, rows: Sequence[Rows]) -> list[Ticket]:
        """Does `TrackedStore.read` for each, and makes first values now if no ticket is late."""
        with self.counted(rows):
            tickets = self._read(rows)
            for ticket in tickets:
                ticket.done()
        return tickets

    def _read(self, rows: Sequence[Rows]) -> list[Ticket]:
        if not self._is_together(rows):
            return [self._stores[group].read(keys, records) for group, keys, records in rows]
        places, numbers, absent, starts = self._found(rows)
        read_each(places, numbers)
        if not absent.any():
            return [FINISHED] * len(rows)
        return [
            FilledRead(Finished(np.flatnonzero(numbers[first:end] == ABSENT)), self._stores[group], keys, records)
            for (group, keys, records), first, end in zip(rows, starts[:-1], starts[1:], strict=True)
        ]

    def write(self, rows: Sequence[Rows]) -> list[Ticket]:
        """Does `TrackedStore.write` for each."""
        if not self._is_together(rows) or any(self._stores[group].is_frozen for group, *_ in rows):
            return [self._stores[group].write(keys, records) for group, keys, records in rows]
        places, numbers, absent, starts = self._found(rows)
        for k in np.flatnonzero(absent).tolist():
            group, keys, _ = rows[k]
            numbers[starts[k] : starts[k + 1]] = self._stores[group].numbers.added(keys)
        places["bits"] = [self._stores[group].changed_bits.ctypes.data for group, *_ in rows]
        write_each(places, numbers)
        return [FINISHED] * len(rows)

    def row_copies(self, written: "AllStores") -> RowCopies:
        """Returns what was counted of rows that were read here and of those `written`, and the memory of all rows."""
        memory_bytes, huge_page_bytes = mapped_bytes(
            [rows.span for store in self._stores if (rows := store.store.rows)]
        )
        return RowCopies(
            bytes_read=self._nbytes,
            read_s=self._thread_s,
            bytes_written=written._nbytes,
            write_s=written._thread_s,
            memory_bytes=memory_bytes,
            huge_page_bytes=huge_page_bytes,
        )

    def _is_together(self, rows: Sequence[Rows]) -> bool:
        stores = [self._memory[group] for group, *_ in rows]
        if not rows or None in stores or sum([records.nbytes for *_, records in rows]) >= LEAST_TO_PASS:
            return False
        first = stores[0]
        return first is not None and first.numbers.pool.num_shares(sum([len(keys) for _, keys, _ in rows])) == 1

    def _found(self, rows: Sequence[Rows]) -> tuple[Places, I64, I64, list[int]]:
        """Returns the places of the rows, their numbers, how many of each group are ABSENT, and where each group's
        begin."""
        groups, keys, records = zip(*rows, strict=True)
        counts = list(map(len, keys))
        places = self._places[list(groups)]
        places["num_keys"], places["records"] = counts, [group_records.ctypes.data for group_records in records]
        places["width"] = [group_records.shape[1] // 8 for group_records in records]
        starts = [0, *accumulate(counts)]
        numbers, absent = np.empty(starts[-1], np.int64), np.empty(len(rows), np.int64)
        find_each(places, np.concatenate(keys), numbers, absent)
        return places, numbers, absent, starts


@compiled_loop
def find_each(places: Places, keys: Keys, numbers: I64, absent: I64) -> None:
    end = 0
    for k in range(len(places)):
        place, begin = places[k], end
        end += place["num_keys"]
        index, shifts = u32_at(place["index"], place["num_index"]), i64_at(place["shifts"], place["num_shifts"])
        absent[k] = find_in_index(index, shifts, keys[begin:end], numbers[begin:end])


@compiled_loop
def words_and_records(place: Any) -> tuple[Words, Words]:
    """Returns the store's rows and the caller's records of one group, at their addresses."""
    width, stored = place["width"], place["stored"]
    words = u64_at(place["words"], place["num_words"] * stored).reshape(place["num_words"], stored)
    return words, u64_at(place["records"], place["num_keys"] * width).reshape(place["num_keys"], width)


@compiled_loop
def read_each(places: Places, numbers: I64) -> None:
    """Copies the rows that have numbers."""
    end = 0
    for k in range(len(places)):
        begin, end = end, end + places[k]["num_keys"]
        words, records = words_and_records(places[k])
        gather(words, numbers[begin:end], records)


@compiled_loop
def write_each(places: Places, numbers: I64) -> None:
    end = 0
    for k in range(len(places)):
        begin, end = end, end + places[k]["num_keys"]
        words, records = words_and_records(places[k])
        set_bits(u64_at(places[k]["bits"], places[k]["num_bits"]), numbers[begin:end])
        scatter(records, numbers[begin:end], words)
