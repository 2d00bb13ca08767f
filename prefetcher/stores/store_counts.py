"""Counts what a store with a memory tier has done since it was opened, and what it holds now."""

from collections.abc import Iterable
from dataclasses import dataclass

from rowcast.protocol.messages import TierTotals

MOST_LATE = 0.001  # of the requested rows, in a run whose cold tier keeps up


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
    late: int = 0  # planned to be in memory when requested, and were not
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


def described(stores: Iterable[StoreCounts | None]) -> str:
    """Says what waits for the stores are spent on, and what to change; "the store" if none has tiers."""
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
        rows_from_cold=sum(own.loaded for own in tiers),
        rows_never_trained=sum(own.untouched_loaded for own in tiers),
        rows_to_cold=sum(own.spilled for own in tiers),
        rows_read_past_memory=sum(own.cold_reads for own in tiers),
        late_rows=sum(own.late for own in tiers),
        bytes_read=sum(own.bytes_read for own in tiers),
        bytes_written=sum(own.bytes_written for own in tiers),
        read_s=sum(own.read_seconds for own in tiers),
        index_bytes=sum(own.index_bytes for own in tiers),
        disk_bytes=sum(own.disk_used_bytes for own in tiers),
        garbage_bytes=sum(own.disk_garbage_bytes for own in tiers),
    )
