"""Starts all processes of a job on this host and waits for them: `python -m rowcast.deploy.local --config job.toml
[prefetcher options]`.

Trainers have the terminal; prefetchers log to `<run_dir>/prefetcher.log`. Where ranks share the job, torchrun starts
the trainers, and starts them again if one ends. When one process fails for good, the others end by themselves, and this
program repeats which one failed first and why. If this program is killed, all processes stop in order.
"""

import signal
from pathlib import Path
from typing import Annotated

import typer

from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.runtime.child import Child
from rowcast.runtime.children import STOPS, ended_badly, ended_together, forward, start_child
from rowcast.runtime.command import run_command
from rowcast.runtime.errors import ConfigError

RESTARTS = 3  # how often the trainers of several ranks are started again when one of them ends


def start_both(job: Job, shared: list[str], steps: list[str], log: Path) -> list[Child]:
    """Signals are blocked meanwhile, until there is somebody to pass them on to."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        children = [
            start_child("prefetcher", "rowcast.prefetcher", ["run", *shared, *steps], log),
            start_trainers(job.ranks.count, shared),
        ]
        for number in STOPS:
            signal.signal(number, forward(lambda: children))
        return children
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_trainers(count: int, shared: list[str]) -> Child:
    command = ["rowcast.trainer", "run", *shared]
    if count == 1:
        return start_child("trainer", command[0], command[1:])
    options = [f"--nproc-per-node={count}", f"--max-restarts={RESTARTS}", "-m"]
    return start_child("torchrun of the trainers", "rowcast.deploy.torchrun", [*options, *command])


def main(
    config: Annotated[Path, typer.Option("--config", help="The job file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key: section.key=value. Repeatable.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", min=0, help="End the run after this many train steps.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin a new run; its first checkpoint replaces an earlier run.")
    ] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Record a timeline for `prefetcher timeline`.")] = False,
    rates: Annotated[
        Path | None,
        typer.Option("--rates", help="Foretell the pace first, with a file of `trainer rates`.", metavar="FILE"),
    ] = None,
) -> None:
    """Run the prefetcher and the trainer of one job on this host."""

    def run() -> None:
        job = load_job(config, tuple(overrides or ()))
        if job.ranks.on_host != job.ranks.count:
            raise ConfigError(
                f"this command starts all ranks on one host, but ranks.per_host = {job.ranks.on_host} and "
                f"ranks.count = {job.ranks.count}; start `prefetcher run --host` and torchrun on each host "
                "(docs/ranks.md), or remove ranks.per_host"
            )
        run_dir = job.run_dir
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"job.run_dir = {str(run_dir)!r} cannot be made ({error.strerror}); choose another"
            ) from None
        flags = [*(["--fresh"] if fresh else []), *(["--timeline"] if timeline else [])]
        shared = ["--config", str(config), *(f"--set={override}" for override in overrides or ()), *flags]
        steps = [] if max_steps is None else ["--max-steps", str(max_steps)]
        steps += [] if rates is None else ["--rates", str(rates)]
        first = ended_together(start_both(job, shared, steps, run_dir / "prefetcher.log"))
        if first is not None:
            raise ended_badly(first)

    raise typer.Exit(run_command("local", run))


if __name__ == "__main__":
    typer.run(main)
