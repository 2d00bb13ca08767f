"""The command's own half of `prefetcher simulate`: what was typed becomes a grid, what was found becomes output."""

import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import typer

from rowcast.analysis.progress import ProgressBar
from rowcast.analysis.simulate.grid import Grid, Setting, batches_jobs, capacity_jobs, settings, with_values
from rowcast.analysis.simulate.grid_table import print_results
from rowcast.analysis.simulate.plot import check_plot, plot_results
from rowcast.analysis.simulate.replay import Comparing, PlanWatcher, Replay, Saving, Watchers
from rowcast.analysis.simulate.results import Simulation
from rowcast.analysis.simulate.simulate import simulate
from rowcast.job.eviction_policies import EVICTION_POLICIES
from rowcast.job.schema import Horizon, Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.prefetcher.traces.header import check_tables, same_settings, trace_header
from rowcast.prefetcher.traces.reader import TraceReader
from rowcast.prefetcher.traces.writer import TraceWriter
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    """As typed."""

    trace: Path | None = None
    save_trace: Path | None = None
    max_steps: int | None = None
    policies: Sequence[str] = ()
    capacity_rows: Sequence[int] = ()
    capacities: Sequence[str] = ()
    horizons: Sequence[str] = ()
    batch_sizes: Sequence[int] = ()
    shuffles: Sequence[str] = ()
    json: bool = False
    per_step: bool = False
    plot: Path | None = None


def run_simulate(job: Job, options: SimulateOptions) -> None:
    """Raises ConfigError where no setting could run, after all was said about them."""
    if options.plot is not None:
        check_plot(options.plot)
    grid = Grid(
        policies=options.policies,
        capacities=[*options.capacities, *(f"{rows} rows" for rows in options.capacity_rows)],
        horizons=[parse_horizon(text) for text in options.horizons],
        batch_sizes=options.batch_sizes,
        shuffles=options.shuffles,
    )
    with ExitStack() as stack:
        session = Session(stack, job, grid, options)
        with ProgressBar() as progress:
            results = simulate(
                session.job,
                grid,
                session.open_batches,
                watch=session.watch,
                progress=progress,
                per_step=options.per_step,
            )
    if options.trace is not None:
        results = [msgspec.structs.replace(result, shuffle=None) for result in results]
    show(results, options, session.num_compared)
    require_one(results)


class Session:
    """Where the batches come from, and who sees the plans."""

    def __init__(self, stack: ExitStack, job: Job, grid: Grid, options: SimulateOptions) -> None:
        self.job = job
        self._options = options
        self._stack = stack
        self._replay: Replay | None = None
        self._comparing: Comparing | None = None
        if options.trace is not None:
            for name, values in (("--batch-size", options.batch_sizes), ("--shuffle", options.shuffles)):
                if values:
                    raise ConfigError(
                        f"{name}: a trace has batches of its own, in one order; leave it out or simulate over the data"
                    )
            reader = stack.enter_context(TraceReader(options.trace))
            check_tables(reader.header, job, f"--trace {options.trace}")
            self.job = with_values(job, {"data": {"batch_size": reader.header.batch_size}})
            self._replay = Replay(reader, options.max_steps)
        if options.save_trace is not None:
            require_one_run(self.job, grid)

    @property
    def num_compared(self) -> int | None:
        """Plans that were found identical to the trace's; None where no setting was the trace's."""
        return None if self._comparing is None else self._comparing.num_compared

    def open_batches(self, own: Job) -> Iterable[ScheduledBatch]:
        if self._replay is not None:
            return self._replay.batches()
        return schedule(own, open_reader(own), self._options.max_steps)

    def watch(self, setting: Setting, slots: tuple[int, ...]) -> PlanWatcher | None:
        if setting.policy not in EVICTION_POLICIES:
            return None
        header = trace_header(setting.job, group_specs(setting.job), slots)
        watchers: list[PlanWatcher] = []
        replay = self._replay
        if (
            replay is not None
            and self._comparing is None
            and replay.is_measured
            and same_settings(replay.reader.header, header)
        ):
            self._comparing = Comparing(replay)
            watchers.append(self._comparing)
        if self._options.save_trace is not None:
            watchers.append(Saving(self._stack.enter_context(TraceWriter(self._options.save_trace, header))))
        return Watchers(watchers) if watchers else None


def require_one_run(job: Job, grid: Grid) -> None:
    """Raises ConfigError unless the grid is one setting that a run can have."""
    found = [
        setting
        for own in batches_jobs(job, grid)
        for cap in capacity_jobs(own, grid)
        for setting in settings(cap, grid)
    ]
    if len(found) > 1:
        raise ConfigError(
            f"--save-trace saves the plans of one setting, and these are {len(found)}; give one value of each"
        )
    if found[0].policy not in EVICTION_POLICIES:
        raise ConfigError(
            f"--save-trace: --policy {found[0].policy} makes no plans; give one of {', '.join(EVICTION_POLICIES)}"
        )


def parse_horizon(text: str) -> Horizon:
    """Raises ConfigError."""
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
    """Raises ConfigError where every setting was skipped."""
    if any(result.skipped is None for result in results):
        return
    first, *others = dict.fromkeys(result.skipped for result in results)
    more = f" (and {len(others)} more such)" if others else ""
    raise ConfigError(f"nothing could be simulated: {first}{more}")
