"""Starts both processes on this host and sees them out: `python -m deploy.local --config job.toml [prefetcher options]`.

The trainer has the terminal; the prefetcher's log goes to `<run_dir>/prefetcher.log`. When one ends badly the other ends by itself,
and what the first one said is repeated here.
"""

import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from protocol.command import run_command
from protocol.errors import ConfigError
from protocol.job import load_job

POLL_S = 0.1
NOTICE_S = 3.0  # for the other process to notice that one has failed, before it is asked to stop
END_S = 40.0  # before it is killed: a stop in order takes up to 30 s

Child = subprocess.Popen[bytes]


def start(module: str, arguments: list[str], log: Path | None) -> Child:
    command = [sys.executable, "-m", module, "run", *arguments]
    if log is None:
        return subprocess.Popen(command)
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def forward(children: list[Child]) -> Callable[[int, object], None]:
    def handle(number: int, frame: object) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    return handle


def wait_for_both(children: list[Child]) -> list[int]:
    """Exit codes. Once one has ended badly, the other has a moment to notice by itself, then is asked, then is ended."""
    deadlines: deque[tuple[float, signal.Signals]] = deque()
    while any(child.poll() is None for child in children):
        failed = any(child.poll() not in (None, 0) for child in children)
        if failed and not deadlines:
            now = time.monotonic()
            deadlines.extend([(now + NOTICE_S, signal.SIGTERM), (now + END_S, signal.SIGKILL)])
        if deadlines and time.monotonic() > deadlines[0][0]:
            _, number = deadlines.popleft() if len(deadlines) > 1 else deadlines[0]
            for child in children:
                if child.poll() is None:
                    child.send_signal(number)
        time.sleep(POLL_S)
    return [child.wait() for child in children]


def main(
    config: Annotated[Path, typer.Option("--config", help="The job file.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override a key: section.key=value. Repeatable.")] = None,
    max_steps: Annotated[int | None, typer.Option("--max-steps", min=0, help="End the run after so many train steps.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over.")] = False,
) -> None:
    """Run the prefetcher and the trainer of one job on this host."""

    def run() -> int:
        run_dir = load_job(config, tuple(overrides or ())).run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        log = run_dir / "prefetcher.log"
        shared = ["--config", str(config), *(f"--set={override}" for override in overrides or ()), *(["--fresh"] if fresh else [])]
        steps = [] if max_steps is None else ["--max-steps", str(max_steps)]
        children = [start("prefetcher", [*shared, *steps], log), start("trainer", shared, None)]
        handler = forward(children)
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all three; the two processes know what to do
        codes = wait_for_both(children)
        if codes[0] != 0:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise_for(codes[0], f"the prefetcher (process {children[0].pid}) ended with code {codes[0]}: {''.join(last)} [{log}]")
        return codes[1]

    raise typer.Exit(run_command("local", run))


def raise_for(code: int, sentence: str) -> None:
    error = ConfigError(sentence)
    error.exit_code = code if code > 0 else 1
    raise error


if __name__ == "__main__":
    typer.run(main)
