"""Chooses what the job file leaves open: the planner's threads, and the bytes of the rings and of staging.

Rings and staging are sized by a *typical plan*: the rows that the first batches need for the first time, per batch, and
the arrays that come with them, for all steps that a plan may serve. A larger plan, such as the first one, is cut into
more pieces.

    each ring      depth + 1 typical plans: all that may be in flight
    staging        the rows of two typical plans, each way: one is used while the next one arrives

A store with a memory tier keeps two kinds of rows there: rows that the planner counts (`job_levels`), and rows that
wait to leave until all rows of their step are home (`tier_reserve`).

Decides, before the first step of a run, what the prefetcher needs and refuses. `rowcast check` asks the same.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from rowcast.job.embedding_tables import placement_of
from rowcast.job.schema import MIN_RING_BYTES, Job
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import GroupSpec, aligned, batch_features, cuts, with_placements
from rowcast.job.training_identity import check_belongs
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.pipeline.batch_checksums import check_first, file_checksums
from rowcast.prefetcher.planner.exchange import ShareOfBatch
from rowcast.prefetcher.planner.first_batches import Touched, Traffic, chosen, hand_out, measure, slots_of
from rowcast.prefetcher.planner.group_planner import planner_bytes
from rowcast.prefetcher.planner.grouping import JointGrouper
from rowcast.prefetcher.planner.planner import Slots
from rowcast.prefetcher.readers.data_files import sampled
from rowcast.prefetcher.readers.source import SourceInfo
from rowcast.prefetcher.stores.row_loops import stored_bytes
from rowcast.prefetcher.stores.tier_budget import INDEX_BYTES, MOST_SLOTS, SLOT_BYTES, disk_shares
from rowcast.protocol.batch import Batch, Lookups, Scheduled, ScheduledBatch
from rowcast.protocol.parts import (
    UNDIVIDED,
    Rank,
    arrays_of_samples,
    belonging,
    ids_of_samples,
    samples_of,
    samples_of_part,
)
from rowcast.protocol.plan import ARRAY_ALIGNMENT, MOST_ORDERED
from rowcast.protocol.plan_layout import EXCHANGE_ARRAYS, GROUP_ARRAYS, Counts
from rowcast.protocol.transport.ring import largest_payload
from rowcast.protocol.transport.ring_file import free_shared_memory
from rowcast.runtime.checkpoint_manifest import Manifest, ManifestOfVersion3, TrainingData
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import usable_cores
from rowcast.runtime.telemetry.format_numbers import human_bytes
from rowcast.runtime.telemetry.logs import get_logger

LEAST_RING_BYTES = 2 * 2**20
LEAST_STAGING_BYTES = 2**19
ARRAYS_SPARE = 1.25  # for dense features and labels, which are unknown yet, and for larger batches
MOST_THREADS = 8
DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))  # drivers of NVIDIA and AMD make them
ONE_PART = 1  # of the planner, for a tier's slots: they decide plans, so a machine's cores may not decide them
PROCESS_BYTES = 320 * 2**20  # of the prefetcher with its libraries and compiled loops, before it has any rows
TIER_BUFFER_BYTES = 16 * 2**20  # of each group: rows that are read, written and moved, and the end of its file


@dataclass(frozen=True, kw_only=True, slots=True)
class Typical:
    """Bytes of a typical plan, or of a step of it, estimated from the first batches."""

    rows: int
    arrays: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    ring_bytes: int  # of each ring
    staging_bytes: int  # on the device, each way


def stage_threads(job: Job) -> int:
    """The threads of the planner, and of reads and writes of rows."""
    threads = job.prefetcher.threads
    return automatic_threads(usable_cores(), trains_on_device(job.trainer.device)) if threads == "auto" else threads


def automatic_threads(cores: int, is_on_device: bool) -> int:
    """Returns a quarter of the cores, because readers and the trainer need the rest. With a trainer on a device, which
    needs a core or two, returns half."""
    return max(1, min(MOST_THREADS, cores // (2 if is_on_device else 4)))


def trains_on_device(name: str) -> bool:
    """`name`: trainer.device. Torch, which would know, is not imported here: a wrong guess costs time and no bit."""
    return name.startswith("cuda") or (name == "auto" and any(own.exists() for own in DEVICE_FILES))


def sizes(
    job: Job, groups: Sequence[GroupSpec], measured: Sequence[ScheduledBatch], depth: int, rank: Rank = UNDIVIDED
) -> Sizes:
    """Sizes for a run of the job, from its first batches. Raises ConfigError if the smallest rings do not fit."""
    of_step, transport = typical_plan(groups, measured, rank), job.transport
    of_samples = max((input_bytes(job, scheduled.batch, rank) for scheduled in measured), default=0)
    arrays = of_step.arrays + int(ARRAYS_SPARE * of_samples)
    typical = Typical(rows=job.bundle * of_step.rows, arrays=job.bundle * arrays)
    ring_bytes = (
        transport.mirror_bytes
        if transport.is_tcp
        else transport.ring_bytes or automatic_ring_bytes(typical, depth, job.ranks.on_host)
    )
    return Sizes(ring_bytes=ring_bytes, staging_bytes=staging_bytes(typical.rows, ring_bytes))


def typical_plan(
    groups: Sequence[GroupSpec], measured: Sequence[Scheduled[Lookups]], rank: Rank = UNDIVIDED
) -> Typical:
    """Returns those of a step. `measured`: at most the first MEASURED_BATCHES of the run. `rank`: whose plan."""
    if not measured:
        return Typical(rows=0, arrays=0)
    touched = measure(tuple(groups), measured, rank)
    new_rows = sum(rows * group.record_bytes for rows, group in zip(touched.distinct_rows, groups, strict=True))
    most_rows = sum(touched.largest_batch_rows)
    batches = [scheduled.batch for scheduled in measured]
    if rank.is_divided:
        share, whole = ShareOfBatch(groups, JointGrouper(groups), rank), batch_features(groups)
        arrays = [shared_arrays_bytes(share, batch, most_rows, rank, whole) for batch in batches]
    else:
        arrays = [group_arrays_bytes(own, most_rows, ordered=is_ordered(groups, own)) for own in batches]
    most_arrays = max(arrays)
    return Typical(rows=new_rows // len(measured), arrays=int(ARRAYS_SPARE * most_arrays))


def is_ordered(groups: Sequence[GroupSpec], batch: Lookups) -> bool:
    """Returns whether the plans of a whole batch have `order` in every group."""
    pooled_alone = batch.offsets is None and batch.weights is None and not any(g.unpooled_features for g in groups)
    return pooled_alone and all(
        len(table.features) * batch.size <= MOST_ORDERED for group in groups for table in group.tables
    )


def input_bytes(job: Job, batch: Batch, rank: Rank) -> int:
    """Returns the bytes of the rank's share of the batch's arrays, without dense features and labels."""
    cut = arrays_of_samples(batch, samples_of(batch.size, rank), belonging(job))
    return sum(array.nbytes for array in cut.of(batch.inputs).values())


def group_arrays_bytes(batch: Lookups, num_rows: int, *, ordered: bool) -> int:
    present = {name for name in ("offsets", "weights") if getattr(batch, name) is not None}
    present |= {"order"} if ordered else set()
    counts = Counts(
        samples=batch.size,
        lookups=len(batch.ids),
        unique=num_rows,
        bags=batch.num_bags,
        fetch=num_rows,
        present=frozenset(present),
    )
    return sum(layout.nbytes_of(counts) for layout in GROUP_ARRAYS.values())


def shared_arrays_bytes(share: ShareOfBatch, batch: Lookups, num_owned: int, rank: Rank, whole: Collection[int]) -> int:
    """`num_owned`: rows of the batch in the rank's shard. `whole`: as in `ids_of_samples`. A rank sends about as many
    rows as it receives."""
    own_samples = [samples_of_part(batch.size, rank.parts, part) for part in rank.own_parts]
    parts = [ids_of_samples(batch, samples, whole) for samples in own_samples]
    own = share.want(share.sources(parts, batch))
    sources, received = [source for rows in own for source in rows.sources], sum(len(rows.home.keys) for rows in own)
    unique = sum(source.num_unique for source in sources)
    counts = Counts(
        samples=sum(part.size for part in parts),
        lookups=sum(source.num_lookups for source in sources),
        unique=unique,
        bags=sum(source.num_bags for source in sources),
        fetch=num_owned,
        present=frozenset(name for name in ("offsets", "weights") if getattr(batch, name) is not None),
        exchanges=True,
        sent=received,
        returned=received,
        trained=num_owned,
        additions=received,
        home_additions=unique - received,
    )
    return sum(layout.nbytes_of(counts) for layout in (*GROUP_ARRAYS.values(), *EXCHANGE_ARRAYS.values()))


def automatic_ring_bytes(typical: Typical, depth: int, pairs: int) -> int:
    """Returns a ring's bytes, at most a quarter of the free shared memory divided among the `pairs` on this host."""
    needed = max(LEAST_RING_BYTES, (depth + 1) * (typical.rows + typical.arrays))
    free = free_shared_memory()
    allowed = free // (4 * pairs)
    if allowed < MIN_RING_BYTES:
        of_pairs = "" if pairs == 1 else f" of each of {pairs} pairs"
        raise ConfigError(
            f"/dev/shm has {free // 4 * 4} bytes free, and two rings{of_pairs} need at least "
            f"{8 * MIN_RING_BYTES * pairs}; enlarge it or free space in it"
        )
    return min(aligned(needed, 4096), allowed // 4096 * 4096)


def staging_bytes(typical_rows: int, ring_bytes: int) -> int:
    """Returns the bytes of staging. A piece takes at most half a ring, so more would be unused."""
    return min(largest_payload(ring_bytes), aligned(max(LEAST_STAGING_BYTES, 2 * typical_rows), ARRAY_ALIGNMENT))


def check_shared_memory(ring_bytes: int) -> None:
    """Raises ConfigError if the two rings do not fit, before anything is allocated."""
    free = free_shared_memory()
    if 2 * ring_bytes > free:
        raise ConfigError(
            f"two rings of {ring_bytes} bytes need {2 * ring_bytes} bytes of /dev/shm, where {free} are free; "
            f"make transport.ring smaller or enlarge /dev/shm"
        )


def job_levels(
    job: Job, groups: tuple[GroupSpec, ...], touched: Touched, slots: Slots, rings: Callable[[], Sizes]
) -> tuple[Slots, ...]:
    """The slots of each level that the planner plans in a run of the job: `slots` on the device, and the rows in memory
    of a store with a memory tier.

    `touched`: by the first batches. `rings`: called where they share the memory. Raises ConfigError if
    store.memory is too small."""
    store = job.store
    if not isinstance(store, StoreWithTier):
        return (slots,)
    if store.memory_rows is not None:
        return slots, rows_alone(store.memory_rows, groups, slots)
    reserve = tier_reserve(job, touched)
    shares = [rows * group.record_bytes for rows, group in zip(touched.distinct_rows, groups, strict=True)]
    limits = [min(group.num_rows, MOST_SLOTS) for group in groups]
    budget, ring_bytes = parse_bytes(store.memory), rings().ring_bytes
    parts = tier_parts(job, groups, slots, ring_bytes)
    rest_bytes = budget - sum(parts.values())
    costs = [stored_bytes(group.record_bytes) + SLOT_BYTES for group in groups]
    least = [min(n + spare, limit) for n, spare, limit in zip(slots, reserve, limits, strict=True)]

    def divided(nbytes: int) -> list[int]:
        rows = list(least)
        hand_out(rows, limits, shares, costs, nbytes - sum(map(operator.mul, least, costs)))
        return rows

    def taken(rows: Sequence[int]) -> int:
        return sum(n * cost + planner_bytes(n, 0, ONE_PART) for n, cost in zip(rows, costs, strict=True))

    def beside(memory: int) -> int:
        other = replace(job, store=replace(store, memory=memory))
        return sum(tier_parts(other, groups, slots, ring_bytes).values())

    low, high = sum(map(operator.mul, least, costs)), rest_bytes
    if taken(least) > rest_bytes:
        needed = sum(parts.values()) + taken(least)
        while (more := beside(needed) + taken(least)) > needed:  # a larger memory has a larger index
            needed = more
        listed = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in parts.items())
        rows = " + ".join(map(str, least))
        raise ConfigError(
            f"store.memory = {store.memory!r} ({budget} bytes) is too small: {listed} leave "
            f"{human_bytes(max(0, rest_bytes))} for rows, but the rows on the device and those that wait to leave, "
            f"{rows}, take {human_bytes(taken(least))}; set {needed} bytes or more"
        )
    while high - low > 2**16:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(divided(middle)) <= rest_bytes else (low, middle)
    most = zip(divided(low), limits, reserve, strict=True)
    return slots, tuple(n if n == limit else n - spare for n, limit, spare in most)


