"""Plans a whole job, without tables or trainer, and says of each step what it waits for and what it moves."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice

from rowcast.analysis.predict.pipeline import Planned, PlannedPiece, Wiring
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES, job_slots
from rowcast.prefetcher.planner.job_planner import job_planner
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.reader import can_share, open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.prefetcher.readers.worker import LEAST_AHEAD, NUM_AHEAD
from rowcast.prefetcher.run.sizing import automatic_threads, job_tier_slots, sizes
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.packing import Piece, cut, plan_block
from rowcast.protocol.plan import StepPlan
from rowcast.protocol.transport.ring import GUARD_BYTES, largest_payload


def plan_job(job: Job, max_steps: int | None = None) -> tuple[list[Planned], Wiring]:
    """Raises ConfigError and DataError as a run would."""
    groups = group_specs(job)
    batches = iter(schedule(job, open_reader(job), max_steps))
    measured = list(islice(batches, MEASURED_BATCHES))
    slots = job_slots(job, groups, measured)
    own = sizes(job, groups, measured, job.lookahead.depth)
    planner = job_planner(
        job,
        groups,
        slots,
        measured,
        num_threads=automatic_threads() if job.prefetcher.threads == "auto" else job.prefetcher.threads,
        keep_ids=True,
        tier_slots=job_tier_slots(job, groups, measured, slots),
    )
    num_decoders = job.prefetcher.workers if can_share(job) else 1
    wiring = Wiring(
        depth=job.lookahead.depth,
        num_decoders=num_decoders,
        decoded_ahead=max(-(-NUM_AHEAD // num_decoders), LEAST_AHEAD),
        measured=len(measured),
        ring_bytes=own.ring_bytes,
        staging_bytes=own.staging_bytes,
    )
    return list(planned_steps(chain(measured, batches), planner, groups, wiring)), wiring


def planned_steps(
    batches: Iterator[ScheduledBatch], planner: RowPlanner, groups: tuple[GroupSpec, ...], wiring: Wiring
) -> Iterator[Planned]:
    first: int | None = None
    before: Planned | None = None
    while True:
        for scheduled in islice(batches, planner.wants_batch):
            first = scheduled.step if first is None else first
            planner.add(scheduled)
        if planner.wants_batch:
            planner.end()
        if not planner.ready() or first is None:
            break
        if planner.checkpoint_due:
            planner.barrier("checkpoint", finished=False)
            assert before is not None, "a checkpoint follows a step"
            before = with_barrier(before)
        if before is not None:
            yield before
        known = planner.num_known
        scheduled, plan = planner.plan()
        before = planned(scheduled, plan, groups, wiring, first, known)
    if before is not None:
        yield with_barrier(before)


def with_barrier(planned: Planned) -> Planned:
    return replace(planned, barrier=True)


def planned(
    scheduled: ScheduledBatch, plan: StepPlan, groups: tuple[GroupSpec, ...], wiring: Wiring, first: int, known: int
) -> Planned:
    pieces = cut(
        plan_block(scheduled.batch, plan).nbytes,
        [len(group.fetch) for group in plan.groups],
        [group.record_bytes for group in groups],
        largest_payload(wiring.ring_bytes),
        wiring.staging_bytes,
    )
    fill_after = [group.fill_after for group in plan.groups if group.fill_after is not None]
    return Planned(
        step=plan.step - first,
        known_through=plan.step - first + known - 1,
        after_step=None if plan.after_step is None else plan.after_step - first,
        fill_after=max(fill_after) - first if fill_after else None,
        pieces=tuple(planned_piece(piece, plan, groups) for piece in pieces),
        barrier=False,
    )


def planned_piece(piece: Piece, plan: StepPlan, groups: tuple[GroupSpec, ...]) -> PlannedPiece:
    back = sum(
        max(0, min(span.count, plan.groups[span.group].num_dirty - span.start)) * groups[span.group].record_bytes
        for span in piece.rows
    )
    return PlannedPiece(
        ring_bytes=piece.nbytes + 2 * GUARD_BYTES,
        row_bytes=piece.nbytes - piece.rows[0].offset if piece.rows else 0,
        back_bytes=back,
    )
