"""`prefetcher simulate`: counts the rows that a run would move with other policies, capacities, horizons, batch sizes
and orders, before it is trained.

    data set or trace --batches--> record: the distinct rows of each step    once a batch size and order
                                       |
                                       +--> belady: the bound                once a capacity
                                       +--> each policy and horizon

It runs the planner of training over the schedule of training, with slots divided as in training. So its counts of each
step are those that a run would report, if a run can have the policy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer import Option

from rowcast.analysis.progress import AnalysisProgress, ProgressBar, Silent
from rowcast.analysis.simulate.grid import BOUND, WITH_TIER, Grid, Setting, batches_jobs, capacity_jobs, settings
from rowcast.analysis.simulate.moves import Moves, bound_planner, new_planner, planned_moves
from rowcast.analysis.simulate.plot import plot_results
from rowcast.analysis.simulate.policies import ttl_moves, window_moves
from rowcast.analysis.simulate.recording import RunRecording, record
from rowcast.analysis.simulate.replay import BatchesAndPlans, PlanWatcher, planned_beside
from rowcast.analysis.simulate.results import Simulation, make_result, outline, print_results
from rowcast.job.eviction_policies import EVICTION_POLICIES
from rowcast.job.schema import Horizon, Job
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES, job_slots
from rowcast.prefetcher.planner.level import Slots
from rowcast.prefetcher.run.sizing import job_levels
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.command_options import AsJson, MaxSteps, SaveTrace
from rowcast.runtime.drawing import check_plot
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import print_json

OpenBatches = Callable[[Job], Iterable[ScheduledBatch]]
Watch = Callable[[Setting, Sequence[Slots]], Sequence[PlanWatcher]]  # setting, slots of each level -> of its plans


def simulate(
    job: Job,
    grid: Grid,
    open_batches: OpenBatches,
    *,
    watch: Watch = lambda setting, slots: (),
    progress: AnalysisProgress | None = None,
    per_step: bool = False,
) -> list[Simulation]:
    """Returns a result for each setting, ordered by batch size, order and capacity; policies and horizons are in the
    given order.

    `open_batches` returns the batches of a run of a job, from its first step. A setting that cannot run becomes a
    result that says why. Raises ConfigError for values that no job can have, and what reading the data raises."""
    results: list[Simulation] = []
    for own in batches_jobs(job, grid):
        results += Simulator(own, grid, watch, progress or Silent(), per_step).run(open_batches(own))
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

    def _watched(
        self, batches: Iterable[ScheduledBatch], capacities: list[Capacity], measured: list[ScheduledBatch]
    ) -> Iterable[ScheduledBatch]:
        pairs = ((own, setting) for own in capacities if own.slots for setting in own.settings)
        for capacity, setting in pairs:
            slots = capacity.slots_of(setting)
            if watchers := self._watch(setting, slots):
                planner = new_planner(setting, self._groups, slots, measured)
                batches = planned_beside(batches, planner, *watchers)
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
                yield outline(setting, refusal or "")
            else:
                slots, memory = capacity.slots_of(setting), capacity.memory
                yield make_result(recording, setting, slots, memory, moves, bound, per_step=self._per_step)

    def _moved(
        self, recording: RunRecording, capacity: Capacity, setting: Setting, measured: list[ScheduledBatch]
    ) -> tuple[Moves, None] | tuple[None, str]:
        slots = capacity.slots_of(setting)
        tick = self._progress.begin(description(setting), len(recording))
        try:
            match setting.policy:
                case "window":
                    return window_moves(recording, slots[0], setting.horizon_batches, setting.job.job.seed, tick), None
                case "ttl":
                    return ttl_moves(recording, slots[0], setting.horizon_batches, tick), None
                case "belady":
                    return planned_moves(recording, bound_planner(recording, slots), tick), None
                case _:
                    planner = new_planner(setting, self._groups, slots, measured)
                    return planned_moves(recording, planner, tick), None
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    max_steps: MaxSteps = None
    policies: Annotated[
        Sequence[str], Option("--policy", help=f"{', '.join(EVICTION_POLICIES)}, window, ttl or belady. Repeatable.")
    ] = ()
    capacity_rows: Annotated[Sequence[int], Option(min=1, help="Slots. Repeatable.")] = ()
    capacities: Annotated[
        Sequence[str], Option("--capacity", help="As cache.capacity, such as 64MiB. Repeatable.")
    ] = ()
    memories: Annotated[
        Sequence[str],
        Option("--store-memory", help="As store.memory of a store with a memory tier, such as 8GiB. Repeatable."),
    ] = ()
    horizons: Annotated[Sequence[str], Option("--horizon", help="Batches known ahead, or auto. Repeatable.")] = ()
    batch_sizes: Annotated[Sequence[int], Option("--batch-size", min=1, help="Repeatable.")] = ()
    shuffles: Annotated[
        Sequence[str],
        Option(
            "--shuffle", help="none, window:ROWS or full; or with data.hot, such as full+hot-blocks:20. Repeatable."
        ),
    ] = ()
    ranks: Annotated[
        Sequence[int], Option(min=1, help="Trainers that share each batch; other tables are printed. Repeatable.")
    ] = ()
    samples_per_rank: Annotated[
        Sequence[int], Option(min=1, help="With --ranks: instead of --batch-size. Repeatable.")
    ] = ()
    json: AsJson = False
    per_step: Annotated[bool, Option("--per-step", help="With --json: what moved at each step too.")] = False
    plot: Annotated[Path | None, Option(help="Draw miss-ratio curves.", metavar="PNG|SVG")] = None
    trace: Annotated[Path | None, Option(help="Batches of a saved trace instead of the data's.", metavar="FILE")] = None
    save_trace: SaveTrace = None


def run_simulate(job: Job, options: SimulateOptions) -> None:
    """Raises ConfigError if no setting could run, after printing why."""
    if options.samples_per_rank:
        raise ConfigError("--samples-per-rank needs --ranks; give the numbers of ranks to simulate")
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
                source.job, grid, source.open_batches, watch=source.watch, progress=progress, per_step=options.per_step
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
        print_json({"results": results, **compared})
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
