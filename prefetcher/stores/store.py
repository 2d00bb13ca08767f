"""Defines what a store of rows must do. One instance holds one group; `tracked_store.py` adds what all stores share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec, make_keys
from rowcast.runtime.arrays import I64, Bytes

Keys = I64  # [n] ascending, distinct
Records = Bytes  # [n, record_bytes]


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
    while not ticket.done():
        pass


class RowStore(ABC):
    """Records by key. The reader has checked the keys: each names a row of the group, perhaps one never written.

    The fetcher's thread and the checkpoint's call `read`, the write-back's `read` and `write`: at the same time, but
    never a `write` beside another call for the same key. The function open_store(job, group, incarnation, checkpoint)
    of a store's module opens it, see `job/stores.py`.
    """

    restored = False  # whether it has the rows of the checkpoint that it was opened for, so that none must be restored

    @abstractmethod
    def read(self, keys: Keys, out: Records) -> ReadTicket:
        """Copies records to `out`, a view that stays valid until the ticket is done. Records of rows that were never
        written may be left as they are: the ticket names them.
        """

    @abstractmethod
    def write(self, keys: Keys, rows: Records) -> Ticket:
        """Stores records. The arrays belong to the store only until the ticket is done."""

    @abstractmethod
    def close(self, checkpoint: str | None = None) -> None:
        """Frees what the store holds; idempotent. `checkpoint`: the identity of the checkpoint that the rows are at,
        for a store that outlives its process; None: the rows are worthless.
        """


class RowNumbers:
    """Numbers the rows of a group, table after table."""

    def __init__(self, group: GroupSpec) -> None:
        self.first = np.zeros(max(table.index for table in group.tables) + 1, np.int64)  # number of each table's first
        sizes = [table.num_embeddings for table in group.tables]
        self.first[[table.index for table in group.tables]] = np.cumsum([0, *sizes[:-1]])
        self._sizes = {table.index: table.num_embeddings for table in group.tables}

    def of(self, keys: Keys) -> I64:
        numbers: I64 = self.first[keys >> KEY_SHIFT]
        numbers += keys & ROW_MASK
        return numbers

    def range_of(self, table: int) -> tuple[int, int]:
        """The number of a table's first row, and the one after its last."""
        first = int(self.first[table])
        return first, first + self._sizes[table]

    def keys(self, table: int, numbers: I64) -> Keys:
        return make_keys(table, numbers - self.first[table])
