"""Divides `store.disk` among the groups, and says what the memory of a tiered store holds beside its rows.

A group gets disk for all its rows twice, so that garbage has room, or for as many as its share: groups that need less
than an equal share get all they need, and the others divide the rest. All of it follows from the job alone, so that it
is the same in a run, before one, and in a run that goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rowcast.job.schema import Job, parse_bytes
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.cold.page_loops import page_layout
from rowcast.prefetcher.stores.cold.segment_file import SEGMENTS
from rowcast.prefetcher.stores.touched_rows import ROW_BYTES

COPIES = 2  # of each row on the disk, one of them garbage
INDEX_SHARE = 4  # where the job sets no store.disk, a fourth of the memory may say where rows are
# for each row that was touched: its number, where it is, and bits for changed rows, frozen ones and those set aside
INDEX_BYTES = ROW_BYTES + 4 + 1
SLOT_BYTES = 37  # for each row in memory, beside its record: what `TieredStore` keeps of a slot
SERVER_BYTES = 80  # of a Redis server's memory, for each row beside its record: number of the write, entry in a hash
SERVER_SHARE = 1.25  # a server allocates no more than this for each byte of a record
MOST_SLOTS = 2**31  # of a group; other numbers below 2**32 are left for places


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskShare:
    nbytes: int
    num_rows: int  # of the group that can be cold or in memory at all


def disk_shares(job: Job, groups: Sequence[GroupSpec]) -> tuple[DiskShare, ...]:
    """`groups`: all groups of the job."""
    rows_fit = job.store.disk is not None or job.store.memory_rows is not None
    nominal = [group.num_rows for group in groups]
    indexed = nominal
    if not rows_fit:
        assert job.store.memory is not None, "a store with a tier has a budget of memory"
        indexed = shared_out([rows * INDEX_BYTES for rows in nominal], parse_bytes(job.store.memory) // INDEX_SHARE)
        indexed = [nbytes // INDEX_BYTES for nbytes in indexed]
    needs = [
        max(COPIES * rows * disk_bytes(group), SEGMENTS * page_layout(group.record_bytes).nbytes)
        for rows, group in zip(indexed, groups, strict=True)
    ]
    granted = needs if job.store.disk is None else shared_out(needs, parse_bytes(job.store.disk))
    return tuple(
        DiskShare(nbytes=nbytes, num_rows=min(rows, nbytes // disk_bytes(group)))
        for nbytes, rows, group in zip(granted, indexed, groups, strict=True)
    )


def disk_bytes(group: GroupSpec) -> int:
    """What a row takes on the disk, with its share of a page."""
    page = page_layout(group.record_bytes)
    return -(-page.nbytes // page.num_rows)


def server_bytes(group: GroupSpec) -> int:
    """The most memory of a Redis server that a row takes; `benchmarks.redis_rows` measures it."""
    return SERVER_BYTES + int(SERVER_SHARE * group.record_bytes)


def shared_out(needs: Sequence[int], total: int) -> list[int]:
    """Gives everyone what they need, or an equal share of what those leave who need less than that."""
    given = [0] * len(needs)
    for rank, index in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        given[index] = min(needs[index], (total - sum(given)) // (len(needs) - rank))
    return given
