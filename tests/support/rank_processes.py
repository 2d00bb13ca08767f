"""All processes of a run of several ranks, found by what they are, and what they leave.

`rowcast.deploy.local` starts the parent of the prefetchers and torchrun, and these start a pair for each rank:

    local    parent    prefetcher 0, prefetcher 1, ...    torchrun    trainer 0, trainer 1, ...
"""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rowcast.protocol.transport.endpoint import socket_path
from rowcast.runtime.run_directory import pair_folder
from tests.support.processes import POLL_S, Process, Session, environment_of, proc_text

CHILDREN_END_S = 10.0  # decoders of a killed prefetcher end on their own, but not before they are scheduled
SHARED_MEMORY = Path("/dev/shm")
MODULES = {"rowcast.deploy.local": "local", "rowcast.deploy.torchrun": "torchrun"}
COMMANDS = {"rowcast.prefetcher": "prefetcher", "rowcast.trainer": "trainer"}


class RankProcesses:
    """The processes of a session's run, whoever started them."""

    def __init__(self, session: Session, count: int) -> None:
        self.session, self.count = session, count
        self._seen: set[int] = set()

    def start(self, *options: str, **environment: str) -> Process:
        """All of them, by one command."""
        return self.session.start("local", *options, **environment)

    def by_name(self) -> dict[str, int]:
        """Process ids of those that run now: "local", "parent", "prefetcher 0", "torchrun", "trainer 0", ..."""
        pids = self.session.alive()
        self._seen |= pids
        found = {pid: name for pid in pids if (name := name_of(pid))}
        parents = {pid for pid, name in found.items() if name == "parent"}
        return {
            name: pid
            for pid, name in found.items()
            # a decoder that was forked has the command line of its prefetcher
            if not name.startswith("prefetcher") or parent_of(pid) in parents or not parents
        }

    def names(self) -> list[str]:
        """Of every process that a complete run has, decoders left out."""
        pairs = [f"{role} {rank}" for role in ("prefetcher", "trainer") for rank in range(self.count)]
        return ["local", "parent", "torchrun", *pairs]

    def signal(self, name: str, number: signal.Signals) -> bool:
        """False if none of that name runs."""
        pid = self.by_name().get(name)
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def remains(self) -> list[str]:
        """What is left although all have ended: processes, rings, sockets. Also of those that were killed."""
        deadline_s = time.monotonic() + CHILDREN_END_S
        while self.session.alive() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        left = [f"process {pid} ({name_of(pid)})" for pid in sorted(self.session.alive())]
        rings = [path for pid in self._seen for path in SHARED_MEMORY.glob(f"rowcast-*-{pid}-*")]
        return left + [str(path) for path in [*rings, *self.sockets()] if path.exists()]

    def sockets(self) -> Iterator[Path]:
        for rank in range(self.count):
            path = socket_path(pair_folder(self.session.run_dir, rank, self.count))
            yield from (path, path.with_suffix(".lock"))


def name_of(pid: int) -> str | None:
    """None for what is none of ours, such as a resource tracker, and for a process that has ended."""
    words = proc_text(pid, "cmdline").split("\0")
    if "-m" not in words:
        return None
    module, *options = words[words.index("-m") + 1 :]
    if module in MODULES:
        return MODULES[module]
    if module not in COMMANDS or options[:1] != ["run"]:
        return None
    if module == "rowcast.trainer":
        return f"trainer {environment(pid).get('RANK', 0)}"
    ranks = [after for option, after in zip(options, [*options[1:], ""], strict=True) if option == "--rank"]
    ranks += [option.partition("=")[2] for option in options if option.startswith("--rank=")]
    return f"prefetcher {ranks[0]}" if ranks else "parent"


def environment(pid: int) -> Mapping[str, str]:
    entries = environment_of(Path(f"/proc/{pid}")).decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def parent_of(pid: int) -> int:
    fields = proc_text(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0
