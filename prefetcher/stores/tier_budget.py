"""Divides `store.disk` among the groups, and sizes a tiered store's memory beside its rows.

A group gets disk for two copies of all its rows, to leave room for garbage, or as much as its split allows: groups that
need less than an equal split get all they need, and the others divide the rest. The job alone decides the split, so it
is the same before, during and after a restart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rowcast.job.schema import Job
from rowcast.job.stores import StoreWithTier, Tiered
from rowcast.job.tables import GroupSpec
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.stores.cold.segment_file import SEGMENTS
from rowcast.prefetcher.stores.cold.segments import page_layout
from rowcast.prefetcher.stores.touched_rows import ROW_BYTES

COPIES = 2  # of each row on the disk, one of them garbage
INDEX_SHARE = 4  # without store.disk, the index may take a fourth of the memory
# per touched row: its number, where it is, and bits for changed, frozen and set-aside rows
INDEX_BYTES = ROW_BYTES + 4 + 1
SLOT_BYTES = 37  # per row in memory, beside its record: what `TieredStore` keeps for a slot
SERVER_BYTES = 80  # Redis memory per row, excluding the record: number of the write, entry in a hash
SERVER_SHARE = 1.25  # a server's largest allocation per byte of a record
MOST_SLOTS = 2**31  # of a group; the other numbers below 2**32 are places


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskShare:
    nbytes: int
    num_rows: int  # of the group that can be cold or in memory


def disk_shares(job: Job, groups: Sequence[GroupSpec]) -> tuple[DiskShare, ...]:
    """`groups`: all groups of the job."""
    store = job.store
    assert isinstance(store, StoreWithTier)
    disk = store.disk if isinstance(store, Tiered) else None
    rows_fit = disk is not None or store.memory_rows is not None
    nominal = [group.num_rows for group in groups]
    indexed = nominal
    if not rows_fit:
        indexed = shared_out([rows * INDEX_BYTES for rows in nominal], parse_bytes(store.memory) // INDEX_SHARE)
        indexed = [nbytes // INDEX_BYTES for nbytes in indexed]
    needs = [
        max(COPIES * rows * disk_bytes(group), SEGMENTS * page_layout(group.record_bytes).nbytes)
        for rows, group in zip(indexed, groups, strict=True)
    ]
    granted = needs if disk is None else shared_out(needs, parse_bytes(disk))
    return tuple(
        DiskShare(nbytes=nbytes, num_rows=min(rows, nbytes // disk_bytes(group)))
        for nbytes, rows, group in zip(granted, indexed, groups, strict=True)
    )


def disk_bytes(group: GroupSpec) -> int:
    """Returns a row's bytes on the disk, including its fraction of a page."""
    page = page_layout(group.record_bytes)
    return -(-page.nbytes // page.num_rows)


def server_bytes(group: GroupSpec) -> int:
    """Returns the most memory that a row takes on a Redis server, as measured (docs/log/stores.md)."""
    return SERVER_BYTES + int(SERVER_SHARE * group.record_bytes)


def shared_out(needs: Sequence[int], total: int) -> list[int]:
    """Gives each what it needs, or an equal split of what smaller needs leave."""
    given = [0] * len(needs)
    for rank, index in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        given[index] = min(needs[index], (total - sum(given)) // (len(needs) - rank))
    return given
