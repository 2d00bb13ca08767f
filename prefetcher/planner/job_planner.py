"""Makes the planner of a job, the same for a run and for a simulation."""

from collections.abc import Sequence

from rowcast.job.schema import CheckpointInterval, Job, Lookahead
from rowcast.job.tables import GroupSpec
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.planner.auto_horizon import AutoHorizon
from rowcast.prefetcher.planner.horizon import ScheduledLookups
from rowcast.prefetcher.planner.level import Slots
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.protocol.parts import UNDIVIDED, Rank
from rowcast.runtime.arrays import I64


def job_planner(
    job: Job,
    groups: tuple[GroupSpec, ...],
    slots: Sequence[Slots],
    first_batches: Sequence[ScheduledLookups],
    *,
    pinned: tuple[I64, ...] | None = None,
    num_threads: int = 1,
    checkpoint_every: CheckpointInterval | None = None,
    rank: Rank = UNDIVIDED,
) -> RowPlanner:
    """`first_batches`: the batches that divided the capacity. `pinned`: the loaded rows of cache.pin.
    `checkpoint_every`: the job's interval by default. The others as in RowPlanner."""
    return RowPlanner(
        groups,
        slots,
        job.lookahead.depth,
        job_horizon(job.lookahead),
        policy=job.cache.policy,
        first_batches=first_batches,
        pinned=pinned,
        num_threads=num_threads,
        checkpoint_every=job.checkpoint.interval if checkpoint_every is None else checkpoint_every,
        rank=rank,
    )


def job_horizon(lookahead: Lookahead) -> int | AutoHorizon:
    if lookahead.horizon == "auto":
        return AutoHorizon(lookahead.horizon_batches, parse_bytes(lookahead.id_bytes))
    return lookahead.horizon_batches
