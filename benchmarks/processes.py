"""Starts both processes of a run as a user does, says what processes have used, and the order of turns for compared
ones.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

LAUNCHER, OTHERS = "launcher", "others"  # the process that began the group; the resource tracker
ROLES = {"rowcast.trainer": "trainer", "rowcast.prefetcher": "prefetcher", "spawn_main": "decoders"}
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


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


def processor_s(group: int) -> dict[str, float]:
    """Seconds of the processor that each process of a process group has used, with all of its threads and children that
    have ended."""
    found = dict.fromkeys((LAUNCHER, *ROLES.values(), OTHERS), 0.0)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            if os.getpgid(int(process.name)) == group:
                command = (process / "cmdline").read_text()
                role = next((role for word, role in ROLES.items() if word in command), OTHERS)
                found[LAUNCHER if int(process.name) == group else role] += used_s(process)
    return found


def used_s(process: Path) -> float:
    """`process`: its folder in /proc."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    ticks = sum(map(int, fields[11:15]))  # in user and system mode, and those of children that have ended
    alive_ns = sum(int(task.read_text().split()[0]) for task in process.glob("task/*/schedstat"))
    return max(ticks * TICK_S, alive_ns / 1e9)  # the threads that live are known to the nanosecond
