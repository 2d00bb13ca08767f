"""Plans a whole job, without tables or trainer, and records each step's waits and moves.

Of a job of several ranks, the first rank's plans are made, as its prefetcher makes them.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from rowcast.analysis.estimate.pipeline import Counted, Planned, PlannedPiece, Wiring
from rowcast.analysis.estimate.step_kernels import ExchangeCounts, GroupCounts, StepCounts
from rowcast.job.schema import Job, Ranks
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES, job_slots
from rowcast.prefetcher.planner.planner import RowPlanner, job_planner
from rowcast.prefetcher.readers.reader import can_share, open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.prefetcher.readers.workers import LEAST_AHEAD, NUM_AHEAD
from rowcast.prefetcher.run.sizing import job_levels, sizes, stage_threads
from rowcast.prefetcher.run.warm_up import warm_up
from rowcast.protocol.batch import Samples, ScheduledBatch
from rowcast.protocol.inputs import Belonging, belonging
from rowcast.protocol.packing import Piece, cut, plan_block
from rowcast.protocol.parts import arrays_of_samples, rank_of, samples_of
from rowcast.protocol.plan import BarrierPlan, GroupShare, StepPlan
from rowcast.protocol.transport.ring import GUARD_BYTES, largest_payload


def plan_job(job: Job, max_steps: int | None = None) -> tuple[list[Planned], Wiring]:
    """The steps and the pipeline. Raises ConfigError, DataError as a run would."""
    warm_up()  # what is compiled at a first start would count as planning
    groups, rank = group_specs(job), rank_of(job.ranks, 0)
    reader = open_reader(job)
    batches = Timed(schedule(job, reader, max_steps))
    measured = list(islice(batches, MEASURED_BATCHES))
    slots = job_slots(job, groups, measured, rank)
    own = sizes(job, groups, measured, job.lookahead.depth, rank)
    planner = job_planner(
        job,
        groups,
        job_levels(job, groups, measured, slots, rank),
        measured,
        num_threads=stage_threads(job),
        rank=rank,
    )
    num_decoders = job.prefetcher.workers if can_share(job) else 1
    wiring = Wiring(
        depth=job.lookahead.depth,
        num_decoders=num_decoders,
        decoded_ahead=max(-(-NUM_AHEAD // num_decoders), LEAST_AHEAD),
        measured=len(measured),
        ring_bytes=own.ring_bytes,
        staging_bytes=own.staging_bytes,
        num_ranks=job.ranks.count,
    )
    steps = planned_steps(chain(measured, batches), planner, groups, wiring, batches.seconds, job.ranks, belonging(job))
    return list(steps), wiring


class Timed:
    """Batches, and how much processor time each took to decode."""

    def __init__(self, batches: Iterable[ScheduledBatch]) -> None:
        self._batches = iter(batches)
        self.seconds: list[float] = []

    def __iter__(self) -> Iterator[ScheduledBatch]:
        return self

    def __next__(self) -> ScheduledBatch:
        began_s = time.process_time()
        batch = next(self._batches)
        self.seconds.append(time.process_time() - began_s)
        return batch


def planned_steps(
    batches: Iterator[ScheduledBatch],
    planner: RowPlanner,
    groups: tuple[GroupSpec, ...],
    wiring: Wiring,
    decode_s: Sequence[float],
    ranks: Ranks,
    belonging: Belonging,
) -> Iterator[Planned]:
    """`decode_s`: seconds of each batch that was taken so far; grows with them."""
    rank = rank_of(ranks, 0)
    first: int | None = None
    before: Planned | None = None
    added: deque[ScheduledBatch] = deque()  # not planned
    seen: list[set[int]] = [set() for _ in groups]  # keys that were fetched
    while True:
        plan_s = 0.0
        for scheduled in islice(batches, planner.wants_batch):
            first = scheduled.step if first is None else first
            began_s = time.process_time()
            planner.add(scheduled)
            plan_s += time.process_time() - began_s
            added.append(scheduled)
        if planner.wants_batch:
            planner.end()
        if not planner.ready() or first is None:
            break
        if planner.checkpoint_due:
            assert before is not None, "a checkpoint follows a step"
            before = with_barrier(before, planner.barrier("checkpoint", finished=False))
        if before is not None:
            yield before
        known, began_s = planner.num_known, time.process_time()
        scheduled, plan = added.popleft(), planner.plan()
        samples = samples_of(scheduled.batch.size, rank)
        own = scheduled.batch.samples.within(arrays_of_samples(scheduled.batch, samples, belonging))
        plan_s += time.process_time() - began_s
        step = planned(own, plan, groups, wiring, first, known)
        counted = count(own, plan, seen, decode_s[step.step], plan_s, ranks)
        before = replace(step, counted=counted)
    if before is not None:
        yield with_barrier(before, planner.barrier("end", finished=True))


def with_barrier(planned: Planned, barrier: BarrierPlan) -> Planned:
    assert planned.counted is not None, "steps of a plan are counted"
    flushed = tuple(map(len, barrier.dirty))
    return replace(planned, barrier=True, counted=replace(planned.counted, flushed=flushed))


def count(
    own: Samples, plan: StepPlan, seen: Sequence[set[int]], decode_s: float, plan_s: float, ranks: Ranks
) -> Counted:
    """Adds the keys that are fetched to those `seen` of each group. `own`: of one trainer."""
    first = []
    for group, keys in zip(plan.groups, seen, strict=True):
        before = len(keys)
        keys.update(group.fetch_keys.tolist())
        first.append(len(keys) - before)
    return Counted(
        counts=StepCounts(
            trains=plan.kind == "train",
            batch=len(own.labels),
            parts=ranks.num_parts // ranks.count,
            plan_bytes=plan_block(own, plan).nbytes,
            groups=tuple(
                GroupCounts(
                    lookups=group.num_lookups,
                    rows=len(group.unique_slots),
                    fetched=len(group.fetch_keys),
                    written_back=group.num_dirty,
                    exchange=None if group.share is None else exchanged(group.share, ranks),
                )
                for group in plan.groups
            ),
        ),
        first=tuple(first),
        decode_s=decode_s,
        plan_s=plan_s,
    )


def exchanged(share: GroupShare, ranks: Ranks) -> ExchangeCounts:
    """What the first rank exchanges. A link carries both directions at once, so the longer one counts."""
    own, near, far = share.header, slice(1, ranks.on_host), slice(ranks.on_host, None)
    return ExchangeCounts(
        sent=sum(own.send_counts),
        received=sum(own.receive_counts),
        in_host=max(sum(own.send_counts[near]), sum(own.receive_counts[near])),
        across=max(sum(own.send_counts[far]), sum(own.receive_counts[far])),
        trained=own.num_own,
        additions=len(share.home_to) + len(share.to),
    )


def planned(
    own: Samples, plan: StepPlan, groups: tuple[GroupSpec, ...], wiring: Wiring, first: int, known: int
) -> Planned:
    pieces = cut(
        plan_block(own, plan).nbytes,
        [len(group.fetch_keys) for group in plan.groups],
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
