"""Hands out a checkpoint's rows as they were at its barrier, while training continues and overwrites them.

    write-back's thread    set_aside: copies the rows that it is about to overwrite, if they were not handed out
    checkpoint's thread    blocks: hands out all rows in order, from the store or from the copies set aside

A row is pending until its block has a copy. A pending row that is not aside still has the barrier's bytes in the store,
because its first write begins only after `set_aside`. Both threads copy and mark a row under the lock, so each row is
copied from the store once, and no write of it is open meanwhile. A thread that holds the lock waits only for the store.
"""

import threading
from collections.abc import Iterator

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.row_loops import clear_bits, count_bits, find_rows, set_bits
from rowcast.prefetcher.stores.store import Keys, Records, RowNumbers, RowStore, finish
from rowcast.runtime.arrays import I64, U64

ROWS_AT_ONCE = 2**12  # copied while the other thread waits
NOBODY = -1


class FrozenRows:
    def __init__(self, store: RowStore, group: GroupSpec, numbers: RowNumbers, rows: U64, share: float) -> None:
        """`rows`: one bit per row of the group, by its number; this object keeps the array. `share`: the fraction of
        them that can be aside at a time."""
        self._store, self._group, self._numbers = store, group, numbers
        self._lock = threading.Lock()
        self._pending = rows
        self._aside: U64 = np.zeros(len(rows), np.uint64)  # pending rows with their bytes in `_records`
        self._num_left = count_bits(rows)  # pending rows that are not aside
        room = int(self._num_left * share)
        # slots of rows that are aside; an unused slot takes no memory
        self._owners: I64 = np.empty(room, np.int64)  # the row's number, or NOBODY; defined for slots used before
        self._records: Records = np.empty((room, group.record_bytes), np.uint8)
        self._num_used = 0  # slots used before
        self._free: I64 = np.empty(0, np.int64)  # free ones of these

    # the write-back's thread

    def has_room(self, num_rows: int) -> bool:
        """Returns whether this number of rows can be set aside. The checkpoint's thread can only add room meanwhile."""
        return len(self._owners) - self._num_used + len(self._free) >= min(num_rows, self._num_left)

    def set_aside(self, keys: Keys, numbers: I64) -> None:
        """Copies these rows before they are written. There must be room."""
        with self._lock:
            left = found_rows(numbers, self._pending, self._aside)
            if not len(left):
                return
            places = self._take_places(len(left))
            old = np.empty((len(left), self._group.record_bytes), np.uint8)
            finish(self._store.read(keys[left], old))
            self._records[places] = old
            self._owners[places] = numbers[left]
            set_bits(self._aside, numbers[left])
            self._num_left -= len(left)

    def _take_places(self, count: int) -> I64:
        reused, self._free = self._free[:count], self._free[count:]
        first, self._num_used = self._num_used, self._num_used + count - len(reused)
        assert self._num_used <= len(self._owners), f"{count} rows are set aside without room for them"
        places: I64 = np.concatenate([reused, np.arange(first, self._num_used)])
        return places

    # the checkpoint's thread

    def blocks(self, nbytes: int) -> Iterator[tuple[Keys, Records]]:
        """Yields all rows by ascending key, at most `nbytes` of one table at a time. Writes meanwhile change
        nothing."""
        tables, block = [table.index for table in self._group.tables], max(1, nbytes // self._group.record_bytes)
        for keys, numbers in self._numbers.found(self._pending, tables, block):
            yield keys, self._take(keys, numbers)

    def _take(self, keys: Keys, numbers: I64) -> Records:
        records = np.empty((len(keys), self._group.record_bytes), np.uint8)
        num_aside = 0
        for start in range(0, len(keys), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            num_aside += self._take_stored(keys[part], numbers[part], records[part])
        if num_aside:
            self._take_aside(numbers, records, num_aside)
        return records

    def _take_stored(self, keys: Keys, numbers: I64, out: Records) -> int:
        """Copies rows from the store. Returns how many are aside."""
        with self._lock:
            stored = found_rows(numbers, self._pending, self._aside)
            if len(stored) == len(keys):
                finish(self._store.read(keys, out))
            elif len(stored):
                records = np.empty((len(stored), self._group.record_bytes), np.uint8)
                finish(self._store.read(keys[stored], records))
                out[stored] = records
            clear_bits(self._pending, numbers[stored])
            self._num_left -= len(stored)
        return len(keys) - len(stored)

    def _take_aside(self, numbers: I64, out: Records, num_aside: int) -> None:
        with self._lock:
            owners = self._owners[: self._num_used]
            order = np.argsort(numbers, kind="stable")
            at = order[np.searchsorted(numbers, owners, sorter=order) % len(order)]
            places = np.flatnonzero(numbers[at] == owners)
            assert len(places) == num_aside, f"{len(places)} of {num_aside} rows that are aside were found"
            own = owners[places]
            out[at[places]] = self._records[places]
            owners[places] = NOBODY
            self._free = np.concatenate([self._free, places])
            clear_bits(self._pending, own)
            clear_bits(self._aside, own)


def found_rows(numbers: I64, bits: U64, without: U64) -> I64:
    """Returns the positions of the rows whose bit is set in `bits` and not in `without`."""
    found: I64 = np.empty(len(numbers), np.int64)
    return found[: find_rows(numbers, bits, without, found)]
