"""Starts both processes of a run as a user does, and the order of turns for compared processes."""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round from 1, name): each round has every name once, in an order that rotates from round to round."""
    for number in range(rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            yield number + 1, name


def start(name: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", name, "run", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def terminate(processes: Mapping[str, subprocess.Popen[str]], timeout_s: float) -> dict[str, str]:
    """Waits; returns their logs. Raises RuntimeError with a process's output if it fails."""
    logs = {}
    for name, process in processes.items():
        _, logs[name] = process.communicate(timeout=timeout_s)
        if process.returncode != 0:
            raise RuntimeError(f"the {name} ended with code {process.returncode}: {logs[name].strip()[-2000:]}")
    return logs
