"""Starts both processes of a job on this host, or those of all its ranks, and waits for them: `rowcast train --config
job.toml`, or `python -m rowcast.deploy.local`.

Trainers write to the terminal; prefetchers log to `<run_dir>/prefetcher.log`. With several ranks, torchrun starts the
trainers, and restarts them if one ends. When one process fails for good, the others end by themselves, and this program
reports which failed first and why. If this program is killed, all processes stop in order.
"""

from rowcast.runtime.stops import hold

if __name__ == "__main__":
    hold()  # before the other imports, which take a second

from collections.abc import Callable, Mapping
from functools import wraps
from itertools import product
from pathlib import Path
from signal import SIGKILL
from typing import Annotated, Any, Literal, get_args

import typer
from typer import Option

from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.runtime.command_options import Config, MaxSteps, Overrides, Source, TensorBoard, Timeline
from rowcast.runtime.errors import ConfigError, advice
from rowcast.runtime.process import (
    UNTRAINED,
    Child,
    Signals,
    StopsChildren,
    ended_badly,
    ended_together,
    run_until_stopped,
    start_child,
)
from rowcast.runtime.run_directory import Role, RunDirectory, has_started, note_start, pair_folder

RESTARTS = 3  # how often the trainers of several ranks are restarted when one ends


def train(
    config: Config,
    overrides: Overrides = None,
    max_steps: MaxSteps = None,
    fresh: Annotated[
        bool, Option("--fresh", help="Begin a new run; its first checkpoint replaces an earlier run.")
    ] = False,
    source: Source = None,
    timeline: Timeline = False,
    tensorboard: TensorBoard = None,
    evaluate: Annotated[
        bool, Option("--eval", help="Evaluate the newest or best checkpoint on the evaluation batches; train nothing.")
    ] = False,
) -> Callable[[Signals], None]:
    """Run the prefetcher and the trainer of a job on this host."""
    of_both = {"--fresh": fresh, "--timeline": timeline}
    of_training = {"--max-steps": max_steps, "--from": source, "--fresh": fresh}
    events: dict[str, object] = {"--tensorboard": tensorboard}

    def run(signals: Signals) -> None:
        signals.left_undone = UNTRAINED
        if evaluate and (given := flags(of_training | events)):
            raise ConfigError(f"--eval trains nothing, but {given[0]} is about training; remove one of them")
        job = load_job(config, tuple(overrides or ()))
        shared = ["--config", str(config), *(f"--set={override}" for override in overrides or ()), *flags(of_both)]
        own = flags({**of_training, "--fresh": False, "--eval": evaluate})
        run_both(job, [*shared, *own], "eval" if evaluate else "run", [*shared, *flags(events)], signals)

    return run


def flags(options: Mapping[str, object]) -> list[str]:
    """Returns the options as arguments, without those that are None or False."""
    return [
        name if value is True else f"{name}={value}"
        for name, value in options.items()
        if value is not None and value is not False
    ]


def run_both(
    job: Job, of_prefetcher: list[str], command: Literal["run", "eval"], of_trainer: list[str], signals: Signals
) -> None:
    """Runs `prefetcher run` and `trainer <command>`, with these arguments, to their end. Raises the error of the one
    that failed first. After an interrupt it waits until both have stopped in order; a second one kills them."""
    require_one_host(job)
    make_folder(job.run_dir)
    if signals.stop_reason is not None:
        return
    children = [
        start_child("prefetcher", "rowcast.prefetcher", ["run", *of_prefetcher], job.run_dir / "prefetcher.log"),
        start_trainers(job.ranks.count, [command, *of_trainer]),
    ]
    folders = [pair_folder(job.run_dir, rank, job.ranks.count) for rank in range(job.ranks.count)]
    roles = list(product(folders, zip(get_args(Role), children, strict=True)))
    for folder, (role, child) in roles:
        note_start(folder, role, child.process.pid)
    signals.left_undone = ""  # the trainer knows
    stops = StopsChildren(signals, children)
    try:
        first = ended_together(children, meanwhile=stops.advance)
    except KeyboardInterrupt:  # in a process whose signals are not ours
        signals.stop_reason = "an interrupt"
        try:
            ended_together(children, meanwhile=stops.advance)
        finally:
            for child in children:
                child.signal(SIGKILL)
        raise
    finally:
        for folder, (role, _) in roles:
            has_started(folder, role)
            RunDirectory(folder, role).clear_failure()  # no reader is left
    if first is not None:
        raise ended_badly(first)


def require_one_host(job: Job) -> None:
    if job.ranks.on_host != job.ranks.count:
        raise ConfigError(
            f"this command starts all ranks on one host, but ranks.per_host = {job.ranks.on_host} and "
            f"ranks.count = {job.ranks.count}; start `prefetcher run --host` and torchrun on each host "
            "(docs/ranks.md), or remove ranks.per_host"
        )


def make_folder(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"job.run_dir = {str(run_dir)!r} cannot be made ({error.strerror}); {advice(error.errno, 'choose another')}"
        ) from None


def start_trainers(count: int, arguments: list[str]) -> Child:
    if count == 1:
        return start_child("trainer", "rowcast.trainer", arguments)
    options = [f"--nproc-per-node={count}", f"--max-restarts={RESTARTS}", "-m", "rowcast.trainer"]
    return start_child("torchrun of the trainers", "rowcast.deploy.torchrun", [*options, *arguments])


@wraps(train)
def main(**options: Any) -> None:
    raise typer.Exit(run_until_stopped("local", train(**options)))


if __name__ == "__main__":
    typer.run(main)
