"""What the prefetcher of a run decides before its first step, and refuses. `rowcast check` asks the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.job.training_identity import check_belongs
from rowcast.prefetcher.pipeline.batch_checksums import check_first
from rowcast.prefetcher.planner.capacity import job_slots
from rowcast.prefetcher.planner.planner import Slots
from rowcast.prefetcher.readers.file_samples import sampled
from rowcast.prefetcher.readers.hot_samples import hot_rows_checksum
from rowcast.prefetcher.readers.pin_files import load_pins
from rowcast.prefetcher.run.sizing import Sizes, job_levels, sizes
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.parts import Rank
from rowcast.runtime.arrays import I64
from rowcast.runtime.checkpoint_manifest import Manifest, ManifestOfVersion3, TrainingData
from rowcast.runtime.telemetry.logs import get_logger


@dataclass(frozen=True, kw_only=True, slots=True)
class Decisions:
    """Of one rank, from the first batches of the run."""

    slots: Slots  # of each group, on the device
    levels: tuple[Slots, ...]  # from the device down: the rows of a memory tier too
    sizes: Sizes
    pinned: tuple[I64, ...] | None  # rows of each group; None: the job names none


def decide(job: Job, groups: tuple[GroupSpec, ...], measured: Sequence[ScheduledBatch], rank: Rank) -> Decisions:
    """`measured`: at most the first MEASURED_BATCHES of the run. Raises ConfigError where cache, memory tier, rings or
    pins do not fit."""
    slots = job_slots(job, groups, measured, rank)
    return Decisions(
        slots=slots,
        levels=job_levels(job, groups, measured, slots, rank),
        sizes=sizes(job, groups, measured, job.lookahead.depth, rank),
        pinned=None if job.cache.pin is None else load_pins(Path(job.cache.pin), groups),
    )


def training_data(job: Job, dense_names: Sequence[str], paths: Sequence[Path]) -> TrainingData:
    names = tuple(dense_names)
    return TrainingData(
        files=sampled(paths), hot_rows=hot_rows_checksum(job), num_dense=len(names), dense_columns=names
    )


def check_continues(newest: Manifest, job: Job, data: TrainingData, measured: Sequence[ScheduledBatch]) -> None:
    """Raises if the checkpoint belongs to another job or to other data. `measured`: the batches that follow it."""
    if not newest.is_import and not newest.machine.threads:
        get_logger().warning("an older version made this checkpoint: its number of torch threads is not known")
    check_belongs(newest, job, data)
    if isinstance(newest, ManifestOfVersion3):
        get_logger().warning("an older version made this checkpoint: only the sizes of data files are compared")
    check_first(measured, newest.ahead)
