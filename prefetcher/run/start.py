"""What the prefetcher of a run decides before its first step, and refuses. `rowcast check` asks the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rowcast.job.embedding_tables import placement_of
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, cuts, with_placements
from rowcast.job.training_identity import check_belongs
from rowcast.prefetcher.pipeline.batch_checksums import check_first, file_checksums
from rowcast.prefetcher.planner.capacity import measure, slots_of
from rowcast.prefetcher.planner.placement import Traffic, chosen
from rowcast.prefetcher.planner.planner import Slots
from rowcast.prefetcher.readers.data_files import sampled
from rowcast.prefetcher.readers.source import SourceInfo
from rowcast.prefetcher.run.sizing import Sizes, job_levels, sizes, tier_rows
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.parts import Rank, belonging
from rowcast.runtime.checkpoint_manifest import Manifest, ManifestOfVersion3, TrainingData
from rowcast.runtime.telemetry.logs import get_logger


@dataclass(frozen=True, kw_only=True, slots=True)
class Decisions:
    """Of one rank, from the first batches of the run."""

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
    if newest is not None and len(newest.shards) == job.ranks.count and own == placements_of(newest):
        kept = [len(held) for held in newest.points or ((),) * len(own)]
        # the cache may be set otherwise since
        if all(pieces < 2 or pieces in cuts(job, table) for table, pieces in zip(job.tables, kept, strict=True)):
            return with_placements(job, [placement_of(pieces) for pieces in kept])
    return with_placements(job, chosen(job, count()))


def placements_of(checkpoint: Manifest) -> list[str]:
    """As its job file had them."""
    return [table.get("placement", "rows") for table in checkpoint.job["tables"]]


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
