"""`rowcast simulate`, for one trainer or, with --ranks, for several that share each batch.

It prints tables or JSON, and draws miss-ratio curves: the share of the steps' distinct rows that must be fetched, over
the capacity, with a line per policy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from rowcast.analysis.show import Part, ProgressBar, show, table_of
from rowcast.analysis.simulate.ranks import MB, RanksSimulation, Spread, simulate_ranks
from rowcast.analysis.simulate.simulate import BOUND, Grid, Simulation, batches_of, check_order
from rowcast.analysis.simulate.simulate import simulate as simulated
from rowcast.job.file import load_job, with_values
from rowcast.job.schema import EVICTION_POLICIES, Horizon, Job, check_shared
from rowcast.prefetcher.planner.first_batches import Bytes, TableBytes
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.command_options import AsJson, Config, MaxSteps, Overrides, options_of
from rowcast.runtime.drawing import (
    BLUE,
    GREEN,
    ORANGE,
    PERCENT,
    PINK,
    RED,
    SKY,
    check_plot,
    dress,
    new_figure,
    save_plot,
)
from rowcast.runtime.errors import ConfigError, listed
from rowcast.runtime.telemetry.format_numbers import human_count, percent

RANKS_POLICIES = ("lookahead", "lru", "lfu")  # "static" would count the first batches of each rank
MIB = 2**20


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
        Option("--shuffle", help="none, window:ROWS or full. Repeatable."),
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

    @property
    def all_capacities(self) -> list[str | int]:
        return [*self.capacities, *(f"{rows} rows" for rows in self.capacity_rows)]

    @property
    def all_horizons(self) -> list[Horizon]:
        return [parse_horizon(text) for text in self.horizons]


@options_of(SimulateOptions)
def simulate(config: Config, overrides: Overrides = None, *, options: SimulateOptions) -> None:
    run_simulate(load_job(config, tuple(overrides or ())), options)


def run_simulate(job: Job, options: SimulateOptions) -> None:
    """Raises ConfigError if no setting could run, after printing why."""

    def open_batches(varied: Job) -> Iterable[ScheduledBatch]:
        return schedule(varied, open_reader(varied), options.max_steps)

    if options.ranks:
        jobs = ranks_jobs(job, options)
        with ProgressBar() as progress:
            of_ranks = simulate_ranks(jobs, open_batches, progress=progress, per_step=options.per_step)
        show({"results": of_ranks}, ranks_parts(of_ranks), as_json=options.json)
        require_one([result.skipped for result in of_ranks])
        return
    if options.samples_per_rank:
        raise ConfigError("--samples-per-rank needs --ranks; give the numbers of ranks to simulate")
    if options.plot is not None:
        check_plot(options.plot)
    grid = Grid(
        policies=options.policies,
        capacities=options.all_capacities,
        memories=options.memories,
        horizons=options.all_horizons,
        batch_sizes=options.batch_sizes,
        shuffles=options.shuffles,
    )
    with ProgressBar() as progress:
        results = simulated(job, grid, open_batches, progress=progress, per_step=options.per_step)
    if options.plot is not None:
        plot_results(results, options.plot)
    show({"results": results}, parts(results), as_json=options.json)
    require_one([result.skipped for result in results])


def parse_horizon(text: str) -> Horizon:
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ConfigError(f"--horizon {text}: give a number of batches, or auto")
    return int(text)


def require_one(skipped: Iterable[str | None]) -> None:
    """`skipped`: why each setting could not run, None for one that ran. Raises ConfigError if none could."""
    reasons = list(dict.fromkeys(skipped))
    if None not in reasons:
        raise ConfigError(f"nothing could be simulated: {listed([reason for reason in reasons if reason], 1, '; ')}")


def ranks_jobs(job: Job, options: SimulateOptions) -> list[Job]:
    """A job for each setting; those with the same batches are neighbours. Raises ConfigError."""
    for name, value in {"--store-memory": options.memories, "--plot": options.plot}.items():
        if value:
            raise ConfigError(f"{name}: `simulate --ranks` has none yet; omit it, or omit --ranks")
    policies = options.policies or [job.cache.policy]
    for policy in policies:
        if policy not in RANKS_POLICIES:
            raise ConfigError(
                f"--ranks simulates {', '.join(RANKS_POLICIES)}, not {policy}; give one of these as --policy"
            )
    for shuffle in options.shuffles:
        check_order(job.data, shuffle)
    jobs = [
        with_values(
            job,
            {
                "data": {"batch_size": size, "shuffle": shuffle},
                "ranks": {"count": count, "parts": parts_for(job, count), "per_host": None},
                "cache": {"capacity": capacity, "policy": policy},
                "lookahead": {"horizon": horizon},
            },
        )
        for shuffle in dict.fromkeys(options.shuffles or [job.data.shuffle])
        for count in dict.fromkeys(options.ranks)
        for size in batch_sizes(job, options, count)
        for capacity, policy, horizon in product(
            options.all_capacities or [job.cache.capacity], policies, options.all_horizons or [job.lookahead.horizon]
        )
    ]
    return sorted(jobs, key=lambda varied: (varied.data.batch_size, varied.data.shuffle))  # stable


def parts_for(job: Job, count: int) -> int:
    """Returns the job's parts if this number of ranks can divide them, otherwise a part for each rank."""
    try:
        check_shared(job.ranks.num_parts, count)
    except ValueError:
        return count
    return job.ranks.num_parts


