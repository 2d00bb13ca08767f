"""Checks memory and disk: compares what both processes of a job need with what is free."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rowcast.analysis.check.data import Seen
from rowcast.analysis.show import Finding, about, error, ok, warning
from rowcast.job.schema import EVICTION_POLICIES, Job
from rowcast.job.stores import Redis, StoreWithTier, Tiered
from rowcast.job.tables import GroupSpec
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.planner.eviction import new_policy
from rowcast.prefetcher.planner.group_planner import num_parts, planner_bytes
from rowcast.prefetcher.planner.horizon import OCCURRENCE_BYTES
from rowcast.prefetcher.planner.planner import WHILE_FILLING
from rowcast.prefetcher.readers.reader import expected_train_steps
from rowcast.prefetcher.run.sizing import stage_threads
from rowcast.prefetcher.stores.cold.segment_file import SEGMENTS
from rowcast.prefetcher.stores.cold.segments import page_layout
from rowcast.prefetcher.stores.redis_store import trial_rows
from rowcast.prefetcher.stores.row_loops import stored_bytes
from rowcast.prefetcher.stores.tier_budget import COPIES, INDEX_BYTES, DiskShare, disk_bytes, disk_shares, server_bytes
from rowcast.prefetcher.stores.touched_rows import INDEX_LIMIT, NUMBER_BYTES, ROW_BYTES, IndexedRows, most_indexed
from rowcast.prefetcher.stores.tracked_store import open_row_store
from rowcast.runtime.telemetry.format_numbers import human_bytes

DECODED_AHEAD = 8  # batches between the decoding process and the planner
KEY_BYTES = 8
TRIED_ROWS = 2**10  # some in each of the keys that hold a run's rows, so on every server
PAGE_CACHE_BYTES = 2**28  # through which rows are written to the disk
DENSE_COPIES = {"sgd": 2, "adagrad": 3, "adam": 4, "adamw": 4}  # weights, gradients, optimizer state


def check_memory(
    job: Job,
    seen: Seen,
    slots: Sequence[int],
    free_bytes: int,
    ring_bytes: int,
    cache_bytes: int,
    dense_bytes: int | None,
) -> Iterator[Finding]:
    """Checks the memory of all pairs on a host. `slots`: of each group of a rank; none if they are unknown.
    `cache_bytes`: rows and staging of a trainer on the CPU; 0 if they are on a GPU. `dense_bytes`: of the model's
    weights; None if they are unknown.

    Tables take memory row by row as rows are trained: at most their size, and at most one row per look-up of an epoch.
    """
    dense = job.optimizer.dense
    in_memory, pairs, count = not isinstance(job.store, StoreWithTier), job.ranks.on_host, seen.count
    tables = (
        sum(table_bytes(job, group, trained_rows(group, seen)) for group in seen.groups if in_memory) * pairs // count
    )
    trained_bytes = sum(trained_rows(group, seen) * group.record_bytes for group in seen.groups) // count
    of_pair = {
        "ids known ahead": ahead_bytes(job, seen),
        "the planner": planning_bytes(job, seen, slots),
        "rows written over during a checkpoint": min(parse_bytes(job.checkpoint.memory), trained_bytes),
        "rings": 2 * ring_bytes,
        "rows and staging of a trainer on the CPU": cache_bytes,
        "dense weights": (dense_bytes or 0) * (DENSE_COPIES[dense.kind] if dense else 2),
    }
    parts = {name: pairs * nbytes for name, nbytes in of_pair.items()}
    fixed = sum(parts.values())
    listed = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes)
    what = "the dense weights are" if dense_bytes is None else "" if dense else "the model's own optimizer state is"
    unknown = what and f"; {what} unknown and not counted"
    trained = f", and up to {human_bytes(tables)} for tables as their rows are trained"
    grow = trained if in_memory else "; store.memory covers the tables"
    of_pairs = "needs " if pairs == 1 else f"{pairs} pairs of prefetcher and trainer need "
    sentence = f"{of_pairs}{human_bytes(fixed)} ({listed}) of {human_bytes(free_bytes)} free{grow}{unknown}"
    if fixed > free_bytes:
        yield error(
            f"{sentence}: too little even without tables; free some memory, or lower cache.capacity, lookahead or "
            "transport.ring"
        )
    elif fixed + tables > free_bytes:
        yield warning(f"{sentence}: too little if every row is trained; free memory or make tables smaller")
    else:
        yield ok(sentence)


def table_bytes(job: Job, group: GroupSpec, num_trained: int) -> int:
    """Returns the bytes of a group's tables in memory once this many rows are trained, with its index. Raises
    ConfigError as a run would."""
    store = open_row_store(job, group)
    store.close()
    if isinstance(store.numbers, IndexedRows):
        return num_trained * stored_bytes(group.record_bytes) + group.num_rows * NUMBER_BYTES
    return num_trained * (stored_bytes(group.record_bytes) + ROW_BYTES + 1)


def check_row_numbers(job: Job, seen: Seen) -> Iterator[Finding]:
    """Checks groups with more rows than can be numbered, which are trained row by row."""
    for group in seen.groups:
        most, trained = most_indexed(group.num_rows), -(-trained_rows(group, seen) // seen.count)
        if most < group.num_rows:
            each = "" if seen.count == 1 else " of each rank"
            limit = INDEX_LIMIT.format(most=f"{most:,}", rows=f"{group.num_rows:,}")
            sentence = f"an epoch may train {trained:,} rows of group {group.name}{each}"
            fits = f"{sentence}; an index of its {group.num_rows:,} rows holds at most {most:,}"
            yield warning(f"{sentence}, {limit}") if trained > most else ok(fits)


def check_disk(job: Job, seen: Seen, dense_bytes: int | None) -> Iterator[Finding]:
    """A checkpoint holds every trained row with its key, and the model state. In a run that makes many checkpoints,
    deltas may grow as large as their base, and a merge writes the next base before it removes both."""
    place, free_bytes = room_at(job.run_dir)
    rows = sum(trained_rows(group, seen) * (group.record_bytes + KEY_BYTES) for group in seen.groups)
    copies, kept = (3, job.checkpoint.keep) if job.checkpoint.every else (1, 1)
    needed = copies * rows + kept * (dense_bytes or 0)
    sentence = f"{place} has {human_bytes(free_bytes)} free for checkpoints of up to {human_bytes(needed)}"
    yield (
        ok(sentence) if needed <= free_bytes else warning(f"{sentence}; free space there or set another job.run_dir")
    )


def room_at(folder: Path) -> tuple[Path, int]:
    place = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    return place, shutil.disk_usage(place).free


def ahead_bytes(job: Job, seen: Seen) -> int:
    """Batches between the data and the plans: the horizon's, and those decoded ahead of it. Their look-ups by row take
    about as much again."""
    batch = 2 * seen.largest_batch_bytes
    horizon = job.lookahead.horizon
    known = parse_bytes(job.lookahead.id_bytes) if horizon == "auto" else max(horizon, job.lookahead.depth) * batch
    return known + DECODED_AHEAD * job.prefetcher.workers * batch


def planning_bytes(job: Job, seen: Seen, slots: Sequence[int]) -> int:
    """Returns the planner's bytes for resident and known rows once all slots are in use."""
    if not slots:
        return 0
    scored, num_known = new_policy(job.cache.policy, ()).scored, likely_horizon(job, seen, slots) + 1
    return sum(
        planner_bytes(n, num_known * largest, num_parts(largest, stage_threads(job)), scored=scored)
        for n, largest in zip(slots, seen.largest_rows, strict=True)
    )


