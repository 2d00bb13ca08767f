"""Implements `prefetcher estimate --run`: walks a recorded run, as it was and with changes."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import typer

from rowcast.analysis.estimate.pipeline import Durations, Pipeline, Planned, Wiring
from rowcast.analysis.estimate.planned import plan_job
from rowcast.analysis.estimate.recorded import RecordedRun, recorded_run
from rowcast.analysis.estimate.schedule import critical_path, run, waits
from rowcast.analysis.timeline.recording import read_pairs
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError

START_SHARE = 4  # the first quarter of the steps fills the cache; the rate is that of the others
LAST_STEPS = 4  # at the end nothing is left to do ahead
NAMED = 3  # tasks of the critical path in the report
OFTEN = 0.05  # least times per step, or fraction of the time, in the report
LIMITS = {"ahead", "barrier", "checkpoint", "credit", "queue", "ring", "staging", "write_back"}
WHOSE = {"planning": "planner", "fetcher": "fetcher", "main": "trainer"}  # thread -> process in the report
CHANGEABLE = (
    "decode",
    "read",
    "plan",
    "fetch",
    "send",
    "copy in",
    "fill",
    "exchange",
    "step",
    "copy out",
    "write back",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Walked:
    step_s: float  # seconds per step, once the cache is full
    run_s: float  # from the first batch to the end of the last checkpoint
    bound_by: list[tuple[str, float]]  # tasks of the critical path of steady steps, and their fraction of it
    through: list[tuple[str, float]]  # what holds back earlier work there: its word as a stall, times a step
    waits: dict[str, float]  # "trainer: rows" -> share of the time of steady steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
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
        return max(0.0, min(ended_s, self.ended_s) - max(began_s, self.began_s)) / max(
            1e-12, self.ended_s - self.began_s
        )


def walk_recorded(job: Job, run_dir: Path, changes: Sequence[str], *, max_steps: int | None = None) -> None:
    """`changes`: such as "step=0.1", the time of a task in terms of the recorded one. Raises ConfigError, DataError."""
    factors = [parse_change(change) for change in changes]
    recorded = recorded_run(read_pairs(run_dir)[0])
    plan, wiring = plan_job(job, max_steps)
    check_steps(plan, recorded, run_dir)
    measured = steady(recorded.ended).step_s
    again = walk(plan, wiring, recorded, recorded.begins)
    typer.echo(f"{run_dir}: {len(plan)} steps, {1e3 * measured:.1f} ms a step")
    typer.echo(
        f"walked again: {1e3 * again.step_s:.1f} ms a step ({again.step_s / measured - 1:+.1%}), bound by "
        f"{described(again)}"
    )
    told = [f"{name} {share:.0%}" for name, share in again.waits.items() if share >= OFTEN]
    typer.echo(f"  waits: {', '.join(told) or 'none'}")
    for change, factor in zip(changes, factors, strict=True):
        found = walk(plan, wiring, Scaled(recorded, dict([factor])), recorded.begins)
        typer.echo(
            f"with {change}: {1e3 * found.step_s:.1f} ms a step ({again.step_s / found.step_s:.2f} times as fast), "
            f"bound by {described(found)}"
        )


def check_steps(plan: Sequence[Planned], recorded: RecordedRun, run_dir: Path) -> None:
    """Raises ConfigError if the plan is not that of the run."""
    if len(plan) != len(recorded.ended):
        raise ConfigError(
            f"the job has {len(plan)} steps, but {run_dir} recorded {len(recorded.ended)}; give the job file of that "
            "run, and its --max-steps"
        )


def parse_change(change: str) -> tuple[str, float]:
    match = re.fullmatch(r"([a-z ]+)=([0-9.]+)", change)
    if match is None or match[1] not in CHANGEABLE:
        raise ConfigError(f"--change {change}: give one of {', '.join(CHANGEABLE)}, and a factor, such as step=0.1")
    return match[1], float(match[2])


@dataclass(frozen=True, slots=True)
class Scaled:
    """Implements `pipeline.Durations`: some tasks take longer or shorter."""

    durations: Durations
    factors: dict[str, float]

    def __call__(self, name: str, step: int, pieces: int = 1) -> float:
        return self.durations(name, step, pieces) * self.factors.get(name, 1.0)


def walk(
    plan: Sequence[Planned], wiring: Wiring, durations: Durations, begins: dict[str, float], cores: float = math.inf
) -> Walked:
    pipeline = Pipeline(plan, wiring, durations, begins)
    run_s = run(pipeline.threads, cores)
    found = steady([task.ended_s for task in pipeline.done])
    shares, limits = defaultdict[str, float](float), defaultdict[str, float](float)
    path = critical_path(pipeline.done[found.last])
    for task, _ in path:
        shares[task.name] += found.share(task.began_s, task.ended_s)
    for (task, reason), (held, _) in pairwise(path):
        # where news of it comes first, it is what waits for the news that is held back
        if reason in LIMITS and held.name != "deliver" and task.ended_s > found.began_s:
            limits[reason] += 1 / (found.last - found.first)
    waited: dict[str, float] = defaultdict(float)
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
    """`ended`: when each step was done, in seconds."""
    first = len(ended) // START_SHARE
    last = max(first + 1, len(ended) - 1 - LAST_STEPS)
    if last >= len(ended):
        raise ConfigError(f"{len(ended)} steps are too few to tell a rate; record a longer run")
    return Steady(first=first, last=last, began_s=ended[first], ended_s=ended[last])


def described(walked: Walked) -> str:
    tasks = ", ".join(f"{name} {share:.0%}" for name, share in walked.bound_by)
    through = ", ".join(f"{reason} {times:.1f}" for reason, times in walked.through)
    return f"{tasks}; limited by {through} times a step" if through else tasks
