"""Defines what keeps the cold rows of one group: rows outside of the prefetcher's memory. A tiered store stands above.

Who knows what: the store above knows which rows are cold and the place of each; `ColdRows` knows what lies at a place.
A row has one place. Writing it again gives it another one, and the store frees the old one.

    thread        calls
    staging       tidy; hold, read for rows that are to be staged; write, free for rows that leave memory
    fetcher       hold, read for rows that come too late
    write-back    write, free for rows that have no slot in memory
    checkpoint    hold, read

All of these may run at the same time. Every method but `free` may block, for as long as the disk or the server takes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.runtime.arrays import I64, U32

Places = U32  # [n]

NOWHERE = 2**32 - 1  # instead of a place: the row is not cold


class Moved(NamedTuple):
    """Rows whose bytes now lie at two places. For each, the store above frees one of the two."""

    keys: I64  # [n] distinct, any order
    old: Places
    new: Places


class ColdRows(Protocol):
    """Keys are distinct and may have any order. Arrays belong to this object only until the call returns."""

    most: int  # every place is below it; at most 2**32 - 2 - (slots of the tier)
    shares_places: bool  # several rows may have the same place: key and place together name a row's bytes

    # Counters, each written by this object and read by metrics at any time.
    rows_read: int
    rows_written: int  # also those that were moved
    bytes_read: int  # from the disk or the server
    bytes_written: int
    read_seconds: float  # within `read`, waiting for the disk or the server; of all threads together
    used_bytes: int  # of the disk or the server
    garbage_bytes: int  # of these, bytes of rows that were freed

    def attach(self, places_of: Callable[[Keys], Places], settle: Callable[[Moved], None]) -> None:
        """Called once, before any other method. `tidy` and `write` call both functions, from their caller's thread and
        without a lock that any other method needs, so the caller of these two holds no lock that the functions take.

        places_of(keys): where each row lies now, NOWHERE for rows that are not cold. Keys may be in any order and
        repeat.
        settle(moved): under its lock, the store takes the new place for rows that are still at the old one, and calls
        `free` with the old places of these rows and with the new places of all others.
        """

    def hold(self) -> AbstractContextManager[None]:
        """Within it, every place that was in use when it was entered stays readable, even if it is freed.

        A reader enters it before it looks up places, since another thread may free them, or `tidy` move the rows,
        before `read` has begun: with cold.hold(): <look up places under the store's lock>; cold.read(...). Within it
        a thread does not wait for another one, and calls neither `write` nor `tidy`.
        """

    def write(self, keys: Keys, records: Records) -> Places:
        """Returns where each row lies now; readable at once, by any thread. All rows are written, or none.

        Raises RowcastError if there is no room, DataError if the disk failed, PeerLost if the server is lost.
        """

    def read(self, keys: Keys, places: Places, out: Records) -> None:
        """Copies the rows to `out`. Every row is checked. Raises DataError, which names the place and a row, if it has
        other bytes than those written; never returns them.
        """

    def free(self, keys: Keys, places: Places) -> None:
        """These rows will not be read again from there, but within a `hold` entered before. Each place is freed once.

        Does not block and calls nobody, so that the caller can free a row's old place under the lock under which the
        row gets another one. Rows that are freed later than that look as if there were no room for others.
        """

    def tidy(self) -> bool:
        """Collects garbage if there is too much of it: a bounded piece of work, about 1 MiB. Returns whether anything
        was done.
        """

    def close(self) -> None:
        """Frees everything; idempotent. No other call may be under way."""
