"""What a store of rows promises. One instance holds the rows of one group; `tracked_store.py` adds what every store would repeat."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec, make_keys

I64 = npt.NDArray[np.int64]
Keys = npt.NDArray[np.int64]  # [n] ascending, distinct
Records = npt.NDArray[np.uint8]  # [n, record_bytes]


class Ticket(Protocol):
    """An operation under way. Its arrays belong to the store until `done()` has returned True."""

    def done(self) -> bool:
        """Whether the operation is complete; never blocks. Raises what the operation raised."""


class ReadTicket(Ticket, Protocol):
    @property
    def absent(self) -> Sequence[int] | I64:
        """Once done: which of the keys read have no row, by their position among them."""


class Finished:
    """The ticket of an operation that was complete when it was handed out."""

    def __init__(self, absent: Sequence[int] | I64 = ()) -> None:
        self.absent = absent

    def done(self) -> bool:
        return True


FINISHED = Finished()


def finish(ticket: Ticket) -> None:
    while not ticket.done():
        pass


class RowStore(ABC):
    """Records by key. Keys were range-checked at the edge: each names a row of the group, which may never have been written.

    `read` is called from the fetcher's thread and `write` from the write-back's, at the same time but never for the same key at once.
    A job's store is opened by the function open_store(job, group, incarnation, checkpoint) of its module, see `job/stores.py`.
    """

    restored = (
        False  # whether it began with the rows of the checkpoint that it was opened for, so that none must be restored
    )

    @abstractmethod
    def read(self, keys: Keys, out: Records) -> ReadTicket:
        """Copies records to `out`, a view that stays valid until the ticket is done. Those of rows that were never written may be left as
        they are: the ticket names them.
        """

    @abstractmethod
    def write(self, keys: Keys, rows: Records) -> Ticket:
        """Stores records, which are this store's own only until the ticket is done."""

    @abstractmethod
    def close(self, checkpoint: str | None = None) -> None:
        """Frees what the store holds; idempotent. `checkpoint`: the identity of the one whose rows these are, where a store that outlives
        its process may keep them for it; None: they are worth nothing.
        """


class RowNumbers:
    """The rows of a group counted through, table after table."""

    def __init__(self, group: GroupSpec) -> None:
        self.first = np.zeros(max(table.index for table in group.tables) + 1, np.int64)  # row of each table
        sizes = [table.num_embeddings for table in group.tables]
        self.first[[table.index for table in group.tables]] = np.cumsum([0, *sizes[:-1]])

    def of(self, keys: Keys) -> I64:
        numbers: I64 = self.first[keys >> KEY_SHIFT]
        numbers += keys & ROW_MASK
        return numbers

    def keys(self, table: int, numbers: I64) -> Keys:
        """Of rows of one table."""
        return make_keys(table, numbers - self.first[table])
