"""`prefetcher predict --run`: walks a recorded run again, as it was and with what would be different."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from rowcast.analysis.predict.pipeline import Durations, Pipeline, Planned, Wiring
from rowcast.analysis.predict.planned import plan_job
from rowcast.analysis.predict.recorded import recorded_run
from rowcast.analysis.predict.schedule import critical_path, run
from rowcast.analysis.timeline.recording import read_run
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError

START_SHARE = 4  # the first quarter of the steps fills the cache; the rate is that of the others
LAST_STEPS = 4  # at the end nothing is left to do ahead
NAMED = 3  # tasks of the critical path that are told
CHANGEABLE = ("decode", "read", "plan", "fetch", "send", "copy in", "fill", "step", "copy out", "write back")


@dataclass(frozen=True, kw_only=True, slots=True)
class Walked:
    step_s: float  # what a step takes, once the cache is full
    run_s: float  # from the first batch to the end of the last checkpoint
    bound_by: list[tuple[str, float]]  # tasks of the critical path of steady steps, and their share of it


def walk_recorded(job: Job, run_dir: Path, changes: Sequence[str], *, max_steps: int | None = None) -> None:
    """`changes`: such as "step=0.1", the time of a task in terms of the recorded one. Raises ConfigError, DataError."""
    if job.ranks.num_parts > 1:
        raise ConfigError(
            f"ranks.parts = {job.ranks.num_parts}: only runs of one trainer and one part are walked again"
        )
    factors = [parse_change(change) for change in changes]
    recorded = recorded_run(read_run(run_dir))
    plan, wiring, _ = plan_job(job, max_steps)
    if len(plan) != len(recorded.ended):
        raise ConfigError(
            f"the job has {len(plan)} steps, but {run_dir} recorded {len(recorded.ended)}; give the job file of that "
            "run, and its --max-steps"
        )
    measured = steady(recorded.ended)
    again = walk(plan, wiring, recorded, recorded.begins)
    typer.echo(f"{run_dir}: {len(plan)} steps, {1e3 * measured:.1f} ms a step")
    typer.echo(
        f"walked again: {1e3 * again.step_s:.1f} ms a step ({again.step_s / measured - 1:+.1%}), bound by "
        f"{described(again)}"
    )
    for change, factor in zip(changes, factors, strict=True):
        found = walk(plan, wiring, Scaled(recorded, dict([factor])), recorded.begins)
        typer.echo(
            f"with {change}: {1e3 * found.step_s:.1f} ms a step ({again.step_s / found.step_s:.2f} times as fast), "
            f"bound by {described(found)}"
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
    plan: Sequence[Planned],
    wiring: Wiring,
    durations: Durations,
    begins: dict[str, float],
    cores: float = math.inf,
) -> Walked:
    pipeline = Pipeline(plan, wiring, durations, begins)
    run_s = run(pipeline.threads, cores)
    ended = [task.ended_s for task in pipeline.done]
    first_s = ended[len(ended) // START_SHARE]
    shares: dict[str, float] = defaultdict(float)
    for task, _ in critical_path(pipeline.done[-1]):
        if task.ended_s > first_s:
            shares[task.name] += task.ended_s - max(first_s, task.began_s)
    spent_s = max(1e-12, sum(shares.values()))
    return Walked(
        step_s=steady(ended),
        run_s=run_s,
        bound_by=[
            (name, seconds / spent_s) for name, seconds in sorted(shares.items(), key=lambda item: -item[1])[:NAMED]
        ],
    )


def steady(ended: Sequence[float]) -> float:
    """Seconds between the ends of steps, without the first quarter and the last few."""
    first = len(ended) // START_SHARE
    last = max(first + 1, len(ended) - 1 - LAST_STEPS)
    if last >= len(ended):
        raise ConfigError(f"{len(ended)} steps are too few to tell a rate; record a longer run")
    return (ended[last] - ended[first]) / (last - first)


def described(walked: Walked) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in walked.bound_by)
