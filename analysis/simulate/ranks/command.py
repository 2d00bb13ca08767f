"""`prefetcher simulate --ranks`: every rank of a run in one process, without tables, trainers or a network.

    data or trace --batches--> parts, grouped once --> shares of all ranks --> a planner for each rank
                                                              |                        |
                                                              +--> rows exchanged      +--> rows fetched, written back

All settings with the same batches are simulated side by side while the data is read once, and nothing is kept of a
batch but what its planners keep: the memory that it takes is that of N horizons.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, groupby, islice, product

import typer

from rowcast.analysis.progress import AnalysisProgress, ProgressBar, Silent
from rowcast.analysis.simulate.grid import Grid, check_order, order_values, with_values
from rowcast.analysis.simulate.ranks.counts import RunCounts, StepExchange, ranks_on_host, step_exchange
from rowcast.analysis.simulate.ranks.owners import Owners, measured_keys, owners_slots
from rowcast.analysis.simulate.ranks.results import (
    RanksSimulation,
    bytes_table,
    counts_table,
    make_result,
    outline,
)
from rowcast.analysis.simulate.ranks.shares import GroupShares, Sharing, part_groupings
from rowcast.analysis.simulate.replay import BatchesAndPlans
from rowcast.analysis.simulate.simulate import OpenBatches, SimulateOptions, parse_horizon
from rowcast.job.schema import Job, check_shared
from rowcast.job.tables import GroupSpec, batch_features, group_specs
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.parts import parts_of
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import print_json, stdout_console

POLICIES = ("lookahead", "lru", "lfu")  # "static" would count the first batches of each rank


def ranks_jobs(job: Job, options: SimulateOptions) -> list[Job]:
    """A job for each setting; those with the same batches are neighbours. Raises ConfigError."""
    for policy in options.policies or [job.cache.policy]:
        if policy not in POLICIES:
            raise ConfigError(f"--ranks simulates {', '.join(POLICIES)}, not {policy}; give one of these as --policy")
    for shuffle in options.shuffles:
        check_order(job.data, shuffle)
    capacities: list[str | int] = [*options.capacities, *(f"{rows} rows" for rows in options.capacity_rows)]
    capacities = capacities or [job.cache.capacity]
    horizons = [parse_horizon(text) for text in options.horizons] or [job.lookahead.horizon]
    found = [
        with_values(
            job,
            {
                "data": {"batch_size": size, **order_values(job.data, shuffle)},
                "ranks": {"count": count, "parts": parts_for(job, count), "per_host": None},
                "cache": {"capacity": capacity, "policy": policy},
                "lookahead": {"horizon": horizon},
            },
        )
        for shuffle in dict.fromkeys(options.shuffles or [job.data.whole_order])
        for count in dict.fromkeys(options.ranks)
        for size in batch_sizes(job, options, count)
        for capacity, policy, horizon in product(capacities, options.policies or [job.cache.policy], horizons)
    ]
    return sorted(found, key=lambda own: (own.data.batch_size, own.data.whole_order))  # stable


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


class Setting:
    """Counts for one setting while the batches pass."""

    def __init__(
        self, job: Job, groups: tuple[GroupSpec, ...], keys: Sequence[Sequence[I64]], measured: list[ScheduledBatch]
    ) -> None:
        """`keys`: of each group, the distinct rows of each measured batch."""
        self.job, self._groups = job, groups
        self.refusal: str | None = None
        self.counts = RunCounts(count=job.ranks.count, steps=[], fetched=[], written_back=[])
        try:
            self._slots = owners_slots(job, groups, keys, measured)
        except ConfigError as error:
            self.refusal = str(error)
            return
        self._owners = Owners(job, groups, self._slots)

    @property
    def sharing(self) -> tuple[int, int]:
        return self.job.ranks.count, self.job.ranks.num_parts

    def add(self, scheduled: ScheduledBatch, shares: Sequence[GroupShares], exchange: StepExchange) -> None:
        self.counts.steps.append(exchange)
        try:
            for moves in self._owners.add(scheduled, [group.owned for group in shares]):
                self.counts.moved(moves)
        except ConfigError as error:
            self.refusal = str(error)

    def result(self, on_host: int, *, per_step: bool) -> RanksSimulation:
        try:
            for moves in () if self.refusal else self._owners.end():
                self.counts.moved(moves)
        except ConfigError as error:
            self.refusal = str(error)
        if self.refusal is not None:
            return outline(self.job, self.refusal)
        if not self.counts.steps:
            return outline(self.job, "the data has no batch")
        return make_result(
            self.job,
            self._groups,
            self.counts,
            self._owners.flushed,
            on_host=on_host,
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
    """A result for each job, in their order; those with the same batches must be neighbours. Raises ConfigError where
    hosts would not be full, and what reading the data raises."""
    results: list[RanksSimulation] = []
    for _, neighbours in groupby(jobs, key=lambda job: (job.data.batch_size, job.data.whole_order)):
        own = list(neighbours)
        hosts = {job.ranks.count: ranks_on_host(job.ranks.count, job.ranks.per_host) for job in own}
        settings = simulated(own, open_batches(own[0]), hosts, progress or Silent())
        results += [one.result(hosts[one.job.ranks.count], per_step=per_step) for one in settings]
    return results


def simulated(
    jobs: Sequence[Job], batches: Iterable[ScheduledBatch], hosts: dict[int, int], progress: AnalysisProgress
) -> list[Setting]:
    groups, left = group_specs(jobs[0]), iter(batches)
    groupers, whole = groupers_of(groups), batch_features(groups)
    measured = list(islice(left, MEASURED_BATCHES))
    keys = measured_keys(groupers, measured)
    settings = [Setting(job, groups, keys, measured) for job in jobs]
    sharings = {own.sharing: [Sharing(group, *own.sharing) for group in groups] for own in settings}
    ranks = ", ".join(str(count) for count in dict.fromkeys(job.ranks.count for job in jobs))
    tick = progress.begin(f"batches of {jobs[0].data.batch_size}, ranks {ranks}", None)
    for scheduled in chain(emptied(measured), left):
        wanted = {own.sharing for own in settings if own.refusal is None}
        if not wanted:
            break
        groupings = {parts: part_groupings(groupers, parts_of(scheduled.batch, parts, whole)) for _, parts in wanted}
        for count, parts in sorted(wanted):
            by_group = zip(sharings[count, parts], groupings[parts], strict=True)
            shares = [sharing.of(own, scheduled.batch.size) for sharing, own in by_group]
            exchange = step_exchange(groups, scheduled, shares, hosts[count])
            for setting in settings:
                if setting.sharing == (count, parts) and setting.refusal is None:
                    setting.add(scheduled, shares, exchange)
        tick()
    return settings


def emptied(batches: list[ScheduledBatch]) -> Iterator[ScheduledBatch]:
    """Yields the batches, and keeps no reference to a batch that was taken: it may be large."""
    batches.reverse()
    while batches:
        yield batches.pop()


def run_simulate_ranks(job: Job, options: SimulateOptions) -> None:
    """Raises ConfigError if no setting could run, after printing why."""
    check_options(options)
    with ExitStack() as stack:
        grid = Grid(batch_sizes=[*options.batch_sizes, *options.samples_per_rank], shuffles=options.shuffles)
        source = BatchesAndPlans(stack, job, grid, trace=options.trace, save_trace=None, max_steps=options.max_steps)
        jobs = ranks_jobs(source.job, options)
        with ProgressBar() as progress:
            results = simulate_ranks(jobs, source.open_batches, progress=progress, per_step=options.per_step)
    show(results, as_json=options.json)
    if all(result.skipped is not None for result in results):
        raise ConfigError(f"nothing could be simulated: {results[0].skipped}")


def check_options(options: SimulateOptions) -> None:
    """Raises ConfigError."""
    given = {"--store-memory": options.memories, "--save-trace": options.save_trace, "--plot": options.plot}
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name}: `simulate --ranks` has none yet; omit it, or omit --ranks")


def show(results: Sequence[RanksSimulation], *, as_json: bool) -> None:
    if as_json:
        print_json({"results": results})
        return
    console, ran = stdout_console(), [result for result in results if result.skipped is None]
    if not console.is_terminal:
        console.width = 160
    tables = {
        "Rows a step and, but for the batch, a rank:": counts_table(ran),
        "MB that a rank receives in a train step, and what the busiest sends or receives:": bytes_table(ran),
    }
    for title, table in tables.items():
        if table.row_count:
            console.print(title)
            console.print(table)
            console.print()
    for result in results:
        if result.skipped is not None:
            typer.echo(f"Not simulated: {result.ranks} ranks at {result.capacity}: {result.skipped}.")
