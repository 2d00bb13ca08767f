"""Adds first values and tracking of changed rows to any store."""

from collections.abc import Iterator
from importlib import import_module

import numpy as np

from rowcast.job.schema import Job
from rowcast.job.stores import STORES
from rowcast.job.tables import ROW_MASK, GroupSpec
from rowcast.prefetcher.stores.first_records import fill_first_records
from rowcast.prefetcher.stores.frozen_rows import FrozenRows
from rowcast.prefetcher.stores.row_loops import BITS, clear_all_bits, clear_bits, count_bits, set_bits
from rowcast.prefetcher.stores.store import Keys, ReadTicket, Records, RowStore, Ticket, finish
from rowcast.prefetcher.stores.touched_rows import numbered
from rowcast.runtime.arrays import I64, U64

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
