"""Plans a whole job, without tables or trainer, and records each step's waits, moves and kernels.

For a job of several ranks, makes the first rank's plans, as its prefetcher would.

copy in     the plan's arrays and the fetched rows, from the ring to the device
fill        victims leave their slots, fetched rows go there
step        look up, model forward, backward, row update, dense optimizer
copy out    victims, from the device to the ring
exchange    rows, their gradients and the sums of the dense side, between ranks
fetch, write back, barrier      rows of each group, from the store and to it

A rank looks up its parts' rows where they were received, and trains the rows of its shard. An evaluation looks up and
computes forward.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from rowcast.analysis.estimate.pipeline import KernelCall, PlannedPiece, PlannedStep, Wiring
from rowcast.analysis.simulate.moves import entries
from rowcast.job.file import with_values
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.planner.first_batches import MEASURED_BATCHES, counted, measure, slots_of
from rowcast.prefetcher.planner.planner import RowPlanner, job_planner
from rowcast.prefetcher.readers.reader import can_share, open_reader, schedule
from rowcast.prefetcher.readers.workers import LEAST_AHEAD, NUM_AHEAD
from rowcast.prefetcher.run.sizing import job_levels, placed, sizes, stage_threads
from rowcast.prefetcher.run.warm_up import warm_up
from rowcast.protocol.batch import Samples, ScheduledBatch
from rowcast.protocol.parts import arrays_of_samples, belonging, rank_of, samples_of, vectors_from, vectors_to
from rowcast.protocol.plan import BarrierPlan, GroupPlan, Piece, StepPlan, cut, step_block
from rowcast.protocol.transport.ring import GUARD_BYTES, largest_payload

# kernels of jobs with parts: an exchange on a host, what comes on top across hosts, what a step adds up
EXCHANGE, NETWORK, DENSE_SUMS = "exchange", "network", "dense sums"
GRADIENT_BYTES = 4  # the gradient of a dense weight is fp32
PARAMETER_BYTES = "bytes a parameter"  # a count: these bytes for each weight of the dense side


def plan_job(job: Job, max_steps: int | None = None) -> tuple[list[PlannedStep], Wiring]:
    """The steps, each with a plan of its own, and the pipeline. Raises ConfigError, DataError as a run would."""
    job = with_values(job, {"lookahead": {"bundle": 1}})
    warm_up(is_divided=rank_of(job.ranks, 0).is_divided)  # what is compiled at a first start would count as planning
    decode_s: list[float] = []
    batches = timed(schedule(job, open_reader(job), max_steps), decode_s)
    measured = list(islice(batches, MEASURED_BATCHES))
    job = placed(job, None, partial(counted, job, measured))
    groups, rank = group_specs(job), rank_of(job.ranks, 0)
    touched, ring_sizes = measure(groups, measured, rank), sizes(job, groups, measured, job.lookahead.depth, rank)
    levels = job_levels(job, groups, touched, slots_of(job, groups, touched), lambda: ring_sizes)
    planner = job_planner(job, groups, levels, measured, num_threads=stage_threads(job), rank=rank)
    num_decoders = job.prefetcher.workers if can_share(job) else 1
    wiring = Wiring(
        depth=job.lookahead.depth,
        num_decoders=num_decoders,
        decoded_ahead=max(-(-NUM_AHEAD // num_decoders), LEAST_AHEAD),
        measured=len(measured),
        ring_bytes=ring_sizes.ring_bytes,
        staging_bytes=ring_sizes.staging_bytes,
        num_ranks=job.ranks.count,
    )
    return planned_steps(job, groups, chain(measured, batches), planner, wiring, decode_s), wiring


def timed(batches: Iterable[ScheduledBatch], seconds: list[float]) -> Iterator[ScheduledBatch]:
    """Adds to `seconds` how much processor time each batch took to decode."""
    began_s = time.process_time()
    for batch in batches:
        seconds.append(time.process_time() - began_s)
        yield batch
        began_s = time.process_time()


def planned_steps(
    job: Job,
    groups: tuple[GroupSpec, ...],
    batches: Iterator[ScheduledBatch],
    planner: RowPlanner,
    wiring: Wiring,
    decode_s: Sequence[float],
) -> list[PlannedStep]:
    """`decode_s`: seconds of each batch that was taken so far; grows with them."""
    rank, arrays = rank_of(job.ranks, 0), belonging(job)
    steps: list[PlannedStep] = []
    added: deque[ScheduledBatch] = deque()  # not planned
    seen: list[set[int]] = [set() for _ in groups]  # keys that were fetched

    def noted() -> Iterator[tuple[ScheduledBatch, None]]:
        for scheduled in batches:
            added.append(scheduled)
            yield scheduled, None

    began_s, taken = time.process_time(), len(decode_s)
    for planned in entries(planner, noted(), planner.plan):
        if isinstance(planned, BarrierPlan):
            calls = [
                row_call("barrier", "write", *moved) for moved in zip(groups, map(len, planned.dirty), strict=True)
            ]
            steps[-1:] = [replace(before, barrier=True, calls=(*before.calls, *calls)) for before in steps[-1:]]
            continue
        known, scheduled, [plan] = len(added), added.popleft(), planned.steps
        samples = samples_of(scheduled.batch.size, rank)
        of_rank = scheduled.batch.samples.within(arrays_of_samples(scheduled.batch, samples, arrays))
        plan_s = time.process_time() - began_s - sum(decode_s[taken:])
        number = len(steps)
        first = planned.plan - number
        fill_after = [group.fill_after for group in plan.groups if group.fill_after is not None]
        plan_bytes = step_block(of_rank, plan, 0).nbytes
        pieces = cut(
            plan_bytes,
            [len(group.fetch_keys) for group in plan.groups],
            [group.record_bytes for group in groups],
            largest_payload(wiring.ring_bytes),
            wiring.staging_bytes,
        )
        steps.append(
            PlannedStep(
                step=number,
                known_through=number + known - 1,
                after_step=None if planned.after_plan is None else planned.after_plan - first,
                fill_after=max(fill_after) - first if fill_after else None,
                pieces=tuple(planned_piece(piece, plan, groups) for piece in pieces),
                barrier=False,
                batch=len(of_rank.labels),
                calls=(*step_calls(job, groups, plan, of_rank), *store_calls(groups, plan, seen)),
                decode_s=decode_s[number],
                plan_s=plan_s,
            )
        )
        began_s, taken = time.process_time(), len(decode_s)
    return steps


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


def row_call(task: str, kernel: str, group: GroupSpec, rows: int) -> KernelCall:
    return KernelCall(task, f"{kernel} {group.name}", {"rows": float(rows)})


def store_calls(groups: Sequence[GroupSpec], plan: StepPlan, seen: Sequence[set[int]]) -> Iterator[KernelCall]:
    """Adds the keys that are fetched to those `seen` of each group: a row's first value is computed."""
    for group, moves, keys in zip(groups, plan.groups, seen, strict=True):
        before = len(keys)
        keys.update(moves.fetch_keys.tolist())
        first = len(keys) - before
        yield row_call("fetch", "first", group, first)
        yield row_call("fetch", "read", group, len(moves.fetch_keys) - first)
        yield row_call("write back", "write", group, moves.num_dirty)


