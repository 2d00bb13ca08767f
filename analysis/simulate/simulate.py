"""`rowcast simulate`: counts the rows that a run would move with other policies, capacities, horizons, batch sizes
and orders, before it is trained.

    data set --batches--> scan: the distinct rows of each step      once a batch size and order
                            |
                            +--> belady: the bound                once a capacity
                            +--> each policy and horizon

It runs the planner of training over the schedule of training, with slots divided as in training. So its counts of each
step are those that a run would report, if a run can have the policy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
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
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES, measure, slots_of
from rowcast.prefetcher.planner.planner import Slots
from rowcast.prefetcher.run.sizing import job_levels, sizes
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
    shown = progress or AnalysisProgress()
    return [
        result
        for own in batches_jobs(job, grid)
        for result in simulated(own, grid, open_batches(own), shown, per_step=per_step)
    ]


def simulated(
    job: Job, grid: Grid, batches: Iterable[ScheduledBatch], progress: AnalysisProgress, *, per_step: bool
) -> Iterator[Simulation]:
    groups, left = group_specs(job), iter(batches)
    measured = list(islice(left, MEASURED_BATCHES))
    scanned: Scan | None = None
    for own, of_own in settings_of_jobs(job, grid):
        try:
            touched, rings = measure(groups, measured), partial(sizes, own, groups, measured, own.lookahead.depth)
            levels = job_levels(own, groups, touched, slots_of(own, groups, touched), rings)
            if scanned is None:
                scanned = scan(groups, chain(measured, left), progress.begin("reading the data", None))
            bound = moved(scanned, bound_setting(of_own[0].job), levels, measured, progress)
        except ConfigError as error:
            yield from (outline(setting, str(error)) for setting in of_own)
            continue
        for setting in of_own:
            slots = levels if setting.policy in WITH_TIER else levels[:1]
            try:
                moves = bound if setting.policy == BOUND else moved(scanned, setting, slots, measured, progress)
            except ConfigError as error:
                yield outline(setting, str(error))
            else:
                yield make_result(scanned, setting, slots, moves, bound, per_step=per_step)


def moved(
    scanned: Scan,
    setting: Setting,
    slots: Sequence[Slots],
    measured: Sequence[ScheduledBatch],
    progress: AnalysisProgress,
) -> Moves:
    """`slots`: of each level, from the device down. Raises ConfigError if a step does not fit."""
    tick = progress.begin(description(setting), len(scanned))
    match setting.policy:
        case "window":
            return window_moves(scanned, slots[0], setting.horizon_batches, setting.job.job.seed, tick)
        case "ttl":
            return ttl_moves(scanned, slots[0], setting.horizon_batches, tick)
        case "belady":
            return planned_moves(scanned, bound_planner(scanned, slots), tick)
    return planned_moves(scanned, new_planner(setting, scanned.groups, slots, measured), tick)


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
    order = "" if data.shuffle == "none" else f", shuffle {data.shuffle}"
    store = setting.job.store
    tier = f", memory {store.memory}" if isinstance(store, StoreWithTier) else ""
    return (
        f"{setting.policy}{horizon}, capacity {setting.job.cache.capacity}{tier}, batches of {data.batch_size}{order}"
    )
