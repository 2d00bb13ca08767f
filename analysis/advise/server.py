"""Measures how long Redis servers take to read a row, write it and delete its old copy, as in a run.

Rows of a trial are written beside those of any run and deleted again. The calls are those of the staging thread: one
after the other, each with as many rows as a run brings at once.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.stores.cold.cold_rows import ColdRows
from rowcast.prefetcher.stores.redis_store import trial_rows
from rowcast.prefetcher.stores.tiered_store import AT_ONCE_BYTES
from rowcast.runtime.errors import RowcastError

MOST_SECONDS = 1.5  # for all groups
MOST_ROWS = 10_000  # a call
ROUND_TRIPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRate:
    servers: tuple[str, ...]
    rows_a_call: int
    row_us: tuple[float, ...] | None  # of each group, per row read and written; None: `why_not` has the reason
    round_trip_ms: float | None = None  # what a call for one row takes
    why_not: str | None = None


def server_rate(job: Job, groups: Sequence[GroupSpec]) -> ServerRate:
    """Measures for less than 3 s."""
    row_us: list[float] = []
    servers: tuple[str, ...] = ()
    trip_ms, count = 0.0, 0
    try:
        for group in groups:
            with trial_rows(job, group) as rows:
                servers = tuple(rows.server_names)
                count = min(MOST_ROWS, max(1, AT_ONCE_BYTES // group.record_bytes))
                row_us.append(1e6 / count * median_call_s(rows, group, count, MOST_SECONDS / len(groups)))
                trip_ms = 1e3 * statistics.median(call_s(rows, group, 1)[0] for _ in range(ROUND_TRIPS))
    except RowcastError as error:
        return ServerRate(servers=servers, rows_a_call=count, row_us=None, why_not=str(error))
    return ServerRate(servers=servers, rows_a_call=count, row_us=tuple(row_us), round_trip_ms=trip_ms)


def median_call_s(rows: ColdRows, group: GroupSpec, count: int, seconds: float) -> float:
    """The median time of one call, over reads, writes and deletions of `count` rows."""
    found: list[float] = []
    end_s = time.perf_counter() + seconds
    while not found or time.perf_counter() < end_s:
        found.append(sum(call_s(rows, group, count)))
    return statistics.median(found)


def call_s(rows: ColdRows, group: GroupSpec, count: int) -> tuple[float, float]:
    """Returns the seconds of a read, and of a write and the deletion of the old copies."""
    keys = np.arange(count, dtype=np.int64)
    records = np.random.default_rng(0).integers(0, 256, (count, group.record_bytes), np.uint8)
    began_s = time.perf_counter()
    places = rows.write(keys, records)
    middle_s = time.perf_counter()
    rows.read(keys, places, records)
    read_s = time.perf_counter() - middle_s
    rows.free(keys, places)
    rows.tidy()
    return read_s, time.perf_counter() - began_s - read_s
