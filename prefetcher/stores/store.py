"""What a store of rows promises. One instance holds the rows of one group."""

from collections.abc import Iterator
from typing import Protocol

from rowcast.runtime.arrays import I64, Bytes

Keys = I64  # [n] ascending, distinct
Records = Bytes  # [n, record_bytes]


class Ticket(Protocol):
    """An operation under way. Its arrays belong to the store until `done()` has returned True."""

    def done(self) -> bool:
        """Whether the operation is complete; never blocks. Raises what the operation raised."""


class Finished:
    """The ticket of an operation that was complete when it was handed out."""

    def done(self) -> bool:
        return True


FINISHED = Finished()


class Store(Protocol):
    """Rows by key. Keys were range-checked at the edge, so every key names a row; one that was never written has its first value.

    `read` is called from the fetcher's thread and `write` from the write-back's, at the same time but never for the same key at once.
    Everything else is called when no ticket is open: at a barrier, before the first plan or after the last one.

    A row has changed when it was written since the last `settle`: those are the rows that the next checkpoint must hold. To restore is
    to write the checkpoint's rows and to settle; to roll back, to forget the changed rows first.
    """

    def read(self, keys: Keys, out: Records) -> Ticket:
        """Copies the rows' records to `out`, a view that stays valid until the ticket is done."""

    def write(self, keys: Keys, rows: Records, step: int | None) -> Ticket:
        """Stores trained rows; `step` is the plan that brought them home, None for a restore. The rows are present and have changed."""

    def hint(self, keys: Keys, needed_at_step: int) -> None:
        """Says that the rows will be read for a plan; a slow store may begin. Never required."""

    def scan(self, table: int, block: int, *, changed: bool = False) -> Iterator[tuple[Keys, Records]]:
        """Every present row of a table, or every changed one, by ascending key, at most `block` at a time."""

    def changed_keys(self, table: int) -> Keys:
        """The rows of a table that have changed."""

    @property
    def num_changed(self) -> int:
        """Rows of all tables that have changed."""

    def settle(self) -> None:
        """What is in the store is the state of a checkpoint: no row has changed any more."""

    def forget(self, keys: Keys) -> None:
        """These rows were never written: they are absent, have not changed, and read as their first value."""

    @property
    def host_bytes(self) -> int:
        """Bytes of memory that the rows present take."""

    @property
    def restored(self) -> bool:
        """Whether it began with the rows of the checkpoint that it was opened for, so that none must be restored."""

    def close_at(self, checkpoint: str) -> None:
        """Closes a store whose rows are those of a checkpoint, after `settle`; one that outlives its process keeps them for it."""

    def close(self) -> None:
        """Frees what the store holds. Idempotent; neither close does anything after the other."""
