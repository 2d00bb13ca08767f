"""`rowcast simulate`, for one trainer or, with --ranks, for several that share each batch: tables or JSON."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated

from typer import Option

from rowcast.analysis.show import Part, ProgressBar, show, table_of
from rowcast.analysis.simulate.ranks import MB, RanksSimulation, Spread, simulate_ranks
from rowcast.analysis.simulate.simulate import Grid, Simulation, batches_of, check_order
from rowcast.analysis.simulate.simulate import simulate as simulated
from rowcast.job.file import load_job, with_values
from rowcast.job.schema import EVICTION_POLICIES, Horizon, Job, check_shared
from rowcast.prefetcher.planner.first_batches import Bytes, TableBytes
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.command_options import AsJson, Config, MaxSteps, Overrides, options_of
from rowcast.runtime.errors import ConfigError, listed
from rowcast.runtime.telemetry.format_numbers import percent

RANKS_POLICIES = ("lookahead", "lru", "lfu")  # "static" would count the first batches of each rank
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    max_steps: MaxSteps = None
    policies: Annotated[
        Sequence[str], Option("--policy", help=f"{', '.join(EVICTION_POLICIES)} or belady. Repeatable.")
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
    if options.memories:
        raise ConfigError("--store-memory: `simulate --ranks` has none yet; omit it, or omit --ranks")
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
        # a line for each table, with each number of ranks that has several and each batch size
        found = {
            f"{result.ranks} ranks,\nbatch {result.batch_size:,}": result.ways.tables for result in ran if result.ways
        }
        found = {name: tables for name, tables in found.items() if not name.startswith("1 ranks")}
        if found:
            cells = {name: lambda row, at=at: of_table(row[at]) for at, name in enumerate(found)}
            yield "MB of each table by rows / as pooled vectors, and where auto places it:"
            yield table_of(
                zip(*found.values(), strict=True), {"table": lambda row: row[0].table, **cells}, left=("table",)
            )
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
