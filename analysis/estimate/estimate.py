"""Implements `prefetcher estimate --rates`: predicts a job's step time and its bottleneck."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import typer

from rowcast.analysis.estimate.device_rates import DeviceRates, read_rates
from rowcast.analysis.estimate.durations import EstimatedDurations, HostRow, measured_rows
from rowcast.analysis.estimate.pipeline import Durations
from rowcast.analysis.estimate.planned import plan_job
from rowcast.analysis.estimate.recorded import recorded_run
from rowcast.analysis.estimate.walk import (
    CHANGEABLE,
    START_SHARE,
    Walked,
    check_steps,
    described,
    steady,
    walk,
)
from rowcast.analysis.timeline.recording import read_pairs
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import usable_cores

CORES_OF_PAIR = 2  # with fewer, steps of ranks took up to twice as long as estimated

Setting = tuple[str, str]  # key of the job file, value


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    settings: tuple[Setting, ...]  # what differs from the job file
    device: str
    ranks: int
    cores: float  # that each pair of a prefetcher and a trainer has on this host
    steps: int  # walked, evaluation steps among them
    walked: Walked
    compute_s: float  # the mean of the task "step" of train steps, without the first
    margin: float  # the share of step_s that the kernels' errors leave open
    outside: list[str]  # kernels that were not measured at such shapes


def estimate_jobs(
    load: Callable[[Sequence[str]], Job],
    rates: Sequence[Path],
    vary: Sequence[str],
    *,
    max_steps: int | None = None,
) -> list[Estimate]:
    """One estimate for each combination of the values in `vary` ("key=value"; values of one key are alternatives) and
    each rates file. `load` reads the job file with such settings. Raises ConfigError
    and DataError."""
    devices = [read_rates(path) for path in rates]
    found = []
    for settings in combinations(vary):
        job = load([f"{key}={value}" for key, value in settings])
        row = measured_rows(job, group_specs(job))
        found += estimate_job(job, devices, row, settings, max_steps=max_steps)
    return found


def estimate_job(
    job: Job,
    devices: Sequence[DeviceRates],
    row: HostRow,
    settings: tuple[Setting, ...] = (),
    *,
    max_steps: int | None = None,
) -> list[Estimate]:
    """One estimate for each device. Raises ConfigError and DataError."""
    plan, wiring = plan_job(job, max_steps)
    cores = cores_of_pair(job)
    found = []
    for device in devices:
        durations = EstimatedDurations(job, plan, device, row)
        walked = walk(plan, wiring, durations, {}, cores)
        later = range(len(plan) // START_SHARE, len(plan))
        compute_s = [
            durations("step", at) for at in later if (own := plan[at].counted) is not None and own.counts.trains
        ]
        found.append(
            Estimate(
                settings=settings,
                device=device.device,
                ranks=job.ranks.count,
                cores=cores,
                steps=len(plan),
                walked=walked,
                compute_s=sum(compute_s) / max(1, len(compute_s)),
                margin=durations.margin,
                outside=durations.outside,
            )
        )
    return found


def cores_of_pair(job: Job) -> float:
    """An equal share of the cores that this process may use, since the pairs of a host work at the same time."""
    return usable_cores() / job.ranks.on_host


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Seconds a step, the mean over the steady ones."""

    task: str
    estimated_s: float
    recorded_s: float


def compare(job: Job, rates: Path, run_dir: Path, *, max_steps: int | None = None) -> list[Compared]:
    """What the rates estimate beside what the run recorded with --timeline: each task, then the whole step. Raises
    ConfigError and DataError."""
    recorded = recorded_run(read_pairs(run_dir)[0])
    plan, wiring = plan_job(job, max_steps)
    check_steps(plan, recorded, run_dir)
    durations = EstimatedDurations(job, plan, read_rates(rates))
    measured = steady(recorded.ended)
    steps = range(measured.first + 1, measured.last + 1)

    def mean(of: Durations, task: str) -> float:
        return sum(of(task, step) for step in steps) / len(steps)

    walked = walk(plan, wiring, durations, recorded.begins, cores_of_pair(job))
    found = [
        Compared(task=task, estimated_s=mean(durations, task), recorded_s=mean(recorded, task))
        for task in CHANGEABLE
        if task != "exchange" or wiring.num_ranks > 1
    ]
    return [*found, Compared(task="a step of the run", estimated_s=walked.step_s, recorded_s=measured.step_s)]


def print_compared(found: Sequence[Compared]) -> None:
    typer.echo(f"{'ms a step':<18}{'estimated':>10}{'recorded':>10}{'off by':>10}")
    for own in found:
        off = f"{own.estimated_s / own.recorded_s - 1:+.0%}" if own.recorded_s else ""
        typer.echo(f"{own.task:<18}{1e3 * own.estimated_s:>10.2f}{1e3 * own.recorded_s:>10.2f}{off:>10}")


def combinations(vary: Sequence[str]) -> list[tuple[Setting, ...]]:
    """Raises ConfigError."""
    axes: dict[str, list[str]] = {}
    for setting in vary:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--vary {setting}: give a key and a value, such as lookahead.depth=2")
        axes.setdefault(key, []).append(value)
    return [tuple(zip(axes, values, strict=True)) for values in product(*axes.values())]


def print_estimates(found: Sequence[Estimate]) -> None:
    for own in found:
        name = ", ".join(["the job" if not own.settings else "", *(f"{key}={value}" for key, value in own.settings)])
        walked, devices = own.walked, own.device if own.ranks == 1 else f"{own.ranks} ranks of {own.device}"
        typer.echo(
            f"{name.strip(', ')} on {devices}: {1e3 * walked.step_s:.1f} ms a step (+-{own.margin:.0%}), "
            f"{walked.run_s:.1f} s in all, bound by {described(walked)}"
        )
        if own.ranks > 1 and own.cores < CORES_OF_PAIR:
            typer.echo(
                f"  each trainer and its prefetcher have {own.cores:g} of this host's cores: a step takes up to twice "
                "as long, since all ranks wait for one that waits for a core"
            )
        if own.outside:
            typer.echo(f"  outside what was measured: {', '.join(own.outside)}")
