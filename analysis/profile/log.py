"""Counts what the first steps of a run look up: per table, how skewed, how soon again, and what a cache would hold.

    batches of the run --> look-ups of each row       --> share of the hottest rows, skew
                       --> distinct rows of each step --> rows and bytes of a step, steps until a row is used again
    simulate           --> hit ratio of each cache size

Look-ups and distinct rows, summed, are those of `prefetcher simulate` with the same --max-steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rowcast.analysis.profile.hot_rows import Popularity
from rowcast.analysis.progress import AnalysisProgress
from rowcast.analysis.scan.sample import reader_for_another_pass
from rowcast.analysis.scan.steps import NEVER, numbered_rows
from rowcast.analysis.show import Part, table_of
from rowcast.analysis.simulate.grid import Grid, with_values
from rowcast.analysis.simulate.plot import LABELS, line_style
from rowcast.analysis.simulate.results import Simulation
from rowcast.analysis.simulate.simulate import simulate
from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT, GroupSpec, TableSpec, group_specs
from rowcast.prefetcher.readers.reader import Reader, open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.runtime.arrays import I64
from rowcast.runtime.drawing import BLUE, PERCENT, dress, new_figure, save_plot
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import human_bytes, percent

POLICIES = ("lookahead", "lru")
CACHE_SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the bytes of all rows touched
HOTTEST = 0.01  # share of the touched rows that a table's share is told of
CURVE_POINTS = 60
INCHES = (11.0, 8.0)
MOST_TABLES = 20  # with a bar each


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFacts:
    table: str
    num_rows: int
    record_bytes: int  # weight and optimizer state of a row
    rows_touched: int
    lookups: int
    unique_rows: int  # distinct rows of each step, summed
    hottest_share: float  # of the look-ups, by the hottest 1 % of the rows touched
    most_lookups: int  # of one row
    median_lookups: float  # of a row touched


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    x: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFacts:
    steps: int  # train and evaluation steps
    batch_size: int
    lookups: int
    unique_rows: int  # distinct rows of each step, summed
    total_bytes: int  # of all rows of all tables, with optimizer state
    touched_bytes: int  # of the rows touched
    hottest: tuple[Point, ...]  # x: share of the rows touched, hottest first; share: of all look-ups
    reuse: tuple[Point, ...]  # x: steps; share: of the uses whose row was used at most so many steps before
    tables: tuple[TableFacts, ...]  # in the job's order
    caches: tuple[Simulation, ...]


def log_facts(job: Job, max_steps: int | None, limit_bytes: float, progress: AnalysisProgress) -> LogFacts:
    """Reads the data twice. Raises ConfigError and DataError."""
    groups, reader = group_specs(job), open_reader(job)
    popularity, tick = Popularity(groups, limit_bytes), progress.begin("counting look-ups", max_steps)
    steps: list[list[I64]] = []  # of each step, the distinct rows of each group
    for scheduled in schedule(job, reader, max_steps):
        steps.append(popularity.add(scheduled.batch))
        tick()
    if popularity.num_rows == 0:
        raise ConfigError("profile --plot: no batch looks up a row; give a larger --max-steps, or look at data.path")
    keys = [list(own) for own in zip(*steps, strict=True)]
    tables = tuple(table_facts(popularity, keys))
    touched_bytes = sum(table.rows_touched * table.record_bytes for table in tables)
    return LogFacts(
        steps=popularity.num_batches,
        batch_size=job.data.batch_size,
        lookups=sum(table.lookups for table in tables),
        unique_rows=sum(table.unique_rows for table in tables),
        total_bytes=sum(group.num_rows * group.record_bytes for group in groups),
        touched_bytes=touched_bytes,
        hottest=hottest_curve(np.concatenate([counts.totals()[1] for counts in popularity.counts])),
        reuse=reuse_curve(keys),
        tables=tables,
        caches=tuple(simulated_caches(job, reader, touched_bytes, max_steps, progress)),
    )


def table_facts(popularity: Popularity, keys_of_groups: list[list[I64]]) -> Iterator[TableFacts]:
    """`keys_of_groups`: of each group and step, distinct."""
    found = {}
    for group, counts, steps in zip(popularity.groups, popularity.counts, keys_of_groups, strict=True):
        keys, lookups = counts.totals()
        used = np.concatenate(steps) >> KEY_SHIFT
        for table in group.tables:
            found[table.index] = facts_of(
                table, group, lookups[keys >> KEY_SHIFT == table.index], int((used == table.index).sum())
            )
    yield from (found[index] for index in sorted(found))


def facts_of(table: TableSpec, group: GroupSpec, lookups: I64, unique_rows: int) -> TableFacts:
    """`lookups` [R]: of each row touched."""
    descending = np.sort(lookups)[::-1]
    num_hottest = -int(-HOTTEST * len(lookups) // 1)
    return TableFacts(
        table=table.name,
        num_rows=table.num_embeddings,
        record_bytes=group.record_bytes,
        rows_touched=len(lookups),
        lookups=int(lookups.sum()),
        unique_rows=unique_rows,
        hottest_share=float(descending[:num_hottest].sum() / max(1, lookups.sum())),
        most_lookups=int(descending[0]) if len(lookups) else 0,
        median_lookups=float(np.median(lookups)) if len(lookups) else 0.0,
    )


def hottest_curve(lookups: I64) -> tuple[Point, ...]:
    """`lookups` [R]: of each row touched."""
    cumulative = np.cumsum(np.sort(lookups)[::-1])
    ranks = np.unique(np.geomspace(1, len(cumulative), CURVE_POINTS).astype(np.int64))
    return tuple(
        Point(x=rank / len(cumulative), share=float(cumulative[rank - 1] / cumulative[-1])) for rank in ranks.tolist()
    )


def reuse_curve(keys: list[list[I64]]) -> tuple[Point, ...]:
    """`keys`: per group and step, distinct. A first use counts as one whose row was never used before."""
    distances = [
        next_use[next_use != NEVER] - position
        for steps in keys
        for position, next_use in enumerate(numbered_rows(steps).next_uses)
    ]
    counts = np.bincount(np.concatenate(distances), minlength=2)
    cumulative, uses = np.cumsum(counts), sum(len(step) for steps in keys for step in steps)
    steps = 2 ** np.arange(len(counts).bit_length())
    return tuple(
        Point(x=float(step), share=float(cumulative[min(step, len(counts) - 1)] / uses)) for step in steps.tolist()
    )


def simulated_caches(
    job: Job, reader: Reader, touched_bytes: int, max_steps: int | None, progress: AnalysisProgress
) -> Iterator[Simulation]:
    """Capacities that hold no whole batch are left out."""
    cache: dict[str, Any] = {"pin": None, "groups": {}}
    results = simulate(
        with_values(job, {"cache": cache}),
        Grid(policies=POLICIES, capacities=[int(share * touched_bytes) for share in CACHE_SHARES]),
        lambda own: schedule(own, reader_for_another_pass(own, reader), max_steps),
        progress=progress,
    )
    yield from (result for result in results if result.skipped is None)


def parts(facts: LogFacts) -> Iterator[Part]:
    yield from summary(facts)
    columns: dict[str, Callable[[TableFacts], str]] = {
        "table": lambda own: own.table,
        "rows": lambda own: f"{own.num_rows:,}",
        "rows\ntouched": lambda own: f"{own.rows_touched:,}",
        "look-ups\nper step": lambda own: f"{own.lookups / facts.steps:,.0f}",
        "distinct\nrows": lambda own: f"{own.unique_rows / facts.steps:,.0f}",
        "KiB\nper step": lambda own: f"{own.unique_rows * own.record_bytes / facts.steps / 2**10:,.1f}",
        f"hottest\n{100 * HOTTEST:g} %": lambda own: percent(own.hottest_share),
        "hottest to\nmedian": lambda own: f"{skew(own):,.0f}",
    }
    yield table_of(facts.tables, columns, left=("table",))


def summary(facts: LogFacts) -> Iterator[str]:
    touched = sum(table.rows_touched for table in facts.tables)
    step_bytes = sum(table.unique_rows * table.record_bytes for table in facts.tables) / facts.steps
    yield (
        f"{facts.steps:,} steps of {facts.batch_size:,} samples look up {touched:,} rows of "
        f"{sum(table.num_rows for table in facts.tables):,}. A step makes {facts.lookups / facts.steps:,.0f} look-ups "
        f"of {facts.unique_rows / facts.steps:,.0f} distinct rows, {human_bytes(step_bytes)}."
    )
    most = max(facts.tables, key=skew)
    yield (
        f"The hottest row of table {most.table} is looked up {most.most_lookups:,} times, {skew(most):,.0f} times as "
        f"often as its median row. The hottest {100 * HOTTEST:g} % of all rows touched get "
        f"{percent(share_at(facts.hottest, HOTTEST))} of the look-ups."
    )
    yield f"All rows with their optimizer state are {human_bytes(facts.total_bytes)}."
    own = [result for result in facts.caches if result.policy == "lookahead"]
    if own:
        hits = ", ".join(f"{human_bytes(float(result.capacity))}: {percent(result.hit_ratio or 0)}" for result in own)
        yield f"Share of a step's distinct rows that a cache already holds, with look-ahead: {hits}."


def skew(table: TableFacts) -> float:
    return table.most_lookups / max(1.0, table.median_lookups)


def share_at(points: Sequence[Point], x: float) -> float:
    """The share of the last point up to `x`."""
    return max((point.share for point in points if point.x <= x), default=points[0].share)


def plot_log(facts: LogFacts, path: Path) -> None:
    """Raises ConfigError if the picture cannot be written."""
    figure = new_figure(INCHES)
    ((bytes_panel, hottest_panel), (reuse_panel, cache_panel)) = figure.subplots(2, 2)
    figure.suptitle("\n".join(summary(facts)), fontsize=8, ha="left", x=0.01)
    draw_bytes(bytes_panel, facts)
    hottest_panel.plot([point.x for point in facts.hottest], [point.share for point in facts.hottest], color=BLUE)
    hottest_panel.set_xscale("log")
    hottest_panel.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    label(hottest_panel, "few rows get most look-ups", "hottest rows, of all rows touched", "share of look-ups")
    reuse_panel.plot([point.x for point in facts.reuse], [point.share for point in facts.reuse], "o-", color=BLUE)
    reuse_panel.set_xscale("log", base=2)
    label(reuse_panel, "rows come back soon", "steps since the row was used", "share of a step's distinct rows")
    draw_caches(cache_panel, facts.caches)
    for panel in (hottest_panel, reuse_panel, cache_panel):
        panel.yaxis.set_major_formatter(PERCENT)
        panel.set_ylim(0, 1.02)
    for panel in (reuse_panel, cache_panel):
        panel.xaxis.set_major_formatter("{x:g}")
    save_plot(figure, path, dpi=160)


def label(panel: Any, title: str, x: str, y: str) -> None:
    panel.set_title(title, fontsize=10)
    panel.set(xlabel=x, ylabel=y)
    dress(panel)


def draw_bytes(panel: Any, facts: LogFacts) -> None:
    """The largest at the top; beyond MOST_TABLES the others share a bar."""
    nbytes = sorted(
        ((table.unique_rows * table.record_bytes / facts.steps, table.table) for table in facts.tables), reverse=True
    )
    shown, others = nbytes[:MOST_TABLES], nbytes[MOST_TABLES:]
    if others:
        shown.append((sum(size for size, _ in others), f"{len(others)} others"))
    names = [name for _, name in shown]
    panel.barh(names, [size / 2**10 for size, _ in shown], color=BLUE)
    panel.invert_yaxis()
    panel.tick_params(axis="y", labelsize=7)
    label(panel, "bytes that a step touches", "KiB of distinct rows per step", "table")


def draw_caches(panel: Any, caches: Sequence[Simulation]) -> None:
    by_policy = sorted(caches, key=lambda result: result.policy)
    for policy, own in groupby(by_policy, key=lambda result: result.policy):
        points = sorted((float(result.capacity) / 2**20, result.hit_ratio or 0.0) for result in own)
        panel.plot(*zip(*points, strict=True), label=LABELS.get(policy, policy), **line_style(policy, "-"))
    if caches:
        panel.set_xscale("log", base=2)
        panel.legend(frameon=False, fontsize=9)
    label(panel, "what a cache holds", "MiB of cache", "distinct rows of a step already on the device")
