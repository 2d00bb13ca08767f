"""Defines the interface that keeps a group's cold rows, outside the prefetcher's memory, for a tiered store.

The tiered store knows which rows are cold and the place of each; `ColdRows` knows the bytes at each place. A row has
one place. Writing the row again gives it a new place, and the store frees the old one.

    thread        calls
    staging       tidy; hold, read for rows to be staged; write, free for rows that leave memory
    fetcher       hold, read for rows that come too late
    write-back    write, free for rows that have no slot in memory
    checkpoint    hold, read

All of these may run at the same time. Every method except `free` may block on the disk or the server.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.runtime.arrays import I64, U32

Places = U32  # [n]

NOWHERE = 2**32 - 1  # instead of a place: the row is not cold


class Moved(NamedTuple):
    """Rows whose bytes are now at two places. The tiered store frees one of the two."""

    keys: I64  # [n] distinct, any order
    old: Places
    new: Places


class ColdRows(Protocol):
    """Keys are distinct and may have any order. Arrays belong to this object only until the call returns."""

    most: int  # every place is below it; at most 2**32 - 2 - (slots of the tier)

    # Counters, each written by this object and read by metrics at any time.
    rows_read: int
    rows_written: int  # also those that were moved
    bytes_read: int  # from the disk or the server
    bytes_written: int
    read_seconds: float  # spent in `read` waiting for the disk or the server, summed over threads
    used_bytes: int  # of the disk or the server
    garbage_bytes: int  # of these, bytes of rows that were freed

    def attach(self, places_of: Callable[[Keys], Places], settle: Callable[[Moved], None]) -> None:
        """Called once, before any other method. `tidy` and `write` call both functions in their caller's thread. They
        hold no lock that other methods need, and their caller must hold no lock that the functions take.

        places_of(keys): each row's place, NOWHERE for rows that are not cold. Keys may be in any order and repeat.
        settle(moved): under its lock, the store moves rows that are still at the old place to the new one. It then
        calls `free` with the old places of these rows and the new places of all others."""

    def hold(self) -> AbstractContextManager[None]:
        """Within it, every place that was in use when it was entered stays readable, even if it is freed.

        A reader enters it before looking up places, because another thread may free them, or `tidy` move the rows,
        before `read` begins: with cold.hold(): <look up places under the store's lock>; cold.read(...). Inside it, a
        thread neither waits for other threads nor calls `write` or `tidy`."""

    def write(self, keys: Keys, records: Records) -> Places:
        """Returns each row's place; any thread can read it at once. Writes all rows, or none.

        Raises RowcastError if there is no room, DataError if the disk failed, PeerLost if the server is lost."""

    def read(self, keys: Keys, places: Places, out: Records) -> None:
        """Copies the rows to `out` and checks every one. Raises DataError, which names the place and a row, if its
        bytes are not those written."""

    def free(self, keys: Keys, places: Places) -> None:
        """Only a `hold` entered before still reads these rows there. Each place is freed once.

        Neither blocks nor calls back, so the caller can free a row's old place under the lock that protects its new
        one. Rows that are freed later still count as used room."""

    def tidy(self) -> bool:
        """If there is too much garbage, collects a bounded amount, about 1 MiB. Returns whether it did anything."""

    def close(self) -> None:
        """Frees everything; idempotent. No other call may be in progress."""