def likely_horizon(job: Job, seen: Seen, slots: Sequence[int]) -> int:
    """Batches known beyond the one being planned. An automatic horizon grows while the slots fill, here as fast as by
    the first batches, within its bytes and the run."""
    lookahead = job.lookahead
    if not EVICTION_POLICIES[job.cache.policy].looks_ahead:
        return 0
    if lookahead.horizon != "auto" or seen.reader is None:
        return lookahead.horizon_batches
    new_rows = seen.touched.distinct_rows
    filling = (
        -(-n * len(seen.measured) // rows)
        for n, rows, group in zip(slots, new_rows, seen.groups, strict=True)
        if n < group.num_rows
    )
    grown = lookahead.horizon_batches + WHILE_FILLING * max(filling, default=0)
    within_bytes = parse_bytes(lookahead.id_bytes) // (OCCURRENCE_BYTES * sum(seen.largest_rows))
    num_steps = expected_train_steps(job, seen.reader, None)
    return max(lookahead.horizon_batches, min(grown, within_bytes, grown if num_steps is None else num_steps))


def trained_rows(group: GroupSpec, seen: Seen) -> int:
    """Returns the most rows of a group that can be trained: no more than an epoch looks up."""
    epoch = None if seen.reader is None else seen.reader.num_samples("train")
    rows = 0
    for table in group.tables:
        lookups = table.num_embeddings
        if epoch is not None and seen.num_samples:
            lookups = -(-seen.lookups[table.index] * epoch // seen.num_samples)
        rows += min(table.num_embeddings, lookups)
    return rows


def check_tier(job: Job, seen: Seen, free_bytes: int) -> Iterator[Finding]:
    """Finds nothing for a store without a memory tier."""
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
    if seen.start is not None:
        _, in_memory = seen.start.levels
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
