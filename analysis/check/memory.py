"""Checks host memory: compares what both processes of a job need with what is free."""

import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from rowcast.analysis.check.data import Seen
from rowcast.analysis.check.findings import Finding, error, ok, warning
from rowcast.job.models import BottomAndTop, DCNv2Settings
from rowcast.job.schema import EVICTION_POLICIES, Job
from rowcast.job.stores import STORES, StoreWithTier
from rowcast.job.tables import GroupSpec
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.planner.eviction import new_policy
from rowcast.prefetcher.planner.group_planner import num_parts, planner_bytes
from rowcast.prefetcher.planner.horizon import OCCURRENCE_BYTES
from rowcast.prefetcher.planner.planner import WHILE_FILLING
from rowcast.prefetcher.readers.schedule import expected_train_steps
from rowcast.prefetcher.run.sizing import stage_threads
from rowcast.prefetcher.stores.touched_rows import INDEX_LIMIT, ROW_BYTES, TouchedRows, most_indexed
from rowcast.prefetcher.stores.tracked_store import open_row_store
from rowcast.runtime.telemetry.format_numbers import human_bytes

DECODED_AHEAD = 8  # batches between the decoding process and the planner
KEY_BYTES = 8
COUNTED_MODELS = ("dlrm", "dcnv2")  # by `dense_bytes`
DENSE_COPIES = {"sgd": 2, "adagrad": 3, "adam": 4, "adamw": 4}  # weights, gradients, optimizer state


def check_memory(
    job: Job, seen: Seen, slots: Sequence[int], free_bytes: int, ring_bytes: int, cache_bytes: int
) -> Iterator[Finding]:
    """Checks the memory of all pairs on a host. `slots`: of each group of a rank; none if they are unknown.
    `cache_bytes`: rows and staging of a trainer on the CPU; 0 if they are on a GPU.

    Tables take memory row by row as rows are trained: at most their size, and at most one row per look-up of an epoch.
    """
    in_memory, pairs, count = seen.groups if STORES[job.store.kind].in_memory else (), job.ranks.on_host, seen.count
    tables = sum(table_bytes(job, group, trained_rows(group, seen)) for group in in_memory) * pairs // count
    trained_bytes = sum(trained_rows(group, seen) * group.record_bytes for group in seen.groups) // count
    of_pair = {
        "ids known ahead": ahead_bytes(job, seen),
        "the planner": planning_bytes(job, seen, slots),
        "rows written over during a checkpoint": min(parse_bytes(job.checkpoint.memory), trained_bytes),
        "rings": 2 * ring_bytes,
        "rows and staging of a trainer on the CPU": cache_bytes,
        "dense weights": dense_bytes(job, seen) * DENSE_COPIES[job.optimizer.dense.kind],
    }
    parts = {name: pairs * nbytes for name, nbytes in of_pair.items()}
    fixed = sum(parts.values())
    listed = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes)
    unknown = "" if job.model.kind in COUNTED_MODELS else f"; the dense weights of {job.model.kind} are not counted"
    beside = "; store.memory covers the tables" if isinstance(job.store, StoreWithTier) else "; tables are files"
    grow = f", and up to {human_bytes(tables)} for tables as their rows are trained" if in_memory else beside
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
    """Bytes of memory of a group's tables once this many rows are trained, marks and directory included. Raises
    ConfigError as a run would."""
    store = open_row_store(job, group, incarnation=0, checkpoint=None)
    store.close()
    if isinstance(store.numbers, TouchedRows):
        return num_trained * (group.record_bytes + ROW_BYTES + 1)
    return num_trained * group.record_bytes + group.num_rows


def check_row_numbers(job: Job, seen: Seen) -> Iterator[Finding]:
    """Checks groups with more rows than can be numbered, which are trained row by row."""
    for group in seen.groups if not STORES[job.store.kind].full_size else ():
        most, trained = most_indexed(group.num_rows), -(-trained_rows(group, seen) // seen.count)
        if most < group.num_rows:
            each = "" if seen.count == 1 else " of each rank"
            limit = INDEX_LIMIT.format(most=f"{most:,}", rows=f"{group.num_rows:,}")
            sentence = f"an epoch may train {trained:,} rows of group {group.name}{each}"
            fits = f"{sentence}; an index of its {group.num_rows:,} rows holds at most {most:,}"
            yield warning(f"{sentence}, {limit}") if trained > most else ok(fits)


def check_disk(job: Job, seen: Seen) -> Iterator[Finding]:
    """A checkpoint holds every trained row with its key, and the model state. In a run that makes many checkpoints,
    deltas may grow as large as their base, and a merge writes the next base before it removes both."""
    place, free_bytes = room_at(job.run_dir)
    rows = sum(trained_rows(group, seen) * (group.record_bytes + KEY_BYTES) for group in seen.groups)
    copies, kept = (3, job.checkpoint.keep) if job.checkpoint.every else (1, 1)
    needed = copies * rows + kept * dense_bytes(job, seen)
    sentence = f"{place} has {human_bytes(free_bytes)} free for checkpoints of up to {human_bytes(needed)}"
    yield (
        ok(sentence) if needed <= free_bytes else warning(f"{sentence}; free space there or set another job.run_dir")
    )
    if STORES[job.store.kind].full_size:
        yield check_table_files(job, seen)


def check_table_files(job: Job, seen: Seen) -> Finding:
    place, free_bytes = room_at(job.table_folder)
    needed = sum(group.num_rows * (group.record_bytes + 1) for group in seen.groups)
    sentence = (
        f"{place} has {human_bytes(free_bytes)} free for table files of {human_bytes(needed)}, "
        f"allocated at full size from the start"
    )
    return ok(sentence) if needed <= free_bytes else error(f"{sentence}; free space there or set another store.path")


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


def dense_bytes(job: Job, seen: Seen) -> int:
    """Bytes of the dense weights of dlrm and dcnv2; 0 for other models."""
    model = job.model
    if model.kind not in COUNTED_MODELS or seen.reader is None:
        return 0
    assert isinstance(model, BottomAndTop)
    bottom, cross = [len(seen.reader.dense_names), *model.bottom_mlp], 0
    if isinstance(model, DCNv2Settings):
        width = bottom[-1] + sum(table.embedding_dim * len(table.features) for table in job.tables)
        cross = model.cross_layers * (2 * width * model.cross_rank + width)
    else:
        num_vectors = len(job.features) + 1
        width = bottom[-1] + num_vectors * (num_vectors - 1) // 2
    layers = (pairwise(widths) for widths in (bottom, [width, *model.top_mlp]))
    return 4 * (cross + sum((width_in + 1) * width_out for layer in layers for width_in, width_out in layer))


def trained_rows(group: GroupSpec, seen: Seen) -> int:
    """The most rows of a group that can be trained: no more than an epoch looks up."""
    epoch = None if seen.reader is None else seen.reader.num_samples("train")
    rows = 0
    for table in group.tables:
        lookups = table.num_embeddings
        if epoch is not None and seen.num_samples:
            lookups = -(-seen.lookups[table.index] * epoch // seen.num_samples)
        rows += min(table.num_embeddings, lookups)
    return rows
