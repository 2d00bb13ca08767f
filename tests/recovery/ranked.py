"""A small run of two ranks that is killed here and there, and started again by one command until it is complete.

The run is that of `restarted.py` in four parts. It must come to what one trainer of four parts comes to.
"""

import os
import socket
import time
from collections.abc import Callable
from signal import SIGKILL
from typing import Any

from rowcast.job.file import load_job
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.restore import OwnShard
from rowcast.prefetcher.run.starting_point import RunOptions, settle_run
from rowcast.runtime.crash_points import VARIABLE
from rowcast.runtime.disk import Disk
from rowcast.runtime.run_directory import RunDirectory
from tests.recovery.restarted import NUM_TRAIN, ROLES, Outcome, Role, end_well, killed, outcome_of, sections
from tests.support.processes import Ended, Process, Session
from tests.support.rank_processes import RankProcesses

RANKS, PARTS = 2, 4
TIMEOUT_S = 20.0  # ranks.timeout: a busy machine may keep a rank waiting for some seconds
MOST_STARTS = 8
END_S = 400.0  # of one start: time-outs of what was stopped, restarts of all trainers, and the run itself
LONGEST_LIFE_S = 12.0  # of a process that is killed at a random time: imports, meeting, 20 steps, the end
POLL_S = 0.05


class RecoveringRanks:
    """As `Recovering`, with all processes of two ranks."""

    def __init__(self, session: Session, count: int = RANKS, **more: dict[str, Any]) -> None:
        self.session = session
        self.processes = RankProcesses(session, count)
        self.num_starts = 0
        self.told = ""  # what the commands have said so far
        ranks = {"count": count, "parts": PARTS, "timeout": f"{TIMEOUT_S:g}s"}
        session.write_job(**sections(ranks=ranks, **more))

    @property
    def complete(self) -> bool:
        return (self.session.run_dir / "complete").exists()

    def start(self, armed: str | None = None) -> Process:
        self.num_starts += 1
        assert self.num_starts <= MOST_STARTS, f"not complete after {MOST_STARTS} starts\n{self.told[-4000:]}"
        return self.processes.start(f"--max-steps={NUM_TRAIN}", **({VARIABLE: armed} if armed else {}))

    def crash(self, name: str, times: int) -> None:
        """Starts everything; of all processes, the first that passes this point so often is killed."""
        once = self.session.folder / f"once-{self.num_starts}"
        self.end(self.start(f"{name}:{times}:SIGKILL:{once}"))
        assert once.exists(), f"{name!r} was not reached {times} times\n{self.told[-4000:]}"

    def end(self, command: Process) -> Ended:
        """Waits until the command and all that it started have ended."""
        deadline_s = time.monotonic() + END_S
        while command.running or self.processes.by_name():
            assert time.monotonic() < deadline_s, (
                f"{sorted(self.processes.by_name())} still run after {END_S:g} s\n{command.stderr[-4000:]}"
            )
            time.sleep(POLL_S)
        ended = command.ended()
        self.told += ended.stderr
        return ended

    def finish(self) -> Outcome:
        """Starts it until the run is complete."""
        while not self.complete:
            ended = self.end(self.start())
            assert ended.code == 0, f"exit code {ended.code}\n{ended.stderr[-4000:]}"
        return outcome_of(self.session.run_dir)

    def until(self, command: Process, condition: Callable[[], bool]) -> bool:
        """False if the command ended before."""
        deadline_s = time.monotonic() + END_S
        while not condition():
            if not command.running:
                return False
            assert time.monotonic() < deadline_s, f"waited {END_S:g} s\n{command.stderr[-4000:]}"
            time.sleep(POLL_S)
        return True


class Pairs:
    """A prefetcher and a trainer for each rank, started one by one: without the imports that a parent and torchrun cost
    them, so that a run may be killed many times."""

    def __init__(self, session: Session, count: int, parts: int, **more: dict[str, Any]) -> None:
        self.session, self.count = session, count
        # long: nobody waits for one that was killed, as all others are killed with it
        session.write_job(**sections(ranks={"count": count, "parts": parts, "timeout": "2m"}, **more))

    def start(self, armed: tuple[Role, int, str] | None = None) -> dict[tuple[Role, int], Process]:
        """`armed`: role and rank of one process, and the point where it kills itself."""
        self._settle()
        with socket.create_server(("127.0.0.1", 0)) as server:
            meeting = {"MASTER_PORT": str(server.getsockname()[1]), "MASTER_ADDR": "127.0.0.1"}
        started: dict[tuple[Role, int], Process] = {}
        for rank in range(self.count):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.count, "LOCAL_WORLD_SIZE": self.count}
            of_rank = meeting | {name: str(number) for name, number in numbers.items()}
            own = [f"--rank={rank}"] if self.count > 1 else []
            for role in ROLES:
                options = [f"--max-steps={NUM_TRAIN}", *own] if role == "prefetcher" else []
                point = {VARIABLE: armed[2]} if armed is not None and armed[:2] == (role, rank) else {}
                started[role, rank] = self.session.start(role, *options, **of_rank, **point)
        return started

    def crash(self, role: Role, rank: int, point: str) -> None:
        """Kills one process there, and all others as soon as that is seen, as when a host is lost."""
        started = self.start((role, rank, point))
        killed(started[role, rank])
        for pid in self.session.alive():
            os.kill(pid, SIGKILL)
        for process in started.values():
            process.reap()

    def finish(self) -> Outcome:
        end_well(*self.start().values())
        return outcome_of(self.session.run_dir)

    def _settle(self) -> None:
        """What the parent of the prefetchers does first."""
        if self.count > 1:
            job = load_job(self.session.config)
            shard = OwnShard(number=0, count=self.count)
            with RunDirectory(job.run_dir, "prefetcher") as directory:
                settle_run(job, RunOptions(), Checkpoints(job.run_dir, Disk()), directory, shard)