def step_calls(job: Job, groups: Sequence[GroupSpec], plan: StepPlan, samples: Samples) -> Iterator[KernelCall]:
    """Yields the trainer's calls. `samples`: its own."""
    trains, parts = plan.kind == "train", job.ranks.num_parts // job.ranks.count
    fetched_bytes = [
        len(moves.fetch_keys) * group.record_bytes for group, moves in zip(groups, plan.groups, strict=True)
    ]
    for nbytes in (step_block(samples, plan, 0).nbytes, sum(fetched_bytes)):
        if nbytes:
            yield KernelCall("copy in", "copy in", {"bytes": float(nbytes)})
    for group, rows in zip(groups, plan.groups, strict=True):
        yield from group_calls(job, group, rows, trains=trains)
    part = {"batch": len(samples.labels) / parts}  # sizes of parts differ by one at most
    yield KernelCall("step", "model forward", part, parts)
    if trains:
        yield KernelCall("step", "model backward", part, parts)
        yield KernelCall("step", "model update", {})
    if job.ranks.num_parts > 1 and trains:
        yield KernelCall("step", DENSE_SUMS, {"parts": float(parts)})
    if job.ranks.count > 1:
        yield from exchange_calls(job, groups, plan, trains=trains)


def group_calls(job: Job, group: GroupSpec, plan: GroupPlan, *, trains: bool) -> Iterator[KernelCall]:
    def move(task: str, kernel: str, rows: int, width: int) -> Iterator[KernelCall]:
        if rows:
            yield KernelCall(task, kernel, {"rows": float(rows), "record_floats": float(width)})

    yield from move("fill", "gather", plan.num_dirty, group.record_floats)
    if plan.num_dirty:
        yield KernelCall("copy out", "copy out", {"bytes": float(plan.num_dirty * group.record_bytes)})
    yield from move("fill", "scatter", len(plan.fetch_keys), group.record_floats)
    share, dim = plan.share, group.embedding_dim
    sizes = {
        "lookups": float(plan.num_lookups),
        "rows": float(len(plan.unique_slots)),
        "dim": float(dim),
        "record_floats": float(group.record_floats),
    }
    yield KernelCall("step", "lookup", sizes)
    if trains:
        trained = sizes if share is None else sizes | {"rows": float(share.header.num_own)}
        yield KernelCall("step", f"update {job.optimizer.sparse.kind}", trained)
    if share is not None:  # rows leave their slots, gradients are put in order and added
        yield from move("step", "gather", sum(share.header.send_counts), dim)
        added = len(share.home_to) + len(share.to)
        for kernel, rows in (
            ("gather", added),
            ("scatter", added),
            ("gather", sum(share.header.receive_counts)),
            ("gather", share.header.num_own),
        ):
            yield from move("step", kernel, rows if trains else 0, dim)


