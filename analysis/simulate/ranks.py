"""Simulates every rank of a run in one process, without tables, trainers or a network.

    data --batches--> parts, grouped once --> shares of all ranks --> a planner for each rank
                                                      |                        |
                                                      +--> rows exchanged      +--> rows fetched, written back

All settings with the same batches are simulated side by side while the data is read once, and only the planners keep
parts of a batch: the memory is that of N horizons.

Reports what all ranks of a simulated run exchange and move, by step and in the mean, and by other placements.

Rows and bytes are those that travel between ranks. What a rank keeps for itself is copied, but it takes no link.

Ways to place the tables are counted over the first batches, as `placement = "auto"` counts them
(`prefetcher/planner/first_batches.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice

import msgspec
import numpy as np

from rowcast.analysis.scan import GroupShares, Sharing, measured_keys, owners_touched
from rowcast.analysis.show import AnalysisProgress
from rowcast.analysis.simulate.moves import CountedMoves, Moves, last_entries, moves_of_all, ready
from rowcast.analysis.simulate.simulate import OpenBatches, Simulated, job_values, run_values
from rowcast.job.schema import Job
from rowcast.job.tables import ITEM_BYTES, GroupSpec, group_specs, with_placements
from rowcast.prefetcher.planner.first_batches import (
    MEASURED_BATCHES,
    RECEIVED,
    SENT,
    Bytes,
    TableBytes,
    Traffic,
    chosen,
    counted,
    everywhere,
    slots_of,
)
from rowcast.prefetcher.planner.planner import groupers_of, job_planner
from rowcast.protocol.batch import Kind, ScheduledBatch
from rowcast.protocol.parts import Rank, feature_owners, part_bounds
from rowcast.runtime.arrays import I64, Bools
from rowcast.runtime.errors import ConfigError

MB = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class StepExchange:
    """One step of N ranks and M parts."""

    step: int
    kind: Kind
    num_lookups: int
    part_rows: I64  # [M] distinct rows of each part
    owner_rows: I64  # [N] distinct rows of the whole batch in each shard
    rows: I64  # [2, N] sent, received
    late: I64  # [N] of the received rows: used by some rank in the step before, so they cannot travel early
    row_bytes: I64  # [2, N]
    gradient_bytes: I64  # [2, N] of rows; 0 in an evaluation
    vector_bytes: I64  # [2, N] pooled by the owners of whole tables
    vector_gradient_bytes: I64  # [2, N]; 0 in an evaluation


def step_exchange(
    groups: Sequence[GroupSpec], scheduled: ScheduledBatch, shares: Sequence[GroupShares]
) -> StepExchange:
    trains = scheduled.kind == "train"
    between = [share.exchanged - np.diag(np.diag(share.exchanged)) for share in shares]
    by_group = [
        np.stack([others.sum(axis=0), others.sum(axis=1)]) for others in between
    ]  # [2, N] rows sent and received
    row_bytes = [group.embedding_dim * ITEM_BYTES[group.parts[0].dtype] for group in groups]
    gradient_bytes = [group.gradient_bytes * trains for group in groups]
    vector_bytes = total(vectors(group, len(shares[0].owned), scheduled.batch.size) for group in groups)
    return StepExchange(
        step=scheduled.step,
        kind=scheduled.kind,
        num_lookups=len(scheduled.batch.ids),
        part_rows=total(share.part_rows for share in shares),
        owner_rows=total(share.owner_rows for share in shares),
        rows=total(by_group),
        late=total(share.late for share in shares),
        row_bytes=total(rows * nbytes for rows, nbytes in zip(by_group, row_bytes, strict=True)),
        # they go back where the rows came from
        gradient_bytes=total(rows[::-1] * nbytes for rows, nbytes in zip(by_group, gradient_bytes, strict=True)),
        vector_bytes=vector_bytes,
        vector_gradient_bytes=vector_bytes[::-1] * trains,
    )


def vectors(group: GroupSpec, count: int, batch_size: int) -> I64:
    """Bytes of pooled vectors that each rank sends and receives, [2, N]."""
    owned = np.bincount([owner for owner in feature_owners(group, count) if owner is not None], minlength=count)
    samples = np.diff(part_bounds(batch_size, count))
    sent, received = owned * (batch_size - samples), (owned.sum() - owned) * samples
    return np.stack([sent, received]) * group.gradient_bytes


def total(arrays: Iterable[I64]) -> I64:
    summed: I64 = np.sum(list(arrays), axis=0)
    return summed


class Ways(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes if all tables are placed one way, over the train steps among the first batches."""

    rows: Bytes
    table: Bytes
    columns: Bytes
    auto: Bytes
    tables: list[TableBytes]  # in the job's order, as `auto` places them


