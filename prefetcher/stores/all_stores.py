"""Reads and writes rows of several groups: those in memory in one compiled call, where one thread serves them all."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from rowcast.prefetcher.stores.index_loops import find_in_index
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.row_loops import LEAST_TO_PASS, gather, scatter, set_bits
from rowcast.prefetcher.stores.store import ABSENT, FINISHED, Finished, Keys, Records, Ticket
from rowcast.prefetcher.stores.touched_rows import IndexedRows
from rowcast.prefetcher.stores.tracked_store import FilledRead, TrackedStore
from rowcast.protocol.messages import RowCopies
from rowcast.runtime.arrays import I64
from rowcast.runtime.compiled import arrays_of, compiled_loop
from rowcast.runtime.machine import mapped_bytes

Rows = tuple[int, Keys, Records]  # of a group: its number, and keys with their records
ARRAYS = ("index", "shifts", "words", "bits")  # `words`: u64, `stored` a row, of which a record has `width`
PLACE = np.dtype(
    [(name, np.int64) for own in ARRAYS for name in (own, f"num_{own}")]
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
            self._filled(*own, numbers[first:end])
            for own, first, end in zip(rows, starts[:-1], starts[1:], strict=True)
        ]

    def _filled(self, group: int, keys: Keys, records: Records, numbers: I64) -> Ticket:
        return FilledRead(Finished(np.flatnonzero(numbers == ABSENT)), self._stores[group], keys, records)

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
        memory_bytes, huge_page_bytes = mapped_bytes([rows.span for own in self._stores if (rows := own.store.rows)])
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
        places["num_keys"], places["records"] = counts, [own.ctypes.data for own in records]
        places["width"] = [own.shape[1] // 8 for own in records]
        starts = [0, *accumulate(counts)]
        numbers, absent = np.empty(starts[-1], np.int64), np.empty(len(rows), np.int64)
        find_each(places, np.concatenate(keys), numbers, absent)
        return places, numbers, absent, starts


@compiled_loop
def find_each(places: Places, keys: Keys, numbers: I64, absent: I64) -> None:
    end = 0
    for k in range(len(places)):
        own, begin = places[k], end
        end += own["num_keys"]
        index, shifts = u32_at(own["index"], own["num_index"]), i64_at(own["shifts"], own["num_shifts"])
        absent[k] = find_in_index(index, shifts, keys[begin:end], numbers[begin:end])


@compiled_loop
def read_each(places: Places, numbers: I64) -> None:
    """Copies the rows that have numbers."""
    end = 0
    for k in range(len(places)):
        own, begin, width, stored = places[k], end, places[k]["width"], places[k]["stored"]
        end += own["num_keys"]
        words = u64_at(own["words"], own["num_words"] * stored).reshape(own["num_words"], stored)
        records = u64_at(own["records"], own["num_keys"] * width).reshape(own["num_keys"], width)
        gather(words, numbers[begin:end], records)


@compiled_loop
def write_each(places: Places, numbers: I64) -> None:
    end = 0
    for k in range(len(places)):
        own, begin, width, stored = places[k], end, places[k]["width"], places[k]["stored"]
        end += own["num_keys"]
        words = u64_at(own["words"], own["num_words"] * stored).reshape(own["num_words"], stored)
        records = u64_at(own["records"], own["num_keys"] * width).reshape(own["num_keys"], width)
        set_bits(u64_at(own["bits"], own["num_bits"]), numbers[begin:end])
        scatter(records, numbers[begin:end], words)
