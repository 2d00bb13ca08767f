"""Computes a run's traffic at each capacity, with the planner of training over the followed rows.

    real        rows of each step      slots
    followed    their share of them    the same share of the slots (see `follow`)

A count of followed rows, divided by their share, estimates that of all rows. Capacities are 1 or 1.5 times a power of
two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import Any

import numpy as np

from rowcast.analysis.advise.read import NUM_PARTS, Observed, part_counts
from rowcast.analysis.show import AnalysisProgress, Tick
from rowcast.analysis.simulate.moves import planned_moves
from rowcast.analysis.simulate.simulate import without_tier
from rowcast.job.file import with_values
from rowcast.job.schema import Job
from rowcast.prefetcher.planner.first_batches import divide_capacity
from rowcast.prefetcher.planner.planner import Slots, job_planner
from rowcast.runtime.arrays import F64, I64
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import human_bytes

# standard errors in a margin: they know nothing of how followed rows share the slots; see docs/log/planner.md
ERRORS = 3
APART = 1.1  # the least factor between the first two capacities


def round_capacities(low: float, high: float) -> list[int]:
    """Numbers of the form 1 or 1.5 times a power of two: those above `low`, up to the first that is at least `high`."""
    sizes = (size for power in count(1) for size in (2**power, 3 * 2 ** (power - 1)))
    capacities: list[int] = []
    for size in sizes:
        if size > low:
            capacities.append(size)
            if size >= high:
                break
    return capacities


def rounded_up(nbytes: float) -> int:
    return round_capacities(ceil(nbytes) - 1, 0)[0]


@dataclass(frozen=True, kw_only=True)
class EstimatedMoves:
    """Estimated counts of all rows, not only followed ones, by step and group."""

    fetched: F64  # [P, G]
    written_back: F64  # [P, G] dirty victims
    flushed: F64  # [G] by the barrier at the end
    fetched_error: F64  # [G] standard error of all rows fetched, estimated from how parts of the followed rows differ
    horizon: int  # batches known ahead at the end


def capacity_slots(observed: Observed, capacity_bytes: int) -> Slots:
    """Slots per group, as in a run. Raises ConfigError."""
    return divide_capacity(observed.groups, observed.touched, capacity_bytes=capacity_bytes)


def followed_slots(observed: Observed, slots: Slots) -> Slots:
    """Returns the share of each group's slots, and by how many its followed rows of a step exceed their share on
    average."""
    shares = np.array(observed.shares)
    scaled = shares * slots + observed.followed_rows.mean(axis=0) - shares * observed.unique_rows.mean(axis=0)
    whole = (shares >= 1) | np.array([n >= group.num_rows for n, group in zip(slots, observed.groups, strict=True)])
    return tuple(np.where(whole, slots, np.round(scaled)).astype(np.int64).tolist())


def holds_every_batch(observed: Observed, capacity_bytes: int) -> bool:
    """Checks the run and the followed rows, whose share of a batch may by chance exceed their share of the run."""
    try:
        slots = capacity_slots(observed, capacity_bytes)
    except ConfigError:
        return False
    largest_followed = observed.followed_rows.max(axis=0).tolist()
    return all(have >= need for have, need in zip(slots, observed.largest_batch_rows, strict=True)) and all(
        have >= need for have, need in zip(followed_slots(observed, slots), largest_followed, strict=True)
    )


def smallest_capacity(observed: Observed) -> int:
    """Returns the smallest capacity that every batch fits and that this sample can estimate, in bytes."""
    low, high = 0, sum(group.num_rows * group.record_bytes for group in observed.groups)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds_every_batch(observed, middle) else (middle, high)
    return high


def moved(observed: Observed, job: Job, capacity_bytes: int, tick: Tick) -> EstimatedMoves:
    """Counts the moves of a run with this capacity, look-ahead, an automatic horizon and a plan for each step. Every
    batch must fit."""
    cache: dict[str, Any] = {"policy": "lookahead", "groups": {}}
    simulated = with_values(without_tier(job), {"cache": cache, "lookahead": {"horizon": "auto", "bundle": 1}})
    slots = followed_slots(observed, capacity_slots(observed, capacity_bytes))
    planner = job_planner(simulated, observed.groups, [slots], observed.measured)
    shares, parts = np.array(observed.shares), np.zeros((len(observed.groups), NUM_PARTS), np.int64)

    def watch(entered: Sequence[I64]) -> None:
        parts[:] += [part_counts(keys) for keys in entered]

    counts = planned_moves(observed.scan, planner, tick, watch)
    return EstimatedMoves(
        fetched=counts.fetched / shares,
        written_back=counts.written_back / shares,
        flushed=counts.flushed / shares,
        fetched_error=np.sqrt(NUM_PARTS * parts.var(axis=1, ddof=1) * (1 - shares)) / shares,
        horizon=planner.horizon,
    )


def stretches(values: F64, length: int) -> F64:
    """Returns the mean of each `length` consecutive values, or of all values if there are fewer."""
    length = min(length, len(values))
    return np.convolve(values, np.full(length, 1 / length), mode="valid")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTraffic:
    """An estimate, unless every row was followed."""

    rows_fetched: int  # by the whole run, as in its report
    rows_flushed: int  # by the barrier at the end
    rows_fetched_per_step: float
    rows_written_back_per_step: float  # victims that were trained
    bytes_fetched_per_step: float
    bytes_written_back_per_step: float
    hit_ratio: float | None  # None without look-ups
    margin: float  # three standard errors of the rows fetched, relative


class Trials:
    def __init__(self, observed: Observed, job: Job, progress: AnalysisProgress) -> None:
        self._observed, self._job, self._progress = observed, job, progress
        self._known: dict[int, EstimatedMoves] = {}
        self.smallest = smallest_capacity(observed)
        touched = sum(
            rows * group.record_bytes for rows, group in zip(observed.distinct_rows, observed.groups, strict=True)
        )
        self.capacities = [self.smallest, *round_capacities(APART * self.smallest, max(touched, self.smallest))]

    def moved(self, capacity_bytes: int) -> EstimatedMoves:
        if capacity_bytes not in self._known:
            self._known[capacity_bytes] = self.moved_with(capacity_bytes, self._job)
        return self._known[capacity_bytes]

    def traffic(self, capacity_bytes: int) -> RowTraffic:
        observed, moves = self._observed, self.moved(capacity_bytes)
        fetched, written = (values.sum(axis=0) for values in (moves.fetched, moves.written_back))
        unique, total, steps = float(observed.unique_rows.sum()), float(fetched.sum()), len(observed)
        return RowTraffic(
            rows_fetched=round(total),
            rows_flushed=round(float(moves.flushed.sum())),
            rows_fetched_per_step=total / steps,
            rows_written_back_per_step=float(written.sum()) / steps,
            bytes_fetched_per_step=float(fetched @ observed.record_bytes) / steps,
            bytes_written_back_per_step=float(written @ observed.record_bytes) / steps,
            hit_ratio=1 - total / unique if unique else None,
            margin=ERRORS * float(np.sqrt((moves.fetched_error**2).sum())) / total if total else 0.0,
        )

    def fetched_bytes(self, capacity_bytes: int) -> float:
        return float((self.moved(capacity_bytes).fetched @ self._observed.record_bytes).sum())

    def moved_with(self, capacity_bytes: int, job: Job) -> EstimatedMoves:
        tick = self._progress.begin(f"a cache of {human_bytes(capacity_bytes)}", len(self._observed))
        return moved(self._observed, job, capacity_bytes, tick)
