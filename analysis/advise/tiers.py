"""Computes, for each store.memory, the rows from the cold tier and the waits for them.

The planner of training runs over the followed rows with both levels, each scaled by their share (see `follow`). What
enters memory and was trained before comes from the cold tier. It is brought there while up to 2 * depth + 2 steps pass,
so the mean over that many consecutive steps counts: a stretch that reads longer than its steps take makes them wait.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from rowcast.analysis.advise.cold_rates import DiskRate, ServerRate
from rowcast.analysis.advise.cost import stretches
from rowcast.analysis.advise.curve import ERRORS, capacity_slots, count_moves, followed_slots, round_capacities
from rowcast.analysis.advise.read import Observed
from rowcast.analysis.show import AnalysisProgress
from rowcast.analysis.simulate.grid import with_memory, with_values
from rowcast.job.schema import Job
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import GroupSpec
from rowcast.job.units import parse_bytes
from rowcast.prefetcher.planner.horizon import OCCURRENCE_BYTES
from rowcast.prefetcher.planner.planner import Slots, job_planner
from rowcast.prefetcher.run.sizing import job_levels, sizes
from rowcast.prefetcher.stores.cold.page_loops import page_layout
from rowcast.runtime.arrays import F64
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import size_text

MOST_WAITING = 0.01  # the largest share of the time that steps may wait with the memory that is recommended
MOST_BUDGETS = 12
LEAST_MEMORY = 2**20
READ_BYTES = 4096  # what the disk was measured with
Rate = DiskRate | ServerRate | None  # the cold tier's; None if it could not be measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    memory: str  # store.memory
    memory_rows: int  # that it holds, of all groups
    rows_entered_per_step: float  # memory, from anywhere
    rows_from_cold_per_step: float
    rows_from_cold: int  # by the whole run
    margin: float  # three standard errors of the rows from the cold tier, relative
    disk_share: float | None  # how much of the disk's or servers' rate steps of the assumed time use; None: unmeasured
    waits: float | None  # share of the time for which steps wait for the disk or the servers


@dataclass(frozen=True, kw_only=True, slots=True)
class TierAdvice:
    kind: str  # store.kind
    disk: DiskRate | None  # None: the cold tier is no disk of this machine
    server: ServerRate | None  # None: the cold tier is no server
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

    def advice(self, rate: Rate, memory_bytes: float) -> TierAdvice:
        """`memory_bytes`: no larger memory is tried, unless it is the smallest that works."""
        budgets = tuple(self._budget(memory, rate) for memory in self._memories(memory_bytes))
        enough = (budget for budget in budgets if budget.waits is not None and budget.waits < MOST_WAITING)
        return TierAdvice(
            kind=self._job.store.kind,
            disk=rate if isinstance(rate, DiskRate) else None,
            server=rate if isinstance(rate, ServerRate) else None,
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

    def _budget(self, memory: str | int, rate: Rate) -> Budget:
        observed, slots = self._observed, self._tier_slots(memory)
        assert slots is not None, f"a memory of {memory} was tried although it does not work"
        entered, from_cold, error = self._moved(with_memory(self._job, memory), slots)
        total = float(from_cold.sum())
        share, waits = None, None
        row_s = seconds_a_row(rate, observed.groups)
        if row_s is not None:
            share, waits = self.use(from_cold @ row_s)
        return Budget(
            memory=str(memory),
            memory_rows=sum(slots),
            rows_entered_per_step=float(entered.sum()) / len(observed),
            rows_from_cold_per_step=total / len(observed),
            rows_from_cold=round(total),
            margin=ERRORS * float(np.sqrt((error**2).sum())) / total if total else 0.0,
            disk_share=share,
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


def seconds_a_row(rate: Rate, groups: tuple[GroupSpec, ...]) -> F64 | None:
    """Returns the seconds for a row of each group, [G]; None if they were not measured."""
    match rate:
        case DiskRate(pages_s=float(pages_s)):
            reads = [page_layout(group.record_bytes).nbytes // READ_BYTES for group in groups]
            return np.array(reads) / pages_s
        case ServerRate(row_us=tuple(row_us)):
            return np.array(row_us) / 1e6
    return None