def batch_sizes(job: Job, options: SimulateOptions, count: int) -> list[int]:
    sizes = options.batch_sizes or ([] if options.samples_per_rank else [job.data.batch_size])
    return list(dict.fromkeys([*sizes, *(samples * count for samples in options.samples_per_rank)]))


def parts(results: Sequence[Simulation]) -> Iterator[Part]:
    """A table of the settings, with batch size and order if there are several, then those that could not run."""
    ran = [result for result in results if result.skipped is None]
    if ran:
        yield table_of(ran, columns(ran), left=("policy", "shuffle"))
        yield "Rows and MiB are per step."
    yield from dict.fromkeys(
        f"Batches of {batches_of(result)}: {result.steps:,} train and {result.eval_steps:,} evaluation steps, "
        f"{result.lookups:,} look-ups of {result.unique_rows:,} rows."
        for result in ran
    )
    refused: dict[str, list[str]] = {}
    for result in results:
        if result.skipped is not None:
            why = f"{result.capacity} with batches of {batches_of(result)}: {result.skipped}"
            refused.setdefault(why, []).append(result.policy)
    yield from (f"Not simulated: {', '.join(dict.fromkeys(policies))} at {why}." for why, policies in refused.items())


def columns(results: Sequence[Simulation]) -> dict[str, Callable[[Simulation], str]]:
    def a_step(name: str) -> Callable[[Simulation], str]:
        return lambda result: f"{per_step(result, name):,.0f}" if getattr(result, name) is not None else ""

    def mib(name: str) -> Callable[[Simulation], str]:
        return lambda result: f"{per_step(result, name) / MIB:,.{2 if per_step(result, name) > MIB / 10 else 4}f}"

    def optional(name: str, form: Callable[[float], str]) -> Callable[[Simulation], str]:
        return lambda result: "" if getattr(result, name) is None else form(getattr(result, name))

    cells = {
        "batch\nsize": optional("batch_size", "{:,}".format),
        "shuffle": optional("shuffle", str),
        "capacity\nin rows": optional("capacity_rows", "{:,}".format),
        "policy": optional("policy", str),
        "horizon": optional("horizon", str),
        "rows\nfetched": a_step("rows_fetched"),
        "written\nback": a_step("rows_written_back"),
        "MiB\nin": mib("bytes_fetched"),
        "MiB\nout": mib("bytes_written_back"),
        "hit\nratio": optional("hit_ratio", percent),
        "to the\nbound": optional("ratio_to_bound", "{:.3f}".format),
        "memory\nin rows": optional("memory_rows", "{:,}".format),
        "enter\nmemory": a_step("rows_entered"),
        "from\ncold": a_step("rows_from_cold"),
        "cold to\nthe bound": optional("cold_ratio_to_bound", "{:.3f}".format),
    }
    varied = {"batch\nsize": "batch_size", "shuffle": "shuffle"}
    left = {name for name, field in varied.items() if len({getattr(result, field) for result in results}) == 1}
    if all(result.memory_rows is None for result in results):
        left |= set(list(cells)[-4:])
    return {name: cell for name, cell in cells.items() if name not in left}


