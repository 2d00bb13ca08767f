"""What a store of rows promises. One instance holds the rows of one group."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.int64]  # [n] ascending, distinct
Records = npt.NDArray[np.uint8]  # [n, record_bytes]


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
    """

    def read(self, keys: Keys, out: Records) -> Ticket:
        """Copies the rows' records to `out`, a view that stays valid until the ticket is done."""

    def write(self, keys: Keys, rows: Records, step: int | None) -> Ticket:
        """Stores trained rows; `step` is the plan that brought them home. A row that was written is present ever after."""

    def hint(self, keys: Keys, needed_at_step: int) -> None:
        """Says that the rows will be read for a plan; a slow store may begin. Never required."""

    def scan(self, table: int, block: int) -> Iterator[tuple[Keys, Records]]:
        """Every present row of a table by ascending key, at most `block` at a time. Only at a barrier: nothing is written meanwhile."""

    @property
    def host_bytes(self) -> int:
        """Bytes of memory that the rows present take."""

    def close(self) -> None:
        """Frees what the store holds. Idempotent."""
