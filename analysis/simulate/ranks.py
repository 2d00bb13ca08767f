"""Simulates every rank of a run in one process, without tables, trainers or a network.

    data --batches--> parts, grouped once --> shares of all ranks --> a planner for each rank
                                                      |                        |
                                                      +--> rows exchanged      +--> rows fetched, written back

All settings with the same batches are simulated side by side while the data is read once, and nothing is kept of a
batch but what its planners keep: the memory that it takes is that of N horizons.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice

import numpy as np

from rowcast.analysis.progress import AnalysisProgress
from rowcast.analysis.scan.shares import GroupShares, Sharing, measured_keys, owners_touched
from rowcast.analysis.simulate.ranks_results import (
    RanksSimulation,
    StepExchange,
    Ways,
    make_result,
    outline,
    step_exchange,
    ways,
)
from rowcast.analysis.simulate.simulate import OpenBatches
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs, with_placements
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES, slots_of
from rowcast.prefetcher.planner.placement import chosen, counted
from rowcast.prefetcher.planner.planner import RowPlanner, Slots, groupers_of, job_planner
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.parts import Rank
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError


def owners_slots(
    job: Job, groups: tuple[GroupSpec, ...], keys_of_batches: Sequence[Sequence[I64]], batches: Sequence[ScheduledBatch]
) -> list[Slots]:
    """Slots of every rank of the job. `keys_of_batches`: of each group, the distinct rows of each measured batch.

    Raises ConfigError if one of the batches does not fit the cache of the rank that owns most of it."""
    return [slots_of(job, groups, own) for own in owners_touched(groups, keys_of_batches, batches, job.ranks.count)]


class Setting:
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
        self._fetched: list[I64] = []  # [N, G] rows of each step
        self._written_back: list[I64] = []
        self._flushed = np.zeros((count, len(groups)), np.int64)  # rows that barriers wrote back
        # by step and rank, [G, 2] rows fetched and written back: of steps that not all have planned yet
        self._moves: dict[int, dict[int, I64]] = {}
        try:
            self._slots = owners_slots(job, groups, keys, measured)
        except ConfigError as error:
            self.refusal = str(error)
            return
        self._planners = [
            job_planner(job, groups, [own], (), rank=Rank(number=number, count=count, parts=parts))
            for number, own in enumerate(self._slots)
        ]

    def add(self, scheduled: ScheduledBatch, shares: Sequence[GroupShares], exchange: StepExchange) -> None:
        self._steps.append(exchange)
        try:
            for number, planner in enumerate(self._planners):
                planner.add(scheduled, tuple(group.owned[number] for group in shares))
                self._plan(number, planner)
        except ConfigError as error:
            self.refusal = str(error)

    def result(self, *, per_step: bool) -> RanksSimulation:
        try:
            for number, planner in enumerate(() if self.refusal else self._planners):
                planner.end()
                self._plan(number, planner)
                self._barrier(number, planner, "end of data", finished=True)
        except ConfigError as error:
            self.refusal = str(error)
        if self.refusal or not self._steps:
            return outline(self.job, self.refusal or "the data has no batch")
        assert not self._moves, f"steps {sorted(self._moves)} were not planned by all ranks"
        return make_result(
            self.job,
            self._groups,
            self._steps,
            np.array(self._fetched),
            np.array(self._written_back),
            self._flushed,
            self._ways,
            capacity_rows=sum(map(sum, self._slots)) // len(self._slots),
            per_step=per_step,
        )

    def _plan(self, number: int, planner: RowPlanner) -> None:
        while planner.ready():
            if planner.checkpoint_due:
                self._barrier(number, planner, "checkpoint", finished=False)
            moves = planner.move()
            of_plan = np.array([[len(own.fetch_keys), own.num_dirty] for own in moves.levels[0]])
            for place, scheduled in enumerate(moves.bundle.steps):  # a plan's rows count in its first step
                self._moves.setdefault(scheduled.step, {})[number] = of_plan * (place == 0)
            # an automatic horizon may let one rank plan ahead of others
            while self._moves and len(by_rank := self._moves[step := min(self._moves)]) == len(self._planners):
                del self._moves[step]
                of_ranks = np.stack([by_rank[rank] for rank in range(len(self._planners))])
                self._fetched.append(of_ranks[..., 0])
                self._written_back.append(of_ranks[..., 1])

    def _barrier(self, number: int, planner: RowPlanner, reason: str, *, finished: bool) -> None:
        self._flushed[number] += [len(move) for move in planner.barrier(reason, finished).dirty]


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
    for _, neighbours in groupby(jobs, key=batches_and_cuts):
        own = list(neighbours)
        settings = simulated(own, open_batches(own[0]), progress or AnalysisProgress())
        results += [one.result(per_step=per_step) for one in settings]
    return results


def batches_and_cuts(job: Job) -> tuple[int, str, bool]:
    return job.data.batch_size, job.data.shuffle, job.cache.capacity_rows is None


def simulated(jobs: Sequence[Job], batches: Iterable[ScheduledBatch], progress: AnalysisProgress) -> list[Setting]:
    left = iter(batches)
    measured = list(islice(left, MEASURED_BATCHES))
    each = {job.ranks.count: job for job in jobs}
    traffic = {count: counted(job, measured) for count, job in each.items()}
    places = {count: chosen(job, traffic[count]) for count, job in each.items()}
    jobs = [with_placements(job, places[job.ranks.count]) for job in jobs]
    groups = {job.ranks.count: group_specs(job) for job in jobs}
    found = {count: ways(job, traffic[count]) for count, job in each.items()}
    keys = {count: measured_keys(groupers_of(own), measured) for count, own in groups.items()}
    own_counts = [(job, job.ranks.count) for job in jobs]
    settings = [Setting(job, groups[count], keys[count], measured, found[count]) for job, count in own_counts]
    sharings = {own.sharing: Sharing(groups[own.sharing[0]], *own.sharing) for own in settings}
    ranks = ", ".join(str(count) for count in dict.fromkeys(job.ranks.count for job in jobs))
    tick = progress.begin(f"batches of {jobs[0].data.batch_size}, ranks {ranks}", None)
    for scheduled in chain(emptied(measured), left):
        wanted = {own.sharing for own in settings if not own.refusal}
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
