"""What the store of a group with a memory tier has counted since it was opened, and what it holds now."""

from collections.abc import Iterable
from dataclasses import dataclass

from rowcast.protocol.messages import TierTotals

MOST_LATE = 0.001  # of the rows asked for, in a run whose cold tier keeps up


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreCounts:
    """Numbers of rows, unless a name says otherwise. A row that was never written is *untouched*: it lies nowhere."""

    memory_rows: int = 0  # in the slots of the memory tier, untouched ones included
    cold_rows: int = 0  # in the cold tier and not in memory
    memory_reads: int = 0  # asked for and found in memory
    cold_reads: int = 0  # read from the cold tier past the memory: late rows, and those of a checkpoint
    untouched_reads: int = 0  # asked for and made from their key
    loaded: int = 0  # entered memory from the cold tier
    untouched_loaded: int = 0  # entered memory with their first value still to be trained
    spilled: int = 0  # left memory and were written to the cold tier
    dropped: int = 0  # left memory without a copy: the same bytes lay in the cold tier, or they were never written
    late: int = 0  # were to be in memory when they were asked for, and were not
    bytes_read: int = 0  # from the cold tier, with whatever lies on the same pages
    bytes_written: int = 0  # to it, rows moved to collect garbage included
    read_seconds: float = 0.0  # that reads of the cold tier took, added up over the threads that read
    index_bytes: int = 0  # of memory that say where each row lies
    disk_used_bytes: int = 0  # taken by the cold tier
    disk_garbage_bytes: int = 0  # of these: old copies of rows

    @property
    def reads(self) -> int:
        return self.memory_reads + self.cold_reads + self.untouched_reads

    @property
    def keeps_up(self) -> bool:
        return self.late <= MOST_LATE * self.reads


def described(stores: Iterable[StoreCounts | None]) -> str:
    """What the stores of a run are waited for, and what to change; "the store" where none has tiers."""
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
    """The sums over the stores of a run, for its report; None where none has tiers."""
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
