"""Starts both processes on this host and waits for them: `python -m rowcast.deploy.local --config job.toml [prefetcher
options]`.

The trainer has the terminal; the prefetcher's log goes to `<run_dir>/prefetcher.log`. When one fails, the other ends by
itself, and this program repeats which one failed first and why. If this program is killed, both processes stop in
order.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rowcast.job.file import load_job
from rowcast.runtime.child import Child
from rowcast.runtime.command import run_command
from rowcast.runtime.errors import ConfigError, RowcastError

POLL_S = 0.1
NOTICE_S = 3.0  # for the other process to notice that one has failed, before it is asked to stop
STOPS = (signal.SIGINT, signal.SIGTERM)
END_S = 40.0  # until it is killed: a stop in order takes up to 30 s
PRCTL, PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1


def start_both(shared: list[str], steps: list[str], log: Path) -> list[Child]:
    """Signals are blocked meanwhile, also in the two processes, until handlers are in place."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        children = [start("prefetcher", [*shared, *steps], log), start("trainer", shared, None)]
        for number in STOPS:
            signal.signal(number, forward(children))
        return children
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(name: str, arguments: list[str], log: Path | None) -> Child:
    command = [sys.executable, "-m", f"rowcast.{name}", "run", *arguments]
    if log is None:
        return Child(name, subprocess.Popen(command, preexec_fn=stop_with_parent), log)
    with log.open("ab") as file:  # appends: keeps the log of an earlier run, and of one that is still running
        return Child(
            name, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, preexec_fn=stop_with_parent), log
        )


def stop_with_parent() -> None:
    """Runs in the child: requests SIGTERM if this process is killed."""
    PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)


def forward(children: list[Child]) -> Callable[[int, object], None]:
    def handle(number: int, frame: object) -> None:
        if number == signal.SIGINT and has_terminal():
            return  # the terminal has sent it to all three processes; a second one would end the two at once
        for child in children:
            child.signal(number)

    return handle


def has_terminal() -> bool:
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def terminate(children: list[Child]) -> Child | None:
    """The child that failed first, or None. After a failure the other child may notice by itself, is then asked to
    stop, then killed.
    """
    first: Child | None = None
    deadlines: deque[tuple[float, signal.Signals]] = deque()
    while any(child.code is None for child in children):
        if first is None:
            first = failed(children)
            if first is not None:
                now = time.monotonic()
                deadlines.extend([(now + NOTICE_S, signal.SIGTERM), (now + END_S, signal.SIGKILL)])
        if deadlines and time.monotonic() > deadlines[0][0]:
            _, number = deadlines.popleft()
            for child in children:
                child.signal(number)
        time.sleep(POLL_S)
    return first or failed(children)


def failed(children: list[Child]) -> Child | None:
    return next((child for child in children if child.code), None)


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
) -> None:
    """Run the prefetcher and the trainer of one job on this host."""

    def run() -> None:
        run_dir = load_job(config, tuple(overrides or ())).run_dir
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"job.run_dir = {str(run_dir)!r} cannot be made ({error.strerror}); choose another"
            ) from None
        flags = [*(["--fresh"] if fresh else []), *(["--timeline"] if timeline else [])]
        shared = ["--config", str(config), *(f"--set={override}" for override in overrides or ()), *flags]
        steps = [] if max_steps is None else ["--max-steps", str(max_steps)]
        first = terminate(start_both(shared, steps, run_dir / "prefetcher.log"))
        if first is not None:
            raise ended_badly(first)

    raise typer.Exit(run_command("local", run))


def ended_badly(child: Child) -> RowcastError:
    error = RowcastError(child.describe_exit())
    error.exit_code = child.code or 1
    return error


if __name__ == "__main__":
    typer.run(main)
