"""Counts what the first steps of a run look up: per table, how skewed, how soon again, and what a cache would hold.

    batches of the run --> look-ups of each row       --> share of the hottest rows, skew
                       --> distinct rows of each step --> rows and bytes of a step, steps until a row is used again
    simulate           --> hit ratio of each cache size

Look-ups and distinct rows, summed, are those of `prefetcher simulate` with the same --max-steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rowcast.analysis.profile.hot_rows import Popularity
from rowcast.analysis.progress import AnalysisProgress
from rowcast.analysis.scan.sample import reader_for_another_pass
from rowcast.analysis.scan.steps import NEVER, numbered_rows
from rowcast.analysis.simulate.grid import Grid, with_values
from rowcast.analysis.simulate.results import Simulation
from rowcast.analysis.simulate.simulate import simulate
from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT, GroupSpec, TableSpec, group_specs
from rowcast.prefetcher.readers.reader import Reader, open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError

POLICIES = ("lookahead", "lru")
CACHE_SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the bytes of all rows touched
HOTTEST = 0.01  # share of the touched rows that a table's share is told of
CURVE_POINTS = 60


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


class StepRows:
    """Counts the batches of a run as they pass."""

    def __init__(self, groups: tuple[GroupSpec, ...], limit_bytes: float) -> None:
        self.groups = groups
        self.keys: list[list[I64]] = [[] for _ in groups]  # per group and step, distinct and ascending
        self.popularity = Popularity(groups, limit_bytes)

    def add(self, scheduled: ScheduledBatch) -> None:
        """Raises ConfigError if the batches touch more rows than memory can count."""
        for keys, grouping in zip(self.keys, self.popularity.add(scheduled.batch), strict=True):
            keys.append(grouping.keys)


def log_facts(job: Job, max_steps: int | None, limit_bytes: float, progress: AnalysisProgress) -> LogFacts:
    """Reads the data twice. Raises ConfigError and DataError."""
    groups, reader = group_specs(job), open_reader(job)
    rows, tick = StepRows(groups, limit_bytes), progress.begin("counting look-ups", max_steps)
    for scheduled in schedule(job, reader, max_steps):
        rows.add(scheduled)
        tick()
    if rows.popularity.num_rows == 0:
        raise ConfigError("profile --plot: no batch looks up a row; give a larger --max-steps, or look at data.path")
    tables = tuple(table_facts(rows))
    touched_bytes = sum(table.rows_touched * table.record_bytes for table in tables)
    return LogFacts(
        steps=rows.popularity.num_batches,
        batch_size=job.data.batch_size,
        lookups=sum(table.lookups for table in tables),
        unique_rows=sum(table.unique_rows for table in tables),
        total_bytes=sum(group.num_rows * group.record_bytes for group in groups),
        touched_bytes=touched_bytes,
        hottest=hottest_curve(np.concatenate([counts.totals()[1] for counts in rows.popularity.counts])),
        reuse=reuse_curve(rows.keys),
        tables=tables,
        caches=tuple(simulated_caches(job, reader, touched_bytes, max_steps, progress)),
    )


def table_facts(rows: StepRows) -> Iterator[TableFacts]:
    found = {}
    for group, counts, steps in zip(rows.groups, rows.popularity.counts, rows.keys, strict=True):
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