def ways(job: Job, traffic: Traffic) -> Ways:
    auto = chosen(with_placements(job, everywhere(job, "auto")), traffic)
    each = {way: traffic.of(everywhere(job, way)) for way in ("rows", "table", "columns")}
    return Ways(**each, auto=traffic.of(auto), tables=traffic.of_each(auto))


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A count of each rank, or part, at each step."""

    mean: float  # over all steps and ranks
    most: int  # the largest count of a rank in a step
    imbalance: float | None  # the largest over the mean of a train step, in the mean; None if all are 0


class RankArrays(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of each step and rank."""

    step: list[int]
    kind: list[str]  # train | eval
    owner_rows: list[list[int]]
    rows_sent: list[list[int]]
    rows_received: list[list[int]]
    rows_late: list[list[int]]
    rows_fetched: list[list[int]]
    rows_written_back: list[list[int]]  # dirty victims


class RanksSimulation(Simulated, frozen=True, kw_only=True):
    ranks: int
    parts: int
    # distinct rows of a step: of a part, of the whole batch, of those in a rank's shard
    part_rows: Spread | None = None
    batch_rows: float | None = None
    owner_rows: Spread | None = None
    # rows that a rank receives from others in a step; as many gradients leave in a train step
    rows_received: Spread | None = None
    rows_late: float | None = None  # the mean of those that some rank used in the step before
    row_bytes: float | None = None  # received per rank and step
    gradient_bytes: float | None = None  # what a rank sends of row gradients in a train step
    vector_bytes: float | None = None  # pooled by the owners of whole tables: received per rank and step
    vector_gradient_bytes: float | None = None  # sent by a rank in a train step
    rows_fetched: Spread | None = None
    rows_written_back: Spread | None = None  # dirty victims
    ways: Ways | None = None
    per_step: RankArrays | None = None


def make_result(
    job: Job,
    groups: tuple[GroupSpec, ...],
    steps: Sequence[StepExchange],
    moves: Sequence[Moves],
    ways: Ways,
    *,
    capacity_rows: int,
    per_step: bool,
) -> RanksSimulation:
    """`moves`: of each rank."""
    fetched, written_back = (  # [P, N, G]
        np.stack([getattr(of_rank, name) for of_rank in moves], axis=1) for name in ("fetched", "written_back")
    )
    trains = np.array([step.kind == "train" for step in steps])
    received = np.array([step.rows[RECEIVED] for step in steps])
    late, owner_rows = (np.array([getattr(step, name) for step in steps]) for name in ("late", "owner_rows"))
    train_steps = [step for step in steps if step.kind == "train"]
    return msgspec.structs.replace(
        outline(job),
        capacity_rows=capacity_rows,
        part_rows=spread(np.array([step.part_rows for step in steps]), trains),
        batch_rows=float(owner_rows.sum(axis=1).mean()),
        owner_rows=spread(owner_rows, trains),
        rows_received=spread(received, trains),
        rows_late=float(late.mean()),
        row_bytes=float(np.mean([step.row_bytes[RECEIVED] for step in steps])),
        gradient_bytes=float(np.mean([step.gradient_bytes[SENT] for step in train_steps or steps])),
        vector_bytes=float(np.mean([step.vector_bytes[RECEIVED] for step in steps])),
        vector_gradient_bytes=float(np.mean([step.vector_gradient_bytes[SENT] for step in train_steps or steps])),
        rows_fetched=spread(fetched.sum(axis=2), trains),
        rows_written_back=spread(written_back.sum(axis=2), trains),
        ways=ways,
        per_step=rank_arrays(steps, fetched, written_back) if per_step else None,
        **run_values(
            groups, [step.kind for step in steps], sum(step.num_lookups for step in steps), moves_of_all(moves)
        ),
    )


def outline(job: Job, skipped: str | None = None) -> RanksSimulation:
    return RanksSimulation(**job_values(job), ranks=job.ranks.count, parts=job.ranks.num_parts, skipped=skipped)


def spread(values: I64, trains: Bools) -> Spread:
    """`values`: [P, N]."""
    means = values.mean(axis=1)
    counted = trains & (means > 0)
    imbalance = float((values.max(axis=1)[counted] / means[counted]).mean()) if counted.any() else None
    return Spread(mean=float(values.mean()), most=int(values.max()), imbalance=imbalance)


def rank_arrays(steps: Sequence[StepExchange], fetched: I64, written_back: I64) -> RankArrays:
    return RankArrays(
        step=[step.step for step in steps],
        kind=[step.kind for step in steps],
        owner_rows=[step.owner_rows.tolist() for step in steps],
        rows_sent=[step.rows[SENT].tolist() for step in steps],
        rows_received=[step.rows[RECEIVED].tolist() for step in steps],
        rows_late=[step.late.tolist() for step in steps],
        rows_fetched=fetched.sum(axis=2).tolist(),
        rows_written_back=written_back.sum(axis=2).tolist(),
    )


