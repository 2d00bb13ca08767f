"""Checks a store with a memory tier: rows in memory, the index of all rows, and the disk."""

from collections.abc import Iterator, Sequence

import numpy as np

from rowcast.analysis.check.data import Seen
from rowcast.analysis.check.findings import Finding, about, error, ok, warning
from rowcast.analysis.check.memory import room_at, trained_rows
from rowcast.job.schema import Job
from rowcast.job.stores import Redis, StoreWithTier, Tiered
from rowcast.job.tables import GroupSpec
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.planner.planner import Slots
from rowcast.prefetcher.run.sizing import job_levels
from rowcast.prefetcher.stores.cold.page_loops import page_layout
from rowcast.prefetcher.stores.cold.segment_file import SEGMENTS
from rowcast.prefetcher.stores.redis_store import trial_rows
from rowcast.prefetcher.stores.tier_budget import COPIES, INDEX_BYTES, DiskShare, disk_bytes, disk_shares, server_bytes
from rowcast.protocol.parts import rank_of
from rowcast.runtime.telemetry.format_numbers import human_bytes

TRIED_ROWS = 2**10  # some in each of the keys that hold a run's rows, so on every server
PAGE_CACHE_BYTES = 2**28  # through which rows are written to the disk


def check_tier(job: Job, seen: Seen, slots: Slots, free_bytes: int) -> Iterator[Finding]:
    """`slots`: of each group; none if they are unknown. Says nothing of a store without a memory tier. Raises
    ConfigError where a run would refuse store.memory."""
    if not isinstance(job.store, StoreWithTier):
        return
    yield from check_budget(job, job.store, free_bytes)
    shares = disk_shares(job, seen.groups)
    yield from check_index(job, seen, shares)
    if isinstance(job.store, Tiered):
        yield from check_default_disk(job.store, seen, shares)
        yield from check_segments(job, job.store, seen, shares)
    if isinstance(job.store, Redis):
        yield check_servers(job, seen, shares)
    if slots:
        _, in_memory = job_levels(job, seen.groups, seen.measured, slots, rank_of(job.ranks, 0))
        rows = " + ".join(f"{n:,}" for n in in_memory)
        yield ok(f"store.memory = {job.store.memory} keeps {rows} rows in memory, all of the device's among them")


def check_budget(job: Job, store: StoreWithTier, free_bytes: int) -> Iterator[Finding]:
    if store.memory_rows is not None:
        return
    pairs = job.ranks.on_host
    of_pairs = "" if pairs == 1 else f" for each of {pairs} prefetchers"
    sentence = f"store.memory = {store.memory}{of_pairs}, and {human_bytes(free_bytes)} of memory are free"
    left = free_bytes - pairs * parse_bytes(store.memory)
    if left < 0:
        yield error(f"{sentence}; lower store.memory or free some memory")
    elif left < PAGE_CACHE_BYTES:
        yield warning(
            f"{sentence}: {human_bytes(left)} remain for the trainer and the page cache, through which rows go to the "
            "disk; lower store.memory"
        )


def check_index(job: Job, seen: Seen, shares: Sequence[DiskShare]) -> Iterator[Finding]:
    """Compares the rows of an epoch with the room of the index: a run that trains more rows ends with an error."""
    is_on_disk = isinstance(job.store, Tiered)
    room, change = ("store.disk has room, or store.memory", "them") if is_on_disk else ("store.memory has", "it")
    for group, share in zip(seen.groups, shares, strict=True):
        trained = trained_rows(group, seen)
        if trained > share.num_rows:
            yield warning(
                f"an epoch may train {trained:,} rows of group {group.name}, but {room} an index, "
                f"for {share.num_rows:,}; raise {change}"
            )


def check_default_disk(store: Tiered, seen: Seen, shares: Sequence[DiskShare]) -> Iterator[Finding]:
    """Without store.disk, the index limits the disk. It uses its memory from the first step on."""
    if store.disk is not None or store.memory_rows is not None:
        return
    rows = sum(share.num_rows for share in shares)
    most = sum(share.nbytes for share in shares)
    enough = sum(twice(trained_rows(group, seen), group) for group in seen.groups)
    sentence = (
        f"store.disk is not set, so {human_bytes(rows * INDEX_BYTES)} of store.memory, at most a quarter, say where up "
        f"to {rows:,} rows lie, and their files may take up to {human_bytes(most)}"
    )
    if enough < most:
        sentence += f"; store.disk = {enough} is twice the rows of an epoch, and leaves more memory for rows"
    yield ok(sentence)


def twice(rows: int, group: GroupSpec) -> int:
    """Bytes on disk of `rows` rows and as many old copies of rows."""
    return max(COPIES * rows * disk_bytes(group), SEGMENTS * page_layout(group.record_bytes).nbytes)


def check_servers(job: Job, seen: Seen, shares: Sequence[DiskShare]) -> Finding:
    """Writes a few rows, reads and deletes them, so that every right is used; and compares the servers' memory."""
    group = seen.groups[0]
    keys = np.arange(TRIED_ROWS, dtype=np.int64)
    with trial_rows(job, group) as cold:
        records = np.zeros((TRIED_ROWS, group.record_bytes), np.uint8)
        places = cold.write(keys, records)
        cold.read(keys, places, records)
        cold.free(keys, places)
        cold.tidy()
        cold.delete()
        rooms = cold.rooms()
    needed = sum(
        min(share.num_rows, trained_rows(g, seen)) * server_bytes(g)
        for g, share in zip(seen.groups, shares, strict=True)
    )
    listed = ", ".join(
        f"{room.server} {'unknown' if room.free_bytes is None else human_bytes(room.free_bytes)}" for room in rooms
    )
    sentence = f"the servers of store.url let rows in, and have memory free: {listed}; all rows take up to "
    sentence += human_bytes(needed)
    if any(room.free_bytes is not None and room.free_bytes < room.share * needed for room in rooms):
        return warning(f"{sentence}: a run may end when they are full; raise their maxmemory or add servers")
    return ok(sentence)


def check_segments(job: Job, store: Tiered, seen: Seen, shares: Sequence[DiskShare]) -> Iterator[Finding]:
    """Checks room on the disk: the files grow as rows are trained, up to their share of store.disk."""
    for group, share in zip(seen.groups, shares, strict=True):
        least = SEGMENTS * page_layout(group.record_bytes).nbytes
        if share.nbytes < least:
            yield error(
                f"store.disk gives {human_bytes(share.nbytes)} to group {group.name}, whose rows of "
                f"{group.record_bytes} bytes need at least {human_bytes(least)}; raise store.disk"
            )
            return
    place, free_bytes = room_at(job.table_folder)
    once = sum(
        min(share.nbytes, trained_rows(g, seen) * disk_bytes(g)) for g, share in zip(seen.groups, shares, strict=True)
    )
    most = sum(share.nbytes for share in shares)
    sentence = (
        f"{place} has {human_bytes(free_bytes)} free for cold rows of up to {human_bytes(once)}, and of up to "
        f"{human_bytes(most)} with old copies of them"
    )
    lower = "set store.disk" if store.disk is None else "lower store.disk"
    short = warning(f"{sentence}; free space there, set another store.path, or {lower}")
    yield from about("disk", [ok(sentence) if free_bytes >= most else short])
