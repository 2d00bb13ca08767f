"""Decides when an attempt makes checkpoints: by the job's interval, converted from a time to train steps."""

from functools import cached_property

from rowcast.job.schema import CheckpointInterval, Job
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.interval import AwaitedPace, PaceMeter, RankPace, keep_interval, read_interval
from rowcast.prefetcher.pipeline.planning import Pace, plans_ahead
from rowcast.protocol.messages import Mode
from rowcast.runtime.telemetry.logs import get_logger


class AttemptInterval:
    def __init__(self, job: Job, checkpoints: Checkpoints, rank: int, mode: Mode) -> None:
        self._job, self._checkpoints, self._rank = job, checkpoints, rank
        self._seconds = None if mode == "eval" else job.checkpoint.every_seconds

    @cached_property  # rank 0 may find the interval between two reads on a different rank
    def known(self) -> CheckpointInterval:
        """The interval; 0 if it is a time that this run had not yet converted to train steps at the first read."""
        return self._job.checkpoint.interval if self._seconds is None else self._read() or 0

    def pace(self, train_steps: int) -> Pace | None:
        """Returns what finds the unknown interval; None if it is known. `train_steps`: before this attempt."""
        if self._seconds is None or self.known:
            return None
        ahead = plans_ahead(self._job.lookahead.depth)
        if self._job.ranks.count == 1:
            return PaceMeter(self._seconds, train_steps)
        return AwaitedPace(self._read, ahead) if self._rank else RankPace(self._seconds, train_steps, ahead)

    def keep(self, steps: int) -> None:
        """Keeps the interval found by the pace. Rank 0 writes it for all ranks and restarts."""
        if self._rank == 0:
            keep_interval(self._checkpoints.disk, self._checkpoints.root, self._every, steps)
        get_logger().info("the pace is known", checkpoint_every=self._every, train_steps=steps)

    def _read(self) -> int | None:
        return read_interval(self._checkpoints.root, self._every)

    @property
    def _every(self) -> str:
        every = self._job.checkpoint.every
        assert isinstance(every, str), "a time must be text"
        return every
