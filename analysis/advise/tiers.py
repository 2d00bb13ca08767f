"""Computes, for each store.memory, the rows from the cold tier and the waits for them.

The planner of training runs over the followed rows with both levels, each scaled by their share (see `follow`). What
enters memory and was trained before comes from the cold tier. It is brought there while up to 2 * depth + 2 steps pass,
so the mean over that many consecutive steps counts: a stretch that reads longer than its steps take makes them wait.

Computes a run's traffic at each capacity, with the planner of training over the followed rows.

    real        rows of each step      slots
    followed    their share of them    the same share of the slots (see `follow`)

A count of followed rows, divided by their share, estimates that of all rows. Capacities are 1 or 1.5 times a power of
two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import ceil
from typing import Any

import numpy as np

from rowcast.analysis.advise.read import NUM_PARTS, Observed, part_counts, scaled_slots
from rowcast.analysis.show import AnalysisProgress, Tick
from rowcast.analysis.simulate.grid import with_memory, with_values, without_tier
from rowcast.analysis.simulate.moves import Moves, planned_moves
from rowcast.job.schema import Job
from rowcast.job.stores import StoreWithTier
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.planner.capacity import divide_capacity
from rowcast.prefetcher.planner.horizon import OCCURRENCE_BYTES
from rowcast.prefetcher.planner.planner import RowPlanner, Slots, job_planner
from rowcast.prefetcher.run.sizing import job_levels, sizes
from rowcast.runtime.arrays import F64, I64
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import human_bytes, size_text

# standard errors in a margin: they know nothing of how followed rows share the slots; see docs/log/planner.md
ERRORS = 3
APART = 1.1  # the least factor between the first two capacities


def round_capacities(low: float, high: float) -> list[int]:
    """Numbers of the form 1 or 1.5 times a power of two: those above `low`, up to the first that is at least `high`."""
    sizes = (size for power in count(1) for size in (2**power, 3 * 2 ** (power - 1)))
    found: list[int] = []
    for size in sizes:
        if size > low:
            found.append(size)
            if size >= high:
                break
    return found


def rounded_up(nbytes: float) -> int:
    return round_capacities(ceil(nbytes) - 1, 0)[0]


@dataclass(frozen=True, kw_only=True)
class Moved:
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
    rows, followed = observed.unique_rows.mean(axis=0), observed.followed_rows.mean(axis=0)
    return tuple(
        scaled_slots(n, group.num_rows, share, mean_rows, mean_followed)
        for n, group, share, mean_rows, mean_followed in zip(
            slots, observed.groups, observed.shares, rows.tolist(), followed.tolist(), strict=True
        )
    )


def holds_every_batch(observed: Observed, capacity_bytes: int) -> bool:
    """For the run and for the followed rows, whose share of a batch may by chance exceed their share of the run."""
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


def moved(observed: Observed, job: Job, capacity_bytes: int, tick: Tick) -> Moved:
    """Counts the moves of a run with this capacity, look-ahead, an automatic horizon and a plan for each step. Every
    batch must fit."""
    cache: dict[str, Any] = {"policy": "lookahead", "groups": {}}
    own = with_values(without_tier(job), {"cache": cache, "lookahead": {"horizon": "auto", "bundle": 1}})
    slots = followed_slots(observed, capacity_slots(observed, capacity_bytes))
    planner = job_planner(own, observed.groups, [slots], observed.measured)
    counts, (error, _) = count_moves(observed, planner, tick)
    shares = np.array(observed.shares)
    return Moved(
        fetched=counts.fetched / shares,
        written_back=counts.written_back / shares,
        flushed=counts.flushed / shares,
        fetched_error=error,
        horizon=planner.horizon,
    )


def count_moves(observed: Observed, planner: RowPlanner, tick: Tick) -> tuple[Moves, list[F64]]:
    """Counts the moves of followed rows. Returns also, for the device and for a memory tier, the standard error [G] of
    all rows that come there, estimated from how parts of the followed rows differ."""
    shares, parts = np.array(observed.shares), np.zeros((2, len(observed.groups), NUM_PARTS), np.int64)

    def watch(position: int, entered: Sequence[Sequence[I64]]) -> None:
        for level, of_groups in enumerate(entered):
            parts[level] += [part_counts(keys) for keys in of_groups]

    moves = planned_moves(observed.scan, planner, tick, watch)
    return moves, [np.sqrt(NUM_PARTS * own.var(axis=1, ddof=1) * (1 - shares)) / shares for own in parts]


def stretches(values: F64, length: int) -> F64:
    """Returns the mean of each `length` consecutive values, or of all values if there are fewer."""
    length = min(length, len(values))
    return np.convolve(values, np.full(length, 1 / length), mode="valid")


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
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
        self._known: dict[int, Moved] = {}
        self.smallest = smallest_capacity(observed)
        touched = sum(
            rows * group.record_bytes for rows, group in zip(observed.distinct_rows, observed.groups, strict=True)
        )
        self.capacities = [self.smallest, *round_capacities(APART * self.smallest, max(touched, self.smallest))]

    def moved(self, capacity_bytes: int) -> Moved:
        if capacity_bytes not in self._known:
            self._known[capacity_bytes] = self.moved_with(capacity_bytes, self._job)
        return self._known[capacity_bytes]

    def traffic(self, capacity_bytes: int) -> Traffic:
        return traffic(self._observed, self.moved(capacity_bytes))

    def fetched_bytes(self, capacity_bytes: int) -> float:
        return float((self.moved(capacity_bytes).fetched @ self._observed.record_bytes).sum())

    def moved_with(self, capacity_bytes: int, job: Job) -> Moved:
        tick = self._progress.begin(f"a cache of {human_bytes(capacity_bytes)}", len(self._observed))
        return moved(self._observed, job, capacity_bytes, tick)


def traffic(observed: Observed, moves: Moved) -> Traffic:
    fetched, written = (values.sum(axis=0) for values in (moves.fetched, moves.written_back))
    unique, total, steps = float(observed.unique_rows.sum()), float(fetched.sum()), len(observed)
    return Traffic(
        rows_fetched=round(total),
        rows_flushed=round(float(moves.flushed.sum())),
        rows_fetched_per_step=total / steps,
        rows_written_back_per_step=float(written.sum()) / steps,
        bytes_fetched_per_step=float(fetched @ observed.record_bytes) / steps,
        bytes_written_back_per_step=float(written @ observed.record_bytes) / steps,
        hit_ratio=1 - total / unique if unique else None,
        margin=ERRORS * float(np.sqrt((moves.fetched_error**2).sum())) / total if total else 0.0,
    )


MOST_WAITING = 0.01  # the largest share of the time that steps may wait with the memory that is recommended
MOST_BUDGETS = 12
LEAST_MEMORY = 2**20
COLD_ROWS_S = 50_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    memory: str  # store.memory
    memory_rows: int  # that it holds, of all groups
    rows_entered_per_step: float  # memory, from anywhere
    rows_from_cold_per_step: float
    rows_from_cold: int  # by the whole run
    margin: float  # three standard errors of the rows from the cold tier, relative
    cold_share: float  # how much of the cold tier's rate steps of the assumed time use
    waits: float  # share of the time for which steps wait for the cold tier


@dataclass(frozen=True, kw_only=True, slots=True)
class TierAdvice:
    kind: str  # store.kind
    cold_rows_s: float  # that the cold tier reads, given or assumed
    cold_rows_given: bool
    budgets: tuple[Budget, ...]  # ascending
    recommended: Budget | None  # the smallest that waits for less than MOST_WAITING; None: none of them


class TierTrials:
    """Tries sizes of store.memory at one capacity of the device."""

    def __init__(
        self, observed: Observed, job: Job, capacity_bytes: int, progress: AnalysisProgress, step_s: float
    ) -> None:
        self._observed, self._progress, self._step_s = observed, progress, step_s
        values = {"cache": {"capacity": capacity_bytes, "policy": "lookahead", "groups": {}}}
        self._job = with_values(job, {**values, "lookahead": {"horizon": "auto"}})
        self._slots = capacity_slots(observed, capacity_bytes)

    def advice(self, cold_rows_s: float | None, memory_bytes: float) -> TierAdvice:
        """`cold_rows_s`: None: COLD_ROWS_S. `memory_bytes`: no larger memory is tried, unless it is the smallest that
        works."""
        rate = cold_rows_s or COLD_ROWS_S
        budgets = tuple(self._budget(memory, rate) for memory in self._memories(memory_bytes))
        enough = (budget for budget in budgets if budget.waits < MOST_WAITING)
        return TierAdvice(
            kind=self._job.store.kind,
            cold_rows_s=rate,
            cold_rows_given=cold_rows_s is not None,
            budgets=budgets,
            recommended=next(enough, None),
        )

    def _memories(self, most: float) -> list[str | int]:
        """Returns sizes to try, ascending: from the smallest that works to one for all touched rows, and the job's."""
        store = self._job.store
        assert isinstance(store, StoreWithTier)
        own = store.memory
        if store.memory_rows is not None:
            return [own]
        tried = []
        for nbytes in round_capacities(LEAST_MEMORY, max(most, parse_bytes(own))):
            slots = self._tier_slots(nbytes)
            if slots is not None:
                tried.append(nbytes)
                if all(n >= rows for n, rows in zip(slots, self._observed.distinct_rows, strict=True)):
                    break
        if self._tier_slots(parse_bytes(own)) is not None:
            tried.append(parse_bytes(own))
        return [size_text(nbytes) for nbytes in sorted(set(tried))[:MOST_BUDGETS]]

    def _tier_slots(self, memory: str | int) -> Slots | None:
        """The rows of each group that this memory holds; None if it is too small for a run."""
        job, own = with_memory(self._job, memory), self._observed
        rings = partial(sizes, job, own.groups, own.measured, job.lookahead.depth, own.rank)
        try:
            return job_levels(job, own.groups, own.touched, self._slots, rings)[1]
        except ConfigError:
            return None

    def _budget(self, memory: str | int, cold_rows_s: float) -> Budget:
        observed, slots = self._observed, self._tier_slots(memory)
        assert slots is not None, f"a memory of {memory} was tried although it does not work"
        entered, from_cold, error = self._moved(with_memory(self._job, memory), slots)
        total = float(from_cold.sum())
        share, waits = self.use(from_cold.sum(axis=1) / cold_rows_s)
        return Budget(
            memory=str(memory),
            memory_rows=sum(slots),
            rows_entered_per_step=float(entered.sum()) / len(observed),
            rows_from_cold_per_step=total / len(observed),
            rows_from_cold=round(total),
            margin=ERRORS * float(np.sqrt((error**2).sum())) / total if total else 0.0,
            cold_share=share,
            waits=waits,
        )

    def use(self, seconds: F64) -> tuple[float, float]:
        """`seconds`: [P] that the cold tier is busy for each step. Returns its share of the steps' time, and the share
        of the time for which steps wait."""
        stretch_s = stretches(seconds, 2 * self._job.lookahead.depth + 2)
        waits_s = np.maximum(0.0, stretch_s - self._step_s)
        return float(stretch_s.mean()) / self._step_s, float(waits_s.mean() / (waits_s.mean() + self._step_s))

    def _moved(self, job: Job, tier_slots: Slots) -> tuple[F64, F64, F64]:
        """Returns estimates for all rows: those that enter memory [P, G], of these from the cold tier [P, G], and their
        standard error [G]."""
        observed, shares = self._observed, np.array(self._observed.shares)
        slots, tier = (followed_slots(observed, own) for own in (self._slots, tier_slots))
        tier = tuple(map(max, slots, tier))  # by chance, or where the device holds as many rows
        planner = job_planner(self._thinned(job), observed.groups, [slots, tier], observed.measured)
        assert isinstance(job.store, StoreWithTier)
        tick = self._progress.begin(f"{job.store.kind}, memory {job.store.memory}", len(observed))
        moves, (_, error) = count_moves(observed, planner, tick)
        assert moves.tier is not None, "two levels were planned"
        return moves.tier.entered / shares, moves.tier.from_cold / shares, error

    def _thinned(self, job: Job) -> Job:
        """Returns the job with a plan for each step and a smaller budget for ids: the lower level counts only followed
        rows."""
        observed = self._observed
        all_rows, followed = (
            observed.id_bytes + OCCURRENCE_BYTES * float(rows.sum(axis=1).mean())
            for rows in (observed.unique_rows, observed.followed_rows)
        )
        share = followed / all_rows
        id_bytes = int(share * parse_bytes(job.lookahead.id_bytes))
        return with_values(job, {"lookahead": {"id_bytes": id_bytes, "bundle": 1}})