def per_step(result: Simulation, name: str) -> float:
    number: int = getattr(result, name) or 0
    return number / max(1, (result.steps or 0) + (result.eval_steps or 0))


def ranks_parts(results: Sequence[RanksSimulation]) -> Iterator[Part]:
    ran = [result for result in results if result.skipped is None]
    if ran:
        yield (
            "Rows a step and, but for the batch, a rank; MB of a train step, both ways, of the mean rank / the busiest:"
        )
        yield table_of(ran, RANKS)
        yield from placed_tables(ran)
    for result in results:
        if result.skipped is not None:
            yield f"Not simulated: {result.ranks} ranks at {result.capacity}: {result.skipped}."


def mean(name: str) -> Callable[[RanksSimulation], str]:
    return lambda result: f"{spread_of(result, name).mean:,.0f}"


def imbalance(result: RanksSimulation) -> str:
    largest = spread_of(result, "owner_rows").imbalance
    return "" if largest is None else f"{largest:.3f}"


def spread_of(result: RanksSimulation, name: str) -> Spread:
    counts: Spread = getattr(result, name)
    return counts


def late(result: RanksSimulation) -> str:
    received = spread_of(result, "rows_received").mean
    return f"{(result.rows_late or 0) / received:.0%}" if received else ""


def megabytes(way: str) -> Callable[[RanksSimulation], str]:
    return lambda result: "" if result.ways is None else mean_and_most(getattr(result.ways, way))


def mean_and_most(nbytes: Bytes) -> str:
    return f"{nbytes.mean / MB:,.3g} / {nbytes.most / MB:,.3g}"


def placed_tables(results: Sequence[RanksSimulation]) -> Iterator[Part]:
    """A line for each table, with each number of ranks that has several and each batch size."""
    found = {
        f"{result.ranks} ranks,\nbatch {result.batch_size:,}": result.ways.tables for result in results if result.ways
    }
    found = {name: tables for name, tables in found.items() if not name.startswith("1 ranks")}
    if found:
        cells = {name: lambda row, at=at: of_table(row[at]) for at, name in enumerate(found)}
        yield "MB of each table by rows / as pooled vectors, and where auto places it:"
        yield table_of(zip(*found.values(), strict=True), {"table": lambda row: row[0].table, **cells}, left=("table",))


def of_table(table: TableBytes) -> str:
    return f"{table.rows / MB:,.3g} / {table.vectors / MB:,.3g} {table.placement}"


RANKS: dict[str, Callable[[RanksSimulation], str]] = {
    "ranks": lambda result: f"{result.ranks:,}",
    "batch": lambda result: f"{result.batch_size:,}",
    "rows of\na part": mean("part_rows"),
    "rows of\nthe batch": lambda result: f"{result.batch_rows or 0:,.0f}",
    "rows of\nan owner": mean("owner_rows"),
    "max over\nmean": imbalance,
    "rows\nreceived": mean("rows_received"),
    "of these\nlate": late,
    "rows\nfetched": mean("rows_fetched"),
    "written\nback": mean("rows_written_back"),
    "MB by\nrows": megabytes("rows"),
    "by\ntables": megabytes("table"),
    "by\ncolumns": megabytes("columns"),
    "by\nauto": megabytes("auto"),
}