def rows_alone(rows: int, groups: Sequence[GroupSpec], slots: Sequence[int]) -> tuple[int, ...]:
    for group, least in zip(groups, slots, strict=True):
        if rows < least:
            raise ConfigError(
                f'store.memory = "{rows} rows" is too small: the device holds {least} rows of group {group.name}, and '
                f'all of them must be in memory; set "{max(slots)} rows" or more, or lower cache.capacity'
            )
    return tuple(min(rows, group.num_rows, MOST_SLOTS) for group in groups)


def tier_reserve(job: Job, touched: Touched) -> tuple[int, ...]:
    """Returns the rows of each group that may wait to leave: those of all typical plans that can be in flight."""
    under_way = (3 * job.lookahead.depth + 4) * job.bundle
    return tuple(under_way * max(1, -(-rows // max(1, touched.num_batches))) for rows in touched.distinct_rows)


def tier_rows(job: Job, groups: tuple[GroupSpec, ...], touched: Touched, tier_slots: Sequence[int]) -> tuple[int, ...]:
    """Returns the rows of each group that fit into memory, including those that wait to leave."""
    reserve = tier_reserve(job, touched)
    return tuple(
        min(n + spare, group.num_rows, MOST_SLOTS) for n, spare, group in zip(tier_slots, reserve, groups, strict=True)
    )


def tier_parts(job: Job, groups: tuple[GroupSpec, ...], slots: Sequence[int], ring_bytes: int) -> dict[str, int]:
    """Returns the memory used beside the tier's rows, in bytes."""
    index_rows = sum(share.num_rows for share in disk_shares(job, groups))
    return {
        "the process": PROCESS_BYTES,
        "rings": 2 * ring_bytes,
        "ids known ahead": parse_bytes(job.lookahead.id_bytes),
        "the plans of the device": sum(planner_bytes(n, 0, ONE_PART) for n in slots),
        "rows written over during a checkpoint": parse_bytes(job.checkpoint.memory),
        f"an index of {index_rows} rows": index_rows * INDEX_BYTES,
        "buffers": len(groups) * TIER_BUFFER_BYTES,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Decisions:
    """What one rank decides from the first batches of the run."""

    slots: Slots  # of each group, on the device
    levels: tuple[Slots, ...]  # from the device down: the rows of a memory tier too
    memory_rows: tuple[Slots, ...]  # for each level below the device: its rows, and room for those that wait to leave
    sizes: Sizes


def decide(job: Job, groups: tuple[GroupSpec, ...], measured: Sequence[ScheduledBatch], rank: Rank) -> Decisions:
    """`measured`: at most the first MEASURED_BATCHES of the run. Raises ConfigError where cache, memory tier or rings
    do not fit."""
    touched = measure(groups, measured, rank)
    slots = slots_of(job, groups, touched)
    of_rings = sizes(job, groups, measured, job.lookahead.depth, rank)
    levels = job_levels(job, groups, touched, slots, lambda: of_rings)
    return Decisions(
        slots=slots,
        levels=levels,
        memory_rows=tuple(tier_rows(job, groups, touched, in_memory) for in_memory in levels[1:]),
        sizes=of_rings,
    )


def placed(job: Job, newest: Manifest | None, count: Callable[[], Traffic]) -> Job:
    """Returns the job with every table placed. `newest`: where the run continues. `count`: counts the batches that
    follow.

    What is left to `auto` stays as that checkpoint has it, if as many ranks wrote it, so that all attempts of a run
    place tables alike."""
    own = [table.placement for table in job.tables]
    if "auto" not in own:
        return job
    is_same = newest is not None and newest.job.get("ranks", {}).get("memory") == job.ranks.memory
    before = [] if newest is None else [table.get("placement", "rows") for table in newest.job["tables"]]
    if newest is not None and is_same and len(newest.shards) == job.ranks.count and own == before:
        kept = [len(held) for held in newest.points or ((),) * len(own)]
        # the cache may be set otherwise since
        if all(pieces < 2 or pieces in cuts(job, table) for table, pieces in zip(job.tables, kept, strict=True)):
            return with_placements(job, [placement_of(pieces) for pieces in kept])
    return with_placements(job, chosen(job, count()))


def training_data(dense_names: Sequence[str], paths: Sequence[Path]) -> TrainingData:
    return TrainingData(files=sampled(paths), num_dense=len(dense_names), dense_columns=tuple(dense_names))


def data_checksums(data: TrainingData, info: SourceInfo) -> dict[str, str]:
    """What ranks compare before the first step, besides their first batches."""
    epoch = f"{info.num_train} {info.num_eval} {info.epoch_batches}"
    return {**file_checksums(data.files), "the length of an epoch": epoch}


def check_continues(
    newest: Manifest, job: Job, data: TrainingData, measured: Sequence[ScheduledBatch], rank: Rank
) -> None:
    """Raises if the checkpoint belongs to another job or to other data. `measured`: the batches that follow it."""
    if not newest.is_import and not newest.machine.threads:
        get_logger().warning("an older version made this checkpoint: its number of torch threads is not known")
    check_belongs(newest, job, data)
    if isinstance(newest, ManifestOfVersion3):
        get_logger().warning("an older version made this checkpoint: only the sizes of data files are compared")
    check_first(measured, rank, belonging(job), newest.known_ahead(rank.parts))
