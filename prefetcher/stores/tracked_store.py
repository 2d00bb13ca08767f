"""Adds first values and tracking of changed rows to any store, and hands out a checkpoint's rows as they were at its
barrier, while training continues and overwrites them.

    write-back's thread    set_aside: copies the rows that it is about to overwrite, if they were not handed out
    checkpoint's thread    blocks: hands out all rows in order, from the store or from the copies set aside

A row is pending until its block has a copy. A pending row that is not aside still has the barrier's bytes in the store,
because its first write begins only after `set_aside`. Both threads copy and mark a row under the lock, so each row is
copied from the store once, and no write of it is open meanwhile. A thread that holds the lock waits only for the store.
"""

import threading
from collections.abc import Iterator
from importlib import import_module

import numpy as np

from rowcast.job.schema import Job
from rowcast.job.stores import STORES
from rowcast.job.tables import ROW_MASK, GroupSpec
from rowcast.prefetcher.stores.records import fill_first_records
from rowcast.prefetcher.stores.row_loops import BITS, clear_all_bits, clear_bits, count_bits, find_rows, set_bits
from rowcast.prefetcher.stores.store import Keys, ReadTicket, Records, RowNumbers, RowStore, Ticket, finish
from rowcast.prefetcher.stores.touched_rows import numbered
from rowcast.runtime.arrays import I64, U64

COPIED_AT_ONCE = 2**12  # copied while the other thread waits
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
            reused, self._free = self._free[: len(left)], self._free[len(left) :]
            first, self._num_used = self._num_used, self._num_used + len(left) - len(reused)
            assert self._num_used <= len(self._owners), f"{len(left)} rows are set aside without room for them"
            places = np.concatenate([reused, np.arange(first, self._num_used)])
            old = np.empty((len(left), self._group.record_bytes), np.uint8)
            finish(self._store.read(keys[left], old))
            self._records[places] = old
            self._owners[places] = numbers[left]
            set_bits(self._aside, numbers[left])
            self._num_left -= len(left)

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
        for start in range(0, len(keys), COPIED_AT_ONCE):
            part = slice(start, start + COPIED_AT_ONCE)
            num_aside += self._take_stored(keys[part], numbers[part], records[part])
        if num_aside:
            with self._lock:
                owners = self._owners[: self._num_used]
                order = np.argsort(numbers, kind="stable")
                at = order[np.searchsorted(numbers, owners, sorter=order) % len(order)]
                places = np.flatnonzero(numbers[at] == owners)
                assert len(places) == num_aside, f"{len(places)} of {num_aside} rows that are aside were found"
                own = owners[places]
                records[at[places]] = self._records[places]
                owners[places] = NOBODY
                self._free = np.concatenate([self._free, places])
                clear_bits(self._pending, own)
                clear_bits(self._aside, own)
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


def found_rows(numbers: I64, bits: U64, without: U64) -> I64:
    """Returns the positions of the rows whose bit is set in `bits` and not in `without`."""
    found: I64 = np.empty(len(numbers), np.int64)
    return found[: find_rows(numbers, bits, without, found)]


ROWS_AT_ONCE = 2**16
ALL_BITS = 2**64 - 1


class FilledRead:
    """The ticket of a read that fills absent rows with their first values."""

    def __init__(self, ticket: ReadTicket, store: "TrackedStore", keys: Keys, out: Records) -> None:
        self._ticket, self._store, self._keys, self._out = ticket, store, keys, out
        self._done = False

    def done(self) -> bool:
        if not self._done and self._ticket.done():
            absent = self._ticket.absent
            if len(absent):
                self._store.fill_first(self._keys[absent], np.asarray(absent), self._out)
            self._done = True
        return self._done


class TrackedStore:
    """A store in which unwritten rows have their first values.

    A row has changed if it was written since the last `freeze` or `settle`: the next checkpoint must hold those rows.
    To restore, write the checkpoint's rows and settle; to roll back, forget the changed rows first.

    Three threads call at the same time: the fetcher's `read`, the write-back's `has_room` and `write`, the checkpoint's
    `thaw` and the blocks that `freeze` returned. `read` and `write` never run for the same key at once. All other
    methods need no open ticket and nothing frozen: at a barrier, before the first plan or after the last one."""

    def __init__(self, store: RowStore, group: GroupSpec, seed: int) -> None:
        self.store, self._group, self._seed = store, group, seed
        self.numbers = store.numbers or numbered(group, group.num_rows)
        # one bit per row, by its number
        self.changed_bits: U64 = np.zeros(-(-self.numbers.most // BITS), np.uint64)
        self._frozen: FrozenRows | None = None

    def read(self, keys: Keys, out: Records) -> FilledRead:
        return FilledRead(self.store.read(keys, out), self, keys, out)

    def write(self, keys: Keys, rows: Records) -> Ticket:
        """Stores rows; there must be room. They count as changed from now on, even if the ticket is never awaited."""
        numbers, frozen = self.numbers.added(keys), self._frozen
        if frozen is not None:
            frozen.set_aside(keys, numbers)
        set_bits(self.changed_bits, numbers)
        return self.store.write_numbered(keys, numbers, rows)

    @property
    def is_frozen(self) -> bool:
        return self._frozen is not None

    def has_room(self, num_rows: int) -> bool:
        """Returns whether `num_rows` may be written now: False while this would set aside too many frozen rows."""
        frozen = self._frozen
        return frozen is None or frozen.has_room(num_rows)

    def fill_first(self, keys: Keys, places: I64, out: Records) -> None:
        """Sets out[places[i]] to the first values of row keys[i]."""
        fill_first_records(self._group, self._seed, keys, places, out)

    @property
    def num_changed(self) -> int:
        return count_bits(self.changed_bits)

    def changed_keys(self, table: int) -> Keys:
        found = self.numbers.found(self.changed_bits, [table], ROWS_AT_ONCE)
        return np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in found)])

    def trained_rows(self, table: int, at_once: int) -> Iterator[I64]:
        """Yields the numbers of all rows of the table that were ever written, ascending. Any thread; those that are
        written meanwhile may be missing."""
        for keys, _ in self.numbers.found(np.full_like(self.changed_bits, ALL_BITS), [table], at_once):
            yield keys & ROW_MASK

    def freeze(self, share: float) -> FrozenRows:
        """Declares the rows to be a checkpoint's, and returns the changed ones. These keep their bytes until `thaw`,
        whatever is written. `share`: the fraction of them that can be aside at a time."""
        changed, self.changed_bits = self.changed_bits, np.zeros(len(self.changed_bits), np.uint64)
        self._frozen = FrozenRows(self.store, self._group, self.numbers, changed, share)
        return self._frozen

    def thaw(self) -> None:
        """Ends the freeze; all frozen rows were handed out."""
        self._frozen = None

    def settle(self) -> None:
        """Declares the rows to be a checkpoint's: none has changed."""
        clear_all_bits(self.changed_bits)

    def forget(self, keys: Keys) -> None:
        """Gives these rows their first values, unchanged."""
        for start in range(0, len(keys), ROWS_AT_ONCE):
            own = keys[start : start + ROWS_AT_ONCE]
            records = np.empty((len(own), self._group.record_bytes), np.uint8)
            self.fill_first(own, np.arange(len(own)), records)
            finish(self.store.write(own, records))
        clear_bits(self.changed_bits, self.numbers.of(keys))

    def close(self) -> None:
        self.store.close()


def open_row_store(job: Job, group: GroupSpec) -> RowStore:
    """Opens the job's store, without rows. Raises ConfigError."""
    store: RowStore = import_module(STORES[job.store.kind].module).open_store(job, group)
    return store
