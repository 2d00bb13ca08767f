"""Walks a pipeline: how long a step takes, what bounds it, and what each process waits for."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from rowcast.analysis.estimate.pipeline import Durations, Pipeline, Planned, Wiring, critical_path, run, waits
from rowcast.runtime.errors import ConfigError

START_SHARE = 4  # the first quarter of the steps fills the cache; the rate is that of the others
LAST_STEPS = 4  # at the end nothing is left to do ahead
NAMED = 3  # tasks of the critical path in the report
OFTEN = 0.05  # least times per step, or fraction of the time, in the report
LIMITS = {"ahead", "barrier", "checkpoint", "credit", "queue", "ring", "staging", "write_back"}
WHOSE = {"planning": "planner", "fetcher": "fetcher", "main": "trainer"}  # thread -> process in the report


@dataclass(frozen=True, kw_only=True, slots=True)
class Walked:
    step_s: float  # seconds per step, once the cache is full
    run_s: float  # from the first batch to the end of the last checkpoint
    bound_by: list[tuple[str, float]]  # tasks of the critical path of steady steps, and their fraction of it
    through: list[tuple[str, float]]  # what holds back earlier work there: its word as a stall, times a step
    waits: dict[str, float]  # "trainer: rows" -> share of the time of steady steps


class Steady(NamedTuple):
    """The steps that tell a rate: without the first quarter and the last few."""

    first: int
    last: int
    began_s: float  # the end of the first one
    ended_s: float

    @property
    def step_s(self) -> float:
        return (self.ended_s - self.began_s) / (self.last - self.first)

    def share(self, began_s: float, ended_s: float) -> float:
        """Returns how much of its time is between two moments."""
        within_s = max(0.0, min(ended_s, self.ended_s) - max(began_s, self.began_s))
        return within_s / max(1e-12, self.ended_s - self.began_s)


def walk(
    plan: Sequence[Planned], wiring: Wiring, durations: Durations, begins: dict[str, float], cores: float = math.inf
) -> Walked:
    pipeline = Pipeline(plan, wiring, durations, begins)
    run_s = run(pipeline.threads, cores)
    found = steady([task.ended_s for task in pipeline.done])
    shares, limits, waited = (defaultdict[str, float](float) for _ in range(3))
    path = critical_path(pipeline.done[found.last])
    for task, _ in path:
        shares[task.name] += found.share(task.began_s, task.ended_s)
    for (task, reason), (held, _) in pairwise(path):
        # where news of it comes first, it is what waits for the news that is held back
        if reason in LIMITS and held.name != "deliver" and task.ended_s > found.began_s:
            limits[reason] += 1 / (found.last - found.first)
    for thread in pipeline.threads:
        for reason, began_s, ended_s in waits(thread) if thread.name in WHOSE else ():
            waited[f"{WHOSE[thread.name]}: {reason}"] += found.share(began_s, ended_s)
    return Walked(
        step_s=found.step_s,
        run_s=run_s,
        bound_by=ordered(shares)[:NAMED],
        through=[(reason, times) for reason, times in ordered(limits) if times >= OFTEN],
        waits={name: share for name, share in ordered(waited) if share > 0},
    )


def ordered(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda item: -item[1])


def steady(ended: Sequence[float]) -> Steady:
    """`ended`: when each step was done, in seconds. Raises ConfigError."""
    first = len(ended) // START_SHARE
    last = max(first + 1, len(ended) - 1 - LAST_STEPS)
    if last >= len(ended):
        raise ConfigError(f"{len(ended)} steps are too few to tell a rate; record a longer run")
    return Steady(first, last, ended[first], ended[last])


def described(walked: Walked) -> str:
    tasks = ", ".join(f"{name} {share:.0%}" for name, share in walked.bound_by)
    through = ", ".join(f"{reason} {times:.1f}" for reason, times in walked.through)
    return f"{tasks}; limited by {through} times a step" if through else tasks
