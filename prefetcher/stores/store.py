"""Defines the interface of a store, which holds the rows of one group; `tracked_store.py` adds what all stores
share."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from rowcast.prefetcher.stores.store_counts import StoreCounts
from rowcast.protocol.plan import GroupPlan
from rowcast.runtime.arrays import I64, U64, Bytes
from rowcast.runtime.stages import POLL_S, ThreadPool

Keys = I64  # [n] ascending, distinct
Records = Bytes  # [n, record_bytes]

ABSENT = -1  # instead of a row's number
QUICK_LOOKS = 20  # at a ticket, before the thread sleeps between two


class Ticket(Protocol):
    """An operation in progress. Its arrays belong to the store until `done()` has returned True."""

    def done(self) -> bool:
        """Returns whether the operation is complete, without blocking. Raises the operation's error."""


class ReadTicket(Ticket, Protocol):
    @property
    def absent(self) -> Sequence[int] | I64:
        """Once done: the positions of the keys that have no row."""


class Finished:
    """The ticket of an operation that was complete when it was returned."""

    def __init__(self, absent: Sequence[int] | I64 = ()) -> None:
        self.absent = absent

    def done(self) -> bool:
        return True


FINISHED = Finished()


def finish(ticket: Ticket) -> None:
    """Waits for a ticket; most are done at the first look."""
    looks = 0
    while not ticket.done():
        looks += 1
        time.sleep(0 if looks < QUICK_LOOKS else POLL_S)


class RowNumbers(Protocol):
    most: int  # every number is below it
    pool: ThreadPool  # divides look-ups

    def of(self, keys: Keys) -> I64:
        """Returns the rows' numbers, ABSENT for rows without one."""

    def added(self, keys: Keys) -> I64:
        """Returns the rows' numbers, new ones for rows without one. Raises RowcastError if there are too many."""

    def found(self, bits: U64, tables: Sequence[int], block: int) -> Iterator[tuple[Keys, I64]]:
        """Yields the rows of neighbouring tables whose bit is set, at most `block` of one table at a time: ascending
        keys, and their numbers. Rows found already may lose their bits meanwhile."""


class RowStore(ABC):
    """Records by key. The reader has checked the keys: each is a row of the group, perhaps never written.

    The fetcher's and the checkpoint's threads call `read`, the write-back's calls `read` and `write`. These calls
    overlap, but a `write` never overlaps any call for the same key. A store's module defines open_store(job, group):
    `job/stores.py`."""

    numbers: RowNumbers | None = None  # of its rows, if it numbers them; TrackedStore uses the same numbers
    works_ahead = False  # whether `stage` and `advance` do work; if no store's do, there is no staging thread

    @abstractmethod
    def read(self, keys: Keys, out: Records) -> ReadTicket:
        """Copies records to `out`, a view that stays valid until the ticket is done. May skip rows that were never
        written: the ticket names them."""

    @abstractmethod
    def write(self, keys: Keys, rows: Records) -> Ticket:
        """Stores records. The store uses the arrays until the ticket is done."""

    def write_numbered(self, keys: Keys, numbers: I64, rows: Records) -> Ticket:
        """Does what `write` does. `numbers`: of the rows, from `self.numbers`; a store without numbers ignores them."""
        return self.write(keys, rows)

    def begin(self, memory_rows: int) -> None:  # noqa: B027 - most stores have no tier
        """Begins an attempt, whose plans keep at most `memory_rows` in memory, rows in flight included. Called after
        `read` and `write` have restored the rows, before the first plan is staged."""

    def use_threads(self, pool: ThreadPool) -> None:  # noqa: B027 - only stores that are finished at once divide work
        """Lets `read` and `write` divide their rows among these threads. Called before the first of them."""

    def stage(self, step: int, plan: GroupPlan) -> None:  # noqa: B027 - most stores need no hint
        """Announces the plan of a step. `read` will get its `fetch_keys` once the rows of earlier steps are home, and
        `write` the dirty ones of its `evict_keys`. The planning thread calls it, in step order; it does not block. It
        is a hint: `read` and `write` are correct without it."""

    def advance(self, home_through: int | None) -> bool:
        """Does background work on the staging thread, if a store of the job `works_ahead`. May block on a disk. Returns
        whether it did anything.

        `home_through`: all rows of the steps up to this one are written; None: of no step yet. `read` and `write` are
        correct without it, also when no thread calls it: before the first plan and after the last one."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Frees what the store holds; idempotent."""

    def counts(self) -> StoreCounts | None:
        """Returns the counters of a store with tiers. Any thread may call it; it takes no lock that is held during
        I/O."""
        return None
