"""`prefetcher simulate`: what a run would move under other policies, capacities, horizons, batch sizes and orders,
before it is trained.

    data set or trace --batches--> record: the distinct rows of each step    once a batch size and order
                                       |
                                       +--> belady: the bound                once a capacity
                                       +--> each policy and horizon

It runs the planner of training over the schedule of training, with slots divided as in training, so it says step by
step what a run of the job would report, as far as the policy exists there.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import msgspec
import typer

from rowcast.analysis.progress import AnalysisProgress, ProgressBar, Silent
from rowcast.analysis.simulate.grid import BOUND, WITH_TIER, Grid, Setting, batches_jobs, capacity_jobs, settings
from rowcast.analysis.simulate.moves import Moves, bound_planner, new_planner, planned_moves
from rowcast.analysis.simulate.plot import check_plot, plot_results
from rowcast.analysis.simulate.policies import ttl_moves, window_moves
from rowcast.analysis.simulate.recording import RunRecording, record
from rowcast.analysis.simulate.replay import BatchesAndPlans, PlanWatcher, planned_beside
from rowcast.analysis.simulate.results import Outcome, Simulation, make_result, print_results, skipped_result
from rowcast.job.schema import Horizon, Job
from rowcast.job.stores import STORES
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES, job_slots
from rowcast.prefetcher.run.sizing import job_tier_slots
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.errors import ConfigError

OpenBatches = Callable[[Job], Iterable[ScheduledBatch]]
Slots = tuple[int, ...]
# setting, slots, tier's slots -> the watcher of its plans, if any
Watch = Callable[[Setting, Slots, Slots | None], PlanWatcher | None]


def simulate(
    job: Job,
    grid: Grid,
    open_batches: OpenBatches,
    *,
    watch: Watch = lambda setting, slots, tier_slots: None,
    progress: AnalysisProgress | None = None,
    per_step: bool = False,
) -> list[Simulation]:
    """A result for each setting: batch size by batch size, order by order, capacity by capacity, policies and horizons
    as given.

    `open_batches` returns the batches of a run of a job, from its first step. A setting that cannot run becomes a
    result that says why. Raises ConfigError for values that no job can have, and what reading the data raises.
    """
    results: list[Simulation] = []
    for own in batches_jobs(job, grid):
        results += Simulator(own, grid, watch, progress or Silent(), per_step).run(open_batches(own))
    return results


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    settings: list[Setting]
    slots: Slots
    memory: str | int | None  # store.memory
    tier_slots: Slots | None  # None: the store has no memory tier
    refusal: str | None  # why there are no slots

    def tier_slots_of(self, setting: Setting) -> Slots | None:
        return self.tier_slots if setting.policy in WITH_TIER else None


class Simulator:
    def __init__(self, job: Job, grid: Grid, watch: Watch, progress: AnalysisProgress, per_step: bool) -> None:
        self._job, self._grid, self._groups = job, grid, group_specs(job)
        self._watch, self._progress, self._per_step = watch, progress, per_step

    def run(self, batches: Iterable[ScheduledBatch]) -> list[Simulation]:
        left = iter(batches)
        measured = list(islice(left, MEASURED_BATCHES))
        capacities = [self._capacity(job, own, measured) for job, own in settings_of_jobs(self._job, self._grid)]
        recording = RunRecording(self._groups, [])
        if any(capacity.slots for capacity in capacities):
            tick = self._progress.begin("reading the data", None)
            recording = record(self._groups, self._watched(chain(measured, left), capacities, measured), tick)
        return [result for capacity in capacities for result in self._results(recording, capacity, measured)]

    def _capacity(self, job: Job, own: list[Setting], measured: list[ScheduledBatch]) -> Capacity:
        slots: Slots = ()
        tier_slots: Slots | None = None
        refusal = None
        try:
            found = job_slots(job, self._groups, measured)
            tier_slots = job_tier_slots(job, self._groups, measured, found)
            slots = found
        except ConfigError as error:
            refusal = str(error)
        return Capacity(
            settings=own,
            slots=slots,
            memory=None if tier_slots is None else job.store.memory,
            tier_slots=tier_slots,
            refusal=refusal,
        )

    def _watched(
        self, batches: Iterable[ScheduledBatch], capacities: list[Capacity], measured: list[ScheduledBatch]
    ) -> Iterable[ScheduledBatch]:
        pairs = ((own, setting) for own in capacities if own.slots for setting in own.settings)
        for capacity, setting in pairs:
            tier_slots = capacity.tier_slots_of(setting)
            watcher = self._watch(setting, capacity.slots, tier_slots)
            if watcher is not None:
                planner = new_planner(
                    setting, self._groups, capacity.slots, measured, tier_slots=tier_slots, keep_ids=True
                )
                batches = planned_beside(batches, planner, watcher)
        return batches

    def _results(
        self, recording: RunRecording, capacity: Capacity, measured: list[ScheduledBatch]
    ) -> Iterator[Simulation]:
        bound, refusal = None, capacity.refusal
        if capacity.slots:
            bound, refusal = self._moved(recording, capacity, bound_setting(capacity.settings[0].job), measured)
        for setting in capacity.settings:
            moves = bound
            if bound is not None and setting.policy != BOUND:
                moves, refusal = self._moved(recording, capacity, setting, measured)
            if bound is None or moves is None:
                yield skipped_result(setting, refusal or "")
            else:
                outcome = Outcome(
                    setting=setting,
                    slots=capacity.slots,
                    memory=capacity.memory,
                    tier_slots=capacity.tier_slots_of(setting),
                    moves=moves,
                )
                yield make_result(recording, outcome, bound, per_step=self._per_step)

    def _moved(
        self, recording: RunRecording, capacity: Capacity, setting: Setting, measured: list[ScheduledBatch]
    ) -> tuple[Moves, None] | tuple[None, str]:
        slots, tier_slots = capacity.slots, capacity.tier_slots_of(setting)
        tick = self._progress.begin(description(setting), len(recording))
        try:
            match setting.policy:
                case "window":
                    return window_moves(recording, slots, setting.horizon_batches, setting.job.job.seed, tick), None
                case "ttl":
                    return ttl_moves(recording, slots, setting.horizon_batches, tick), None
                case "belady":
                    return planned_moves(recording, bound_planner(recording, slots, tier_slots), tick), None
                case _:
                    planner = new_planner(setting, self._groups, slots, measured, tier_slots=tier_slots)
                    return planned_moves(recording, planner, tick), None
        except ConfigError as error:
            return None, str(error)


def settings_of_jobs(job: Job, grid: Grid) -> Iterator[tuple[Job, list[Setting]]]:
    """The settings of each capacity and memory tier. Policies that know no tier come once a capacity."""
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
    tier = f", memory {setting.job.store.memory}" if STORES[setting.job.store.kind].has_tier else ""
    return (
        f"{setting.policy}{horizon}, capacity {setting.job.cache.capacity}{tier}, batches of {data.batch_size}{order}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    trace: Path | None = None
    save_trace: Path | None = None
    max_steps: int | None = None
    policies: Sequence[str] = ()
    capacity_rows: Sequence[int] = ()
    capacities: Sequence[str] = ()
    memories: Sequence[str] = ()
    horizons: Sequence[str] = ()
    batch_sizes: Sequence[int] = ()
    shuffles: Sequence[str] = ()
    ranks: Sequence[int] = ()
    samples_per_rank: Sequence[int] = ()
    rates: Path | None = None
    json: bool = False
    per_step: bool = False
    plot: Path | None = None


def run_simulate(job: Job, options: SimulateOptions) -> None:
    """Raises ConfigError if no setting could run, after printing why."""
    for name, value in (("--rates", options.rates), ("--samples-per-rank", options.samples_per_rank)):
        if value:
            raise ConfigError(f"{name} needs --ranks; give the numbers of ranks to simulate")
    if options.plot is not None:
        check_plot(options.plot)
    grid = Grid(
        policies=options.policies,
        capacities=[*options.capacities, *(f"{rows} rows" for rows in options.capacity_rows)],
        memories=options.memories,
        horizons=[parse_horizon(text) for text in options.horizons],
        batch_sizes=options.batch_sizes,
        shuffles=options.shuffles,
    )
    with ExitStack() as stack:
        source = BatchesAndPlans(
            stack, job, grid, trace=options.trace, save_trace=options.save_trace, max_steps=options.max_steps
        )
        with ProgressBar() as progress:
            results = simulate(
                source.job,
                grid,
                source.open_batches,
                watch=source.watch,
                progress=progress,
                per_step=options.per_step,
            )
    if options.trace is not None:
        results = [msgspec.structs.replace(result, shuffle=None) for result in results]
    show(results, options, source.num_compared)
    require_one(results)


def parse_horizon(text: str) -> Horizon:
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ConfigError(f"--horizon {text}: give a number of batches, or auto")
    return int(text)


def show(results: list[Simulation], options: SimulateOptions, num_compared: int | None) -> None:
    if options.plot is not None:
        plot_results(results, options.plot)
    if options.json:
        compared = {} if num_compared is None else {"plans_compared": num_compared}
        sys.stdout.buffer.write(msgspec.json.encode({"results": results, **compared}) + b"\n")
        return
    if any(result.skipped is None for result in results):
        print_results(results)
    if num_compared is not None:
        typer.echo(f"The trace's own setting was planned again: {num_compared:,} plans are identical.")


def require_one(results: list[Simulation]) -> None:
    """Raises ConfigError if every setting was skipped."""
    if any(result.skipped is None for result in results):
        return
    first, *others = dict.fromkeys(result.skipped for result in results)
    more = f" (and {len(others)} more such)" if others else ""
    raise ConfigError(f"nothing could be simulated: {first}{more}")
