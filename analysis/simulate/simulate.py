"""`prefetcher simulate`: counts the rows that a run would move with other policies, capacities, horizons, batch sizes
and orders, before it is trained.

    data set --batches--> scan: the distinct rows of each step      once a batch size and order
                            |
                            +--> belady: the bound                once a capacity
                            +--> each policy and horizon

It runs the planner of training over the schedule of training, with slots divided as in training. So its counts of each
step are those that a run would report, if a run can have the policy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from rowcast.analysis.progress import AnalysisProgress
from rowcast.analysis.scan.steps import Scan, scan
from rowcast.analysis.simulate.grid import BOUND, WITH_TIER, Grid, Setting, batches_jobs, capacity_jobs, settings
from rowcast.analysis.simulate.moves import Moves, bound_planner, new_planner, planned_moves
from rowcast.analysis.simulate.policies import ttl_moves, window_moves
from rowcast.analysis.simulate.results import Simulation, make_result, outline
from rowcast.job.schema import Job
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES, job_slots
from rowcast.prefetcher.planner.planner import Slots
from rowcast.prefetcher.run.sizing import job_levels
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.errors import ConfigError

OpenBatches = Callable[[Job], Iterable[ScheduledBatch]]


def simulate(
    job: Job,
    grid: Grid,
    open_batches: OpenBatches,
    *,
    progress: AnalysisProgress | None = None,
    per_step: bool = False,
) -> list[Simulation]:
    """Returns a result for each setting, ordered by batch size, order and capacity; policies and horizons are in the
    given order.

    `open_batches` returns the batches of a run of a job, from its first step. A setting that cannot run becomes a
    result that says why. Raises ConfigError for values that no job can have, and what reading the data raises."""
    results: list[Simulation] = []
    for own in batches_jobs(job, grid):
        results += Simulator(own, grid, progress or AnalysisProgress(), per_step).run(open_batches(own))
    return results


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    settings: list[Setting]
    slots: Sequence[Slots]  # of each level, from the device down; empty if a run would be refused
    memory: str | int | None  # store.memory
    refusal: str | None

    def slots_of(self, setting: Setting) -> Sequence[Slots]:
        return self.slots if setting.policy in WITH_TIER else self.slots[:1]


class Simulator:
    def __init__(self, job: Job, grid: Grid, progress: AnalysisProgress, per_step: bool) -> None:
        self._job, self._grid, self._groups = job, grid, group_specs(job)
        self._progress, self._per_step = progress, per_step

    def run(self, batches: Iterable[ScheduledBatch]) -> list[Simulation]:
        left = iter(batches)
        measured = list(islice(left, MEASURED_BATCHES))
        capacities = [self._capacity(job, own, measured) for job, own in settings_of_jobs(self._job, self._grid)]
        scanned = Scan(self._groups, [])
        if any(capacity.slots for capacity in capacities):
            scanned = scan(self._groups, chain(measured, left), self._progress.begin("reading the data", None))
        return [result for capacity in capacities for result in self._results(scanned, capacity, measured)]

    def _capacity(self, job: Job, own: list[Setting], measured: list[ScheduledBatch]) -> Capacity:
        slots: Sequence[Slots] = ()
        refusal = None
        try:
            slots = job_levels(job, self._groups, measured, job_slots(job, self._groups, measured))
        except ConfigError as error:
            refusal = str(error)
        return Capacity(
            settings=own,
            slots=slots,
            memory=job.store.memory if isinstance(job.store, StoreWithTier) else None,
            refusal=refusal,
        )

    def _results(self, scanned: Scan, capacity: Capacity, measured: list[ScheduledBatch]) -> Iterator[Simulation]:
        bound, refusal = None, capacity.refusal
        if capacity.slots:
            bound, refusal = self._moved(scanned, capacity, bound_setting(capacity.settings[0].job), measured)
        for setting in capacity.settings:
            moves = bound
            if bound is not None and setting.policy != BOUND:
                moves, refusal = self._moved(scanned, capacity, setting, measured)
            if bound is None or moves is None:
                yield outline(setting, refusal or "")
            else:
                slots, memory = capacity.slots_of(setting), capacity.memory
                yield make_result(scanned, setting, slots, memory, moves, bound, per_step=self._per_step)

    def _moved(
        self, scanned: Scan, capacity: Capacity, setting: Setting, measured: list[ScheduledBatch]
    ) -> tuple[Moves, None] | tuple[None, str]:
        slots = capacity.slots_of(setting)
        tick = self._progress.begin(description(setting), len(scanned))
        try:
            match setting.policy:
                case "window":
                    return window_moves(scanned, slots[0], setting.horizon_batches, setting.job.job.seed, tick), None
                case "ttl":
                    return ttl_moves(scanned, slots[0], setting.horizon_batches, tick), None
                case "belady":
                    return planned_moves(scanned, bound_planner(scanned, slots), tick), None
                case _:
                    planner = new_planner(setting, self._groups, slots, measured)
                    return planned_moves(scanned, planner, tick), None
        except ConfigError as error:
            return None, str(error)


def settings_of_jobs(job: Job, grid: Grid) -> Iterator[tuple[Job, list[Setting]]]:
    """Yields the settings of each capacity and memory tier. A policy without a tier has one setting per capacity."""
    simulated = set[str | int]()
    for own in capacity_jobs(job, grid):
        again = own.cache.capacity in simulated
        found = [setting for setting in settings(own, grid) if setting.policy in WITH_TIER or not again]
        simulated.add(own.cache.capacity)
        if found:
            yield own, found


def bound_setting(job: Job) -> Setting:
    return Setting(policy=BOUND, horizon=None, job=job)


def description(setting: Setting) -> str:
    """`lookahead, horizon 64, capacity 70000 rows, batches of 2048`."""
    horizon = "" if setting.horizon is None else f", horizon {setting.horizon}"
    data = setting.job.data
    order = "" if data.whole_order == "none" else f", shuffle {data.whole_order}"
    store = setting.job.store
    tier = f", memory {store.memory}" if isinstance(store, StoreWithTier) else ""
    return (
        f"{setting.policy}{horizon}, capacity {setting.job.cache.capacity}{tier}, batches of {data.batch_size}{order}"
    )
