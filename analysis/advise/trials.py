"""Capacities tried: what each moves under look-ahead and under LRU. Nothing is tried twice."""

from dataclasses import replace

import numpy as np

from rowcast.analysis.advise.advice import Traffic
from rowcast.analysis.advise.choice import round_capacities
from rowcast.analysis.advise.curve import F64, Compared, Moved, moved, smallest_capacity
from rowcast.analysis.advise.observed import Observed
from rowcast.analysis.progress import Progress
from rowcast.job.schema import Job
from rowcast.runtime.telemetry.format_numbers import human_bytes

# standard errors in a margin: they know nothing of how followed rows share the slots; see docs/experiments.md
ERRORS = 3
APART = 1.1  # the least factor between the first two capacities


class Trials:
    def __init__(self, observed: Observed, job: Job, progress: Progress) -> None:
        self._observed, self._job, self._progress = observed, job, progress
        self._known: dict[tuple[int, Compared], Moved] = {}
        self.smallest = smallest_capacity(observed)
        touched = sum(
            rows * group.record_bytes for rows, group in zip(observed.distinct_rows, observed.groups, strict=True)
        )
        self.capacities = [self.smallest, *round_capacities(APART * self.smallest, max(touched, self.smallest))]

    def moved(self, capacity_bytes: int, policy: Compared = "lookahead") -> Moved:
        key = capacity_bytes, policy
        if key not in self._known:
            self._known[key] = self._try(self._observed, self._job, capacity_bytes, policy)
        return self._known[key]

    def traffic(self, capacity_bytes: int, policy: Compared) -> Traffic:
        return traffic(self._observed, self.moved(capacity_bytes, policy))

    def fetched_bytes(self, capacity_bytes: int) -> float:
        return float((counted(self._observed, self.moved(capacity_bytes).fetched) @ self._observed.record_bytes).sum())

    def shorter_rows_per_step(self, capacity_bytes: int) -> float:
        """Rows fetched, had only the steps that count been read, of which again the second half would count."""
        steps = self._observed.steps[-self._observed.num_counted :]
        shorter = replace(self._observed, steps=steps, num_counted=-(-len(steps) // 2))
        return traffic(shorter, self._try(shorter, self._job, capacity_bytes, "lookahead")).rows_fetched_per_step

    def fetched_with(self, capacity_bytes: int, job: Job) -> float:
        """Rows fetched under another job's look-ahead, by the steps that count."""
        return float(counted(self._observed, self._try(self._observed, job, capacity_bytes, "lookahead").fetched).sum())

    def _try(self, observed: Observed, job: Job, capacity_bytes: int, policy: Compared) -> Moved:
        tick = self._progress.begin(f"{policy}, {human_bytes(capacity_bytes)}", len(observed))
        return moved(observed, job, capacity_bytes, policy, tick)


def counted(observed: Observed, values: F64) -> F64:
    """The steps that count."""
    return values[len(observed) - observed.num_counted :]


def traffic(observed: Observed, moves: Moved) -> Traffic:
    fetched, written = (counted(observed, values).sum(axis=0) for values in (moves.fetched, moves.written_back))
    unique = float(observed.unique_rows[len(observed) - observed.num_counted :].sum())
    total, steps = float(fetched.sum()), observed.num_counted
    return Traffic(
        rows_fetched=round(total) if observed.is_whole_run else None,
        rows_flushed=round(float(moves.flushed.sum())) if observed.is_whole_run else None,
        rows_fetched_per_step=total / steps,
        rows_written_back_per_step=float(written.sum()) / steps,
        bytes_fetched_per_step=float(fetched @ observed.record_bytes) / steps,
        bytes_written_back_per_step=float(written @ observed.record_bytes) / steps,
        hit_ratio=1 - total / unique if unique else None,
        margin=ERRORS * float(np.sqrt((moves.fetched_error**2).sum())) / total if total else 0.0,
    )
