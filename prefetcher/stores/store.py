"""Defines what a store of rows must do. One instance holds one group; `tracked_store.py` adds what all stores share."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from rowcast.prefetcher.stores.store_counts import StoreCounts
from rowcast.protocol.plan import GroupPlan
from rowcast.runtime.arrays import I64, U64, Bytes
from rowcast.runtime.stages import POLL_S

Keys = I64  # [n] ascending, distinct
Records = Bytes  # [n, record_bytes]

ABSENT = -1  # instead of a row's number
QUICK_LOOKS = 20  # at a ticket, before the thread sleeps between two


class Ticket(Protocol):
    """An operation in progress. Its arrays belong to the store until `done()` has returned True."""

    def done(self) -> bool:
        """Whether the operation is complete; never blocks. Raises the operation's error."""


class ReadTicket(Ticket, Protocol):
    @property
    def absent(self) -> Sequence[int] | I64:
        """Once done: the positions, among the keys read, of those that have no row."""


class Finished:
    """The ticket of an operation that was complete when it was returned."""

    def __init__(self, absent: Sequence[int] | I64 = ()) -> None:
        self.absent = absent

    def done(self) -> bool:
        return True


FINISHED = Finished()


def finish(ticket: Ticket) -> None:
    """Waits for a ticket; most need no more than a look."""
    looks = 0
    while not ticket.done():
        looks += 1
        time.sleep(0 if looks < QUICK_LOOKS else POLL_S)


class RowNumbers(Protocol):
    most: int  # every number is below it

    def of(self, keys: Keys) -> I64:
        """Returns the rows' numbers, ABSENT for rows without one."""

    def added(self, keys: Keys) -> I64:
        """Returns the rows' numbers. Rows without one get one. Raises RowcastError if there are too many."""

    def found(self, bits: U64, tables: Sequence[int], block: int) -> Iterator[tuple[Keys, I64]]:
        """Yields the rows of neighbouring tables whose bit is set, at most `block` of one table at a time: ascending
        keys, and their numbers. Rows found already may lose their bits meanwhile."""


class RowStore(ABC):
    """Records by key. The reader has checked the keys: each names a row of the group, perhaps one never written.

    The fetcher's thread and the checkpoint's call `read`, the write-back's `read` and `write`: at the same time, but
    never a `write` beside another call for the same key. The function open_store(job, group, incarnation, checkpoint)
    of a store's module opens it, see `job/stores.py`.
    """

    numbers: RowNumbers | None = None  # of its rows, if it numbers them; shared with the record of changed rows
    works_ahead = (
        False  # whether it makes use of `stage` and `advance`; without one that does there is no thread for it
    )
    restored = False  # whether it has the rows of the checkpoint that it was opened for, so that none must be restored

    @abstractmethod
    def read(self, keys: Keys, out: Records) -> ReadTicket:
        """Copies records to `out`, a view that stays valid until the ticket is done. Records of rows that were never
        written may be left as they are: the ticket names them.
        """

    @abstractmethod
    def write(self, keys: Keys, rows: Records) -> Ticket:
        """Stores records. The arrays belong to the store only until the ticket is done."""

    def begin(self, memory_rows: int) -> None:  # noqa: B027 - most stores have no tier
        """An attempt begins: its plans keep at most so many rows in memory, those on their way included. Called after
        `read` and `write` have restored the rows, and before the first plan is staged."""

    def stage(self, step: int, plan: GroupPlan) -> None:  # noqa: B027 - most stores need no hint
        """The plan of a step was made: `read` will ask for its `fetch_keys` once the rows of earlier steps are home,
        and `write` will bring the dirty ones of its `evict_keys`. The planning thread calls it, in step order; it does
        not block. A hint: `read` and `write` are right without it.
        """

    def advance(self, home_through: int | None) -> bool:
        """Does work of the store's own: the staging thread calls it in turn, if a store of the job `works_ahead`. It
        may block on a disk. Returns whether anything was done.

        `home_through`: all rows of the steps up to this one are written; None: those of no step yet. `read` and `write`
        are right without it, also while no thread calls it: before the first plan and after the last one.
        """
        return False

    @abstractmethod
    def close(self, checkpoint: str | None = None) -> None:
        """Frees what the store holds; idempotent. `checkpoint`: the identity of the checkpoint that the rows are at,
        for a store that outlives its process; None: the rows are worthless.
        """

    def counts(self) -> StoreCounts | None:
        """Returns what it has counted, if it has tiers. Any thread calls it; it takes no lock that is held over I/O."""
        return None
