"""Defines the interface of a store, which holds the rows of one group, and that of a tiered store's cold rows.

`tracked_store.py` adds what all stores share. A tiered store knows which rows are cold and the place of each;
`ColdRows` knows the bytes at each place. A row has one place. Writing the row again gives it a new place, and the store
frees the old one.

    thread        calls of ColdRows
    staging       tidy; hold, read for rows to be staged; write, free for rows that leave memory
    fetcher       hold, read for rows that come too late
    write-back    write, free for rows that have no slot in memory
    checkpoint    hold, read

All of these may run at the same time. Every method except `free` may block on the disk or the server.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rowcast.protocol.messages import TierTotals
from rowcast.protocol.plan import GroupPlan
from rowcast.runtime.arrays import I64, U32, U64, Bytes
from rowcast.runtime.stages import POLL_S, ThreadPool

if TYPE_CHECKING:
    from rowcast.prefetcher.stores.memory_store import StoredRows


Keys = I64  # [n] ascending, distinct
Records = Bytes  # [n, record_bytes]

ABSENT = -1  # instead of a row's number
QUICK_LOOKS = 20  # at a ticket, before the thread sleeps between two
MOST_LATE = 0.001  # of the requested rows, in a run whose cold tier keeps up


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
    pool: ThreadPool  # divides look-ups, and rows that are read, checked and written; set before the first of them

    def of(self, keys: Keys) -> I64:
        """Returns the rows' numbers, ABSENT for rows without one."""

    def added(self, keys: Keys) -> I64:
        """Returns the rows' numbers, new ones for rows without one. Raises RowcastError if there are too many."""

    def found(self, bits: U64, tables: Sequence[int], block: int) -> Iterator[tuple[Keys, I64]]:
        """Yields the rows of neighbouring tables whose bit is set, at most `block` of one table at a time: ascending
        keys, and their numbers. Rows found already may lose their bits meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreCounts:
    """Numbers of rows, unless a name says otherwise. A row that was never written is *untouched*: no tier holds it."""

    memory_rows: int = 0  # in the slots of the memory tier, untouched ones included
    cold_rows: int = 0  # in the cold tier and not in memory
    memory_reads: int = 0  # requested and found in memory
    cold_reads: int = 0  # read from the cold tier past the memory: late rows, and those of a checkpoint
    untouched_reads: int = 0  # requested and computed from their key
    loaded: int = 0  # entered memory from the cold tier
    untouched_loaded: int = 0  # entered memory untouched
    spilled: int = 0  # left memory and were written to the cold tier
    dropped: int = 0  # left memory without a copy: the cold tier had the same bytes, or they were never written
    late: int = 0  # planned to be in memory when requested, but were not
    bytes_read: int = 0  # from the cold tier, whole pages
    bytes_written: int = 0  # to it, rows moved to collect garbage included
    read_seconds: float = 0.0  # spent reading the cold tier, summed over threads
    index_bytes: int = 0  # of memory, for the index of where each row is
    disk_used_bytes: int = 0  # taken by the cold tier
    disk_garbage_bytes: int = 0  # of these: old copies of rows

    @property
    def reads(self) -> int:
        return self.memory_reads + self.cold_reads + self.untouched_reads

    @property
    def keeps_up(self) -> bool:
        return self.late <= MOST_LATE * self.reads


class RowStore(ABC):
    """Records by key. The reader has checked the keys: each is a row of the group, perhaps never written.

    The fetcher's and the checkpoint's threads call `read`, the write-back's calls `read` and `write`. These calls
    overlap, but a `write` never overlaps any call for the same key. A store's module defines open_store(job, group):
    `job/stores.py`."""

    numbers: RowNumbers | None = None  # of its rows, if it numbers them; TrackedStore uses the same numbers
    rows: "StoredRows | None" = None  # those in this process's memory, if it keeps any there
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

    def stage(self, step: int, plan: GroupPlan) -> None:  # noqa: B027 - most stores need no hint
        """Announces plan number `step`. `read` will get its `fetch_keys` once the rows of earlier plans are home, and
        `write` the dirty ones of its `evict_keys`. The planning thread calls it, in their order; it does not block. It
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


def described(stores: Iterable[StoreCounts | None]) -> str:
    """Describes what waits for the stores are spent on, and what to change; "the store" if none has tiers."""
    tiers = [counts for counts in stores if counts is not None]
    if not tiers:
        return "the store"
    seconds = sum(counts.read_seconds for counts in tiers)
    rate = sum(counts.loaded + counts.cold_reads for counts in tiers) / seconds if seconds else 0.0
    late = sum(counts.late for counts in tiers)
    return (
        f"the cold tier, which gave {rate:,.0f} rows a second while it was read, with {late:,} rows late so far; raise "
        "store.memory or use a faster disk or server"
    )


def totals(stores: Iterable[StoreCounts | None]) -> TierTotals | None:
    """Sums over the stores of a run, for its report; None if none has tiers."""
    tiers = [counts for counts in stores if counts is not None]
    if not tiers:
        return None
    return TierTotals(
        rows_from_cold=sum(tier.loaded for tier in tiers),
        rows_never_trained=sum(tier.untouched_loaded for tier in tiers),
        rows_to_cold=sum(tier.spilled for tier in tiers),
        rows_read_past_memory=sum(tier.cold_reads for tier in tiers),
        late_rows=sum(tier.late for tier in tiers),
        bytes_read=sum(tier.bytes_read for tier in tiers),
        bytes_written=sum(tier.bytes_written for tier in tiers),
        read_s=sum(tier.read_seconds for tier in tiers),
        index_bytes=sum(tier.index_bytes for tier in tiers),
        disk_bytes=sum(tier.disk_used_bytes for tier in tiers),
        garbage_bytes=sum(tier.disk_garbage_bytes for tier in tiers),
    )


Places = U32  # [n]

NOWHERE = 2**32 - 1  # instead of a place, if the row is not cold


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