def exchange_calls(job: Job, groups: Sequence[GroupSpec], plan: StepPlan, *, trains: bool) -> Iterator[KernelCall]:
    """What the first rank exchanges, in the host and across hosts. A link carries both directions at once, so the
    longer one counts. The dense gradients are added over parts; then each rank adds a slice of all ranks'."""
    ranks, on_host = job.ranks.count, job.ranks.on_host

    def exchange(rows: Sequence[Sequence[int]], count: str, nbytes: float) -> Iterator[KernelCall]:
        for kernel, others in ((EXCHANGE, slice(1, on_host)), (NETWORK, slice(on_host, None))):
            if range(ranks)[others]:
                yield KernelCall(
                    "exchange", kernel, {count: max(sum(of_direction[others]) for of_direction in rows) * nbytes}
                )

    for group, moves in zip(groups, plan.groups, strict=True):
        assert moves.share is not None, "several ranks exchange rows"
        rows = (moves.share.header.send_counts, moves.share.header.receive_counts)
        yield from exchange(rows, "bytes", group.parts[0].nbytes)
        if trains:  # gradients travel the other way
            yield from exchange(rows, "bytes", group.gradient_bytes)
        vectors = [of(group, rank_of(job.ranks, 0), plan.batch_size) for of in (vectors_to, vectors_from)]
        if any(map(any, vectors)):
            for _ in range(1 + trains):
                yield from exchange(vectors, "bytes", group.gradient_bytes)
    slices = [[1] * ranks]
    if trains:
        for _ in range(2):
            yield from exchange(slices, PARAMETER_BYTES, GRADIENT_BYTES / ranks)
    else:
        yield from exchange(slices, "bytes", GRADIENT_BYTES)
