"""Starts the prefetchers of all ranks of a host, and restarts one that was killed or is stopped.

    prefetcher run                        decides where the run begins, on the host of rank 0
      prefetcher run --rank 0             serves trainer 0
      prefetcher run --rank 1 ...

A restarted prefetcher reads its rows from the newest checkpoint. Its trainer has lost it and ends, so torchrun restarts
all trainers; the other prefetchers keep their rows and roll back to that checkpoint.
"""

import math
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rowcast.job.schema import Job
from rowcast.job.training_identity import refuse_finished
from rowcast.job.units import parse_seconds
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.restore import OwnShard
from rowcast.prefetcher.run.starting_point import RunOptions, settle_run
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.process import (
    END_S,
    POLL_S,
    Child,
    Signals,
    StopsChildren,
    ended_badly,
    ended_together,
    start_child,
)
from rowcast.runtime.run_directory import RunDirectory, pair_folder, write_note
from rowcast.runtime.telemetry.logs import get_logger

STOP_S = END_S - 5  # until children are killed: before our own parent kills us
# of one rank: a fault in every attempt recurs within a start and the time to the next checkpoint, so it uses these up
# in time; rare kills of a long run never do
MOST_RESTARTS, WITHIN_S = 10, 24 * 3600.0


def check_options(job: Job, options: RunOptions) -> None:
    """Raises ConfigError for a host that the job does not have."""
    hosts = job.ranks.count // job.ranks.on_host
    if options.host >= hosts:
        raise ConfigError(
            f"--host {options.host}: the job's {job.ranks.count} ranks are on {hosts} hosts, 0 to {hosts - 1}; "
            "give one of these, or change ranks.per_host"
        )


class Restarts:
    """Counts each process's recent restarts."""

    def __init__(self) -> None:
        self._times_s: dict[str, list[float]] = {}  # monotonic clock

    def allows(self, name: str) -> bool:
        """Returns whether `name` may be restarted, and counts that restart."""
        now_s = time.monotonic()
        recent = [time_s for time_s in self._times_s.get(name, []) if now_s - time_s < WITHIN_S]
        if len(recent) == MOST_RESTARTS:
            within = f"{MOST_RESTARTS} times within {WITHIN_S / 3600:g} hours"
            get_logger().error(f"the {name} was started again {within}; now the run ends")
            return False
        self._times_s[name] = [*recent, now_s]
        return True


class AllRanks:
    """The parent of the prefetchers of a host."""

    def __init__(self, job: Job, options: RunOptions, signals: Signals, arguments: Sequence[str]) -> None:
        """`arguments`: of this command, passed to each prefetcher."""
        self._job, self._options, self._signals = job, options, signals
        self._arguments = arguments
        self._restarts = Restarts()
        self._stopped_s: dict[str, float] = {}  # how long each was stopped while this process ran
        self._stopped_limit_s = parse_seconds(job.ranks.timeout)
        first = options.host * job.ranks.on_host
        self._names = {f"prefetcher of rank {rank}": rank for rank in range(first, first + job.ranks.on_host)}
        self._children: list[Child] = []
        self._stop = StopsChildren(signals, self._children)
        self._kill_at_s = math.inf

    def run(self) -> bool:
        """Returns whether the run finished; False: it was stopped in order. Raises an error with the exit code of the
        prefetcher that failed first."""
        with ExitStack() as stack:
            directory = RunDirectory(self._job.run_dir, "prefetcher")
            if self._options.host == 0:
                stack.enter_context(directory)
                shard = OwnShard(number=0, count=self._job.ranks.count)
                settle_run(self._job, self._options, Checkpoints(self._job.run_dir, Disk()), directory, shard)
            elif self._options.mode == "train" and not self._options.fresh:
                refuse_finished(directory, self._job, self._options.max_steps)
            if self._signals.stop_reason is not None:
                return False
            self._signals.left_undone = ""  # they know
            self._children.extend(self._start(name) for name in self._names)
            first = ended_together(self._children, self._another, self._meanwhile)
            if first is not None:
                raise ended_badly(first)
            return directory.completion() is not None

    def _start(self, name: str) -> Child:
        # the last value of an option counts: a restart must not begin a new run again
        own = ["--rank", str(self._names[name]), "--unfinished-code", "0"]
        return start_child(name, "rowcast.prefetcher", [*self._arguments, *own])

    def _another(self, child: Child) -> Child | None:
        """Starts a prefetcher in place of a killed one."""
        assert child.code is not None, "it has ended"
        if self._stop.asked or child.process.returncode >= 0:
            return None
        how, output = child.describe_exit(), Path("/proc/self/fd/2").resolve()  # also the child's
        folder = pair_folder(self._job.run_dir, self._names[child.name], self._job.ranks.count)
        write_note(folder, "prefetcher", 0, f"{how} [{output}]" if output.is_file() else how)
        if not self._restarts.allows(child.name):
            return None
        get_logger().warning("started again, from the newest checkpoint", because=how)
        return self._start(child.name)

    def _meanwhile(self) -> None:
        """Passes a stop on, and kills a prefetcher that was stopped by a signal for too long: its trainer has ended,
        and no new one can connect to it."""
        for child in self._children:
            stopped_s = self._stopped_s.get(child.name, 0.0) + POLL_S if child.is_stopped else 0.0
            self._stopped_s[child.name] = stopped_s
            if stopped_s > self._stopped_limit_s:
                who = f"the {child.name} (process {child.process.pid})"
                get_logger().warning(f"{who} was stopped for {stopped_s:.0f} s (ranks.timeout) and is killed")
                child.signal(signal.SIGKILL)
        if self._stop.advance():
            self._kill_at_s = time.monotonic() + STOP_S
            get_logger().info("stopping all ranks of this host", reason=self._signals.stop_reason)
        if time.monotonic() > self._kill_at_s:  # a stopped child would outlive us
            for child in self._children:
                child.signal(signal.SIGKILL)