class RanksSetting:
    """A planner for each rank of one setting, and counts while the batches pass."""

    def __init__(
        self,
        job: Job,
        groups: tuple[GroupSpec, ...],
        keys: Sequence[Sequence[I64]],
        measured: list[ScheduledBatch],
        ways: Ways,
    ) -> None:
        """`keys`: of each group, the distinct rows of each measured batch."""
        self.job, self.refusal = job, ""
        self.sharing = count, parts = job.ranks.count, job.ranks.num_parts
        self._groups, self._ways = groups, ways
        self._steps: list[StepExchange] = []
        try:
            self._slots = [slots_of(job, groups, touched) for touched in owners_touched(groups, keys, measured, count)]
        except ConfigError as error:
            self.refusal = str(error)
            return
        self._ranks = [
            (
                job_planner(job, groups, [slots], (), rank=Rank(number=number, count=count, parts=parts)),
                CountedMoves(len(groups)),
            )
            for number, slots in enumerate(self._slots)
        ]

    def add(self, scheduled: ScheduledBatch, shares: Sequence[GroupShares], exchange: StepExchange) -> None:
        self._steps.append(exchange)
        try:
            for number, (planner, counted) in enumerate(self._ranks):
                planner.add(scheduled, tuple(group.owned[number] for group in shares))
                for entry in ready(planner, planner.move):
                    counted.note(entry)
        except ConfigError as error:
            self.refusal = str(error)

    def result(self, *, per_step: bool) -> RanksSimulation:
        try:
            for planner, counted in () if self.refusal else self._ranks:
                for entry in last_entries(planner, planner.move):
                    counted.note(entry)
        except ConfigError as error:
            self.refusal = str(error)
        if self.refusal or not self._steps:
            return outline(self.job, self.refusal or "the data has no batch")
        return make_result(
            self.job,
            self._groups,
            self._steps,
            [counted.moves() for _, counted in self._ranks],
            self._ways,
            capacity_rows=sum(map(sum, self._slots)) // len(self._slots),
            per_step=per_step,
        )


def simulate_ranks(
    jobs: Sequence[Job],
    open_batches: OpenBatches,
    *,
    progress: AnalysisProgress | None = None,
    per_step: bool = False,
) -> list[RanksSimulation]:
    """A result for each job, in their order; those with the same batches must be neighbours, and a capacity in rows, by
    which "auto" cuts no table, has a reading of its own. Raises what reading the data raises."""
    results: list[RanksSimulation] = []
    for _, neighbours in groupby(
        jobs, key=lambda job: (job.data.batch_size, job.data.shuffle, job.cache.capacity_rows is None)
    ):
        alike = list(neighbours)
        settings = simulated(alike, open_batches(alike[0]), progress or AnalysisProgress())
        results += [one.result(per_step=per_step) for one in settings]
    return results


def simulated(jobs: Sequence[Job], batches: Iterable[ScheduledBatch], progress: AnalysisProgress) -> list[RanksSetting]:
    left = iter(batches)
    measured = list(islice(left, MEASURED_BATCHES))
    each = {job.ranks.count: job for job in jobs}
    traffic = {count: counted(job, measured) for count, job in each.items()}
    places = {count: chosen(job, traffic[count]) for count, job in each.items()}
    jobs = [with_placements(job, places[job.ranks.count]) for job in jobs]
    groups = {job.ranks.count: group_specs(job) for job in jobs}
    ways_by_count = {count: ways(job, traffic[count]) for count, job in each.items()}
    keys = {count: measured_keys(groupers_of(of_count), measured) for count, of_count in groups.items()}
    own_counts = [(job, job.ranks.count) for job in jobs]
    settings = [
        RanksSetting(job, groups[count], keys[count], measured, ways_by_count[count]) for job, count in own_counts
    ]
    sharings = {setting.sharing: Sharing(groups[setting.sharing[0]], *setting.sharing) for setting in settings}
    ranks = ", ".join(str(count) for count in dict.fromkeys(job.ranks.count for job in jobs))
    tick = progress.begin(f"batches of {jobs[0].data.batch_size}, ranks {ranks}", None)
    for scheduled in chain(emptied(measured), left):
        wanted = {setting.sharing for setting in settings if not setting.refusal}
        if not wanted:
            break
        for count, parts in sorted(wanted):
            shares = sharings[count, parts].of(scheduled.batch)
            exchange = step_exchange(groups[count], scheduled, shares)
            for setting in settings:
                if setting.sharing == (count, parts) and not setting.refusal:
                    setting.add(scheduled, shares, exchange)
        tick()
    return settings


def emptied(batches: list[ScheduledBatch]) -> Iterator[ScheduledBatch]:
    """Yields the batches, and keeps no reference to a batch that was taken: it may be large."""
    batches.reverse()
    while batches:
        yield batches.pop()