LOOKS = {
    "lookahead": (BLUE, "o"),
    "lru": (RED, "s"),
    "lfu": (PINK, "D"),
    "static": (ORANGE, "v"),
    "window": (SKY, "^"),
    "ttl": (GREEN, "P"),
}
BOUND_STYLE = {
    "color": "#d0d0d0",
    "linewidth": 7.0,
    "solid_capstyle": "round",
    "marker": "o",
    "markersize": 7,
    "zorder": 2,
}
OTHER_LOOK = ("#000000", "x")
STYLES = ("-", "--", ":", "-.")
LABELS = {"lookahead": "look-ahead", "lru": "LRU", "lfu": "LFU", "ttl": "time to live"}
SIDE_INCHES = (5.2, 4.0)  # width and height of a panel
LEGEND_INCHES = 2.2
FAR_APART = 4  # times the smallest capacity
MOST_TICKS = 8


def plot_results(results: Sequence[Simulation], path: Path) -> None:
    """Draws to `path`, one panel per batch size and order. Raises ConfigError if it cannot be written."""
    shown = [result for result in results if result.rows_fetched is not None and result.unique_rows]
    panels: dict[str, list[Simulation]] = {}
    for result in shown:
        panels.setdefault(f"batches of {batches_of(result)}", []).append(result)
    if not shown:
        return  # the command explains
    figure = new_figure((SIDE_INCHES[0] * len(panels) + LEGEND_INCHES, SIDE_INCHES[1]))
    [axes] = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for panel, (title, of_panel) in zip(axes, panels.items(), strict=True):
        draw_panel(panel, of_panel)
        panel.set_title(title, fontsize=10)
    axes[0].set_ylabel("distinct rows of a step that are fetched")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    save_plot(figure, path, dpi=160)


def draw_panel(axes: Any, results: Sequence[Simulation]) -> None:
    for label, style, points in curves(results):
        axes.plot(*zip(*points, strict=True), label=label, **style)
    mark_sizes(axes, sorted({result.capacity_rows or 0 for result in results}))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PERCENT)
    dress(axes)


def mark_sizes(axes: Any, sizes: list[int]) -> None:
    axes.set_xlabel("capacity in rows")
    far = sizes[-1] > FAR_APART * max(1, sizes[0])
    if far:
        axes.set_xscale("log")
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: human_count(value))
    apart = all(later > 1.2 * earlier for earlier, later in pairwise(sizes))
    if len(sizes) <= MOST_TICKS and (apart or len(sizes) == 1):
        axes.set_xticks(sizes)


def curves(results: Sequence[Simulation]) -> Iterator[tuple[str, dict[str, Any], list[tuple[int, float]]]]:
    horizons = list(dict.fromkeys(result.horizon for result in results if result.horizon is not None))
    lines: dict[tuple[str, Any], list[tuple[int, float]]] = {}
    for result in results:
        if result.policy != BOUND:
            lines.setdefault((result.policy, result.horizon), []).append(
                (result.capacity_rows or 0, ratio(result.rows_fetched, result))
            )
    for (policy, horizon), points in lines.items():
        style = STYLES[horizons.index(horizon) % len(STYLES)] if horizon is not None else "-"
        label = LABELS.get(policy, policy) + (f", horizon {horizon}" if horizon is not None else "")
        yield label, line_style(policy, style), sorted(points)
    bound = sorted({(result.capacity_rows or 0, ratio(result.bound_rows_fetched, result)) for result in results})
    yield "whole future known", BOUND_STYLE, bound


def line_style(policy: str, style: str) -> dict[str, Any]:
    front = 4 if policy == "lookahead" else 3  # otherwise it often hides behind others
    colour, marker = LOOKS.get(policy, OTHER_LOOK)
    return {"color": colour, "marker": marker, "markersize": 5, "linestyle": style, "linewidth": 1.6, "zorder": front}


def ratio(rows: int | None, result: Simulation) -> float:
    return (rows or 0) / (result.unique_rows or 1)
