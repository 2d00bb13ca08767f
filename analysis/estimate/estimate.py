"""Implements `rowcast estimate`: a step's time and its bottleneck, from rates or from a recorded run.

With rates, a step's tasks take this long, each on an exclusive core; the walk divides the cores:

    decode, plan                          processor time of this job's own batches, while its plans are made
    fetch, write back                     rows of the step, at the rate of the store of training
    copy in, fill, step, copy out         the step's kernels and its overhead of each type, from the rates file
    exchange                              rows, gradients and sums between ranks, from the rates file
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from typer import Option

from rowcast.analysis.advise.cost import probe_rows
from rowcast.analysis.estimate.pipeline import (
    HANDOVERS,
    Durations,
    Pipeline,
    PlannedStep,
    Wiring,
    critical_path,
    run,
    waits,
)
from rowcast.analysis.estimate.planned import PARAMETER_BYTES, plan_job
from rowcast.analysis.estimate.rates_file import OF_MAIN, DeviceRates, KernelRates, model_fingerprint, read_rates
from rowcast.analysis.estimate.recorded import recorded_run
from rowcast.analysis.timeline import read_pairs
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.job.tables import possible_groups
from rowcast.runtime.command_options import Config, Overrides, options_of
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import free_cores, usable_cores

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
    """The steps that a rate is measured on: without the first quarter and the last few."""

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
    plan: Sequence[PlannedStep], wiring: Wiring, durations: Durations, begins: dict[str, float], cores: float = math.inf
) -> Walked:
    pipeline = Pipeline(plan, wiring, durations, begins)
    run_s = run(pipeline.threads, cores)
    steps = steady([task.ended_s for task in pipeline.done])
    shares, limits, waited = (defaultdict[str, float](float) for _ in range(3))
    path = critical_path(pipeline.done[steps.last])
    for task, _ in path:
        shares[task.name] += steps.share(task.began_s, task.ended_s)
    for (task, reason), (held, _) in pairwise(path):
        # where its report comes first, it waits for the report that is held back
        if reason in LIMITS and held.name != "deliver" and task.ended_s > steps.began_s:
            limits[reason] += 1 / (steps.last - steps.first)
    for thread in pipeline.threads:
        for reason, began_s, ended_s in waits(thread) if thread.name in WHOSE else ():
            waited[f"{WHOSE[thread.name]}: {reason}"] += steps.share(began_s, ended_s)
    return Walked(
        step_s=steps.step_s,
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


TASKS = (
    "decode", "read", "plan", "fetch", "send", "copy in", "fill", "exchange", "step", "copy out", "write back",
)  # fmt: skip
OF_HOST = ("fetch", "write back", "barrier")  # their rows' rates are measured here
CORES_OF_PAIR = 2  # with fewer, steps of ranks took up to twice as long as estimated
NEARLY = 0.9  # a core that nothing else uses is idle for at least this share of the time
# fraction of a step's time: predictions were off by 5 % on average, on busy cores and of several ranks by up to this
LEAST_MARGIN, BUSY_MARGIN, RANKS_MARGIN = 0.1, 0.25, 0.4
UNKNOWN = 0.2  # error of a kernel that was measured at too few shapes to know it
HANDLED, HANDLING_S = ("read", "send", "write"), 5e-5  # a batch from its decoder, a piece into the ring


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateOptions:
    rates: Annotated[
        Sequence[Path], Option(help="A device, from `trainer rates`. Repeatable.", metavar="FILE", show_default=False)
    ] = ()
    vary: Annotated[
        Sequence[str], Option(help="A setting to try, as KEY=VALUE. Repeatable; all combinations are tried.")
    ] = ()
    run_dir: Annotated[
        Path | None,
        Option("--run", help="Instead of --rates: a run with --timeline.", metavar="DIR", show_default=False),
    ] = None
    changes: Annotated[
        Sequence[str], Option("--change", help="With --run: how long a task would take, such as step=0.1. Repeatable.")
    ] = ()
    max_steps: Annotated[int | None, Option(min=0, help="Train steps; as the run had it.", show_default=False)] = None

    def __post_init__(self) -> None:
        if (self.run_dir is None) == (not self.rates):
            raise ConfigError("give either --rates FILE, from `trainer rates`, or --run DIR, a run with --timeline")
        if self.changes if self.rates else self.vary:
            raise ConfigError("--vary says what would be different with --rates, and --change with --run")


@options_of(EstimateOptions)
def estimate(config: Config, overrides: Overrides = None, *, options: EstimateOptions) -> None:
    """Raises ConfigError and DataError."""
    if options.run_dir is not None:
        walk_recorded(load_job(config, tuple(overrides or ())), options.run_dir, options.changes, options.max_steps)
    devices = [read_rates(path) for path in options.rates]
    for settings in combinations(options.vary) if devices else ():
        job = load_job(config, (*(overrides or ()), *settings))
        estimate_job(job, devices, ", ".join(settings) or "the job", options.max_steps)


def combinations(vary: Sequence[str]) -> list[tuple[str, ...]]:
    """The values of one key ("key=value") are alternatives. Raises ConfigError."""
    axes: dict[str, list[str]] = {}
    for setting in vary:
        key, equals, _ = setting.partition("=")
        if not equals:
            raise ConfigError(f"--vary {setting}: give a key and a value, such as lookahead.depth=2")
        axes.setdefault(key, []).append(setting)
    return list(product(*axes.values()))


def estimate_job(job: Job, devices: Sequence[DeviceRates], name: str, max_steps: int | None = None) -> list[Walked]:
    """Prints an estimate for each device. Raises ConfigError and DataError."""
    free = free_cores() / job.ranks.on_host  # the pairs of a host work at the same time
    plan, wiring = plan_job(job, max_steps)
    host, results = host_rates(job), []
    cores = usable_cores() / job.ranks.on_host
    is_busy = free < NEARLY * min(CORES_OF_PAIR, cores)
    for device in devices:
        result = estimated(job, plan, device, host)
        walked = walk(plan, wiring, result.durations, {}, cores)
        results.append(walked)
        margin = max(result.margin, BUSY_MARGIN if is_busy else 0.0)
        on = device.device if job.ranks.count == 1 else f"{job.ranks.count} ranks of {device.device}"
        typer.echo(
            f"{name} on {on}: {1e3 * walked.step_s:.1f} ms a step (+-{margin:.0%}), {walked.run_s:.1f} s in all"
            f", bound by {described(walked)}\n  ms: {ms_of_tasks(result.durations, len(plan))}"
        )
        if job.ranks.count > 1 and cores < CORES_OF_PAIR:
            typer.echo(
                f"  each trainer and its prefetcher have {cores:g} of this host's cores: a step takes up to twice "
                "as long, since all ranks wait for one that waits for a core"
            )
        if is_busy:
            typer.echo(
                f"  other programs leave {free:.1f} of the {cores:g} cores of a trainer and its prefetcher: "
                f"+-{margin:.0%} is the error of processor time, and a step takes longer by its waits for a core"
            )
        if result.outside:
            typer.echo(f"  outside what was measured: {', '.join(result.outside)}")
    return results


class Estimated(NamedTuple):
    durations: Durations
    margin: float  # the share of a step's time that the kernels' errors leave open
    outside: list[str]  # kernels that were not measured at the job's shapes


def estimated(job: Job, plan: Sequence[PlannedStep], device: DeviceRates, host: dict[str, KernelRates]) -> Estimated:
    """`host`: of the rows of each group. Raises ConfigError if the rates do not hold for the job."""
    if device.model != model_fingerprint(job):
        raise ConfigError(
            "the rates file holds another job's model; measure this one: `trainer rates --config` with its job file"
        )
    overhead = {what: device.seconds(kind) for what, kind in HANDOVERS.items()}
    whole_batch = max((step.batch for step in plan), default=0)
    of_kernels, outside, tasks = defaultdict[str, float](float), set[str](), list[dict[str, float]]()
    for own in plan:
        seconds, lookups = defaultdict[str, float](float), 0.0
        for task, kernel, given, calls in own.calls:
            if task in OF_HOST:
                seconds[task] += host[kernel].seconds(given)
                continue
            a_weight = given.get(PARAMETER_BYTES)
            counts = given if a_weight is None else {"bytes": a_weight * device.parameters}
            own_s = calls * device.seconds(kernel, **counts)
            seconds[task] += own_s
            of_kernels[kernel] += own_s
            lookups += counts["lookups"] if kernel == "lookup" else 0.0
            # an epoch's last batch may be small
            if own.batch == whole_batch and not device.kernels[kernel].covers(counts):
                outside.add(kernel)
        of_host = sum(device.seconds(name, lookups=lookups) for name in OF_MAIN)
        # a device computes while the host issues what follows
        step_s = max(seconds["step"], of_host) if device.clock == "device" else seconds["step"] + of_host
        tasks.append({**seconds, "step": step_s, "decode": own.decode_s, "plan": own.plan_s} | overhead)
    return Estimated(
        lambda name, step: tasks[step].get(name, HANDLING_S if name in HANDLED else 0.0),
        max(LEAST_MARGIN if job.ranks.count == 1 else RANKS_MARGIN, margin(device, of_kernels)) * (2 if outside else 1),
        sorted(outside),
    )


def margin(device: DeviceRates, of_kernels: dict[str, float]) -> float:
    """The share of the kernels' time that their errors leave open. `of_kernels`: seconds. Kernels are off
    independently of each other."""
    known = {name: UNKNOWN if (error := device.kernels[name].error) is None else error for name in of_kernels}
    return math.hypot(*(error * of_kernels[name] for name, error in known.items())) / max(
        1e-12, sum(of_kernels.values())
    )


def host_rates(job: Job) -> dict[str, KernelRates]:
    """Returns the seconds of a row of each group: read, read for the first time (its value is computed), and
    written."""
    return {
        f"{name} {group.name}": KernelRates(terms={"rows": group.record_bytes / getattr(rates, name)})
        for group in possible_groups(job)
        for rates in [probe_rows(group, job.job.seed)]
        for name in ("read", "first", "write")
    }


def walk_recorded(job: Job, run_dir: Path, changes: Sequence[str], max_steps: int | None = None) -> None:
    """`changes`: such as "step=0.1", the time of a task in terms of the recorded one. Raises ConfigError, DataError."""
    factors = [parse_change(change) for change in changes]
    if job.bundle > 1:
        raise ConfigError(
            f"a plan of this job serves up to {job.bundle} steps, and this walk knows plans of one; record a run with "
            "--set lookahead.bundle=1, and give that here too"
        )
    recorded = recorded_run(read_pairs(run_dir)[0])
    plan, wiring = plan_job(job, max_steps)
    if len(plan) != len(recorded.ended):
        raise ConfigError(
            f"the job has {len(plan)} steps, but {run_dir} recorded {len(recorded.ended)}; give the job file of that "
            "run, and its --max-steps"
        )
    measured = steady(recorded.ended).step_s
    again = walk(plan, wiring, recorded, recorded.begins)
    typer.echo(
        f"{run_dir}: {len(plan)} steps, {1e3 * measured:.1f} ms a step\n"
        f"walked again: {1e3 * again.step_s:.1f} ms a step ({again.step_s / measured - 1:+.1%}), bound by "
        f"{described(again)}\n  ms: {ms_of_tasks(recorded, len(plan))}"
    )
    told = [f"{name} {share:.0%}" for name, share in again.waits.items() if share >= OFTEN]
    typer.echo(f"  waits: {', '.join(told) or 'none'}")
    for change, factor in zip(changes, factors, strict=True):
        changed = walk(plan, wiring, scaled(recorded, *factor), recorded.begins)
        typer.echo(
            f"with {change}: {1e3 * changed.step_s:.1f} ms a step ({again.step_s / changed.step_s:.2f} times as fast), "
            f"bound by {described(changed)}"
        )


def parse_change(change: str) -> tuple[str, float]:
    match = re.fullmatch(r"([a-z ]+)=([0-9.]+)", change)
    if match is None or match[1] not in TASKS:
        raise ConfigError(f"--change {change}: give one of {', '.join(TASKS)}, and a factor, such as step=0.1")
    return match[1], float(match[2])


def scaled(durations: Durations, task: str, factor: float) -> Durations:
    return lambda name, step: durations(name, step) * (factor if name == task else 1.0)


def ms_of_tasks(durations: Durations, num_steps: int) -> str:
    """The mean over the steps, without the first quarter."""
    steps = range(num_steps // 4, num_steps)
    means = {task: 1e3 * sum(durations(task, step) for step in steps) / max(1, len(steps)) for task in TASKS}
    return ", ".join(f"{task} {ms:.2f}" for task, ms in means.items() if ms >= 0.005)
