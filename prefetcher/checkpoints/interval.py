"""Converts `checkpoint.every = "10m"` into a number of train steps, once, and keeps it with the checkpoints.

    start of the run | measure the pace: no checkpoint | N steps | N steps | ...       a restart reads N

So a plan stays a function of job, data, step and this number. The run's results do not depend on it.

Of several ranks, the first measures, over steps that are the same in every run (`RankPace`). The other ranks stop
planning at a step that the first does not plan either before it knows the number (`AwaitedPace`).
"""

import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import msgspec

from rowcast.job.schema import CheckpointInterval, Job
from rowcast.prefetcher.pipeline.planning import Pace, plans_ahead
from rowcast.protocol.messages import Mode
from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.disk import Disk, unreadable
from rowcast.runtime.errors import RowcastError, advice
from rowcast.runtime.telemetry.logs import get_logger

FILE = "interval.json"  # in the checkpoints' folder
LONGEST_MEASUREMENT_S = 15.0
LEAST_STEPS = 10  # to measure, or fewer if those take half of the interval
SKIPPED_STEPS = 2  # the first ones compile


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """The file's content."""

    every: str  # checkpoint.every, as in the job file
    steps: int  # train steps


def read_interval(root: Path, every: str) -> int | None:
    """Returns the train steps between checkpoints that this run has fixed for `every`, if any. Raises Unreadable."""
    try:
        found = msgspec.json.decode((root / FILE).read_bytes(), type=Interval)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    except OSError as error:
        raise unreadable(root / FILE, error) from None
    return found.steps if found.every == every and found.steps >= 1 else None


def keep_interval(disk: Disk, root: Path, every: str, steps: int) -> None:
    """Raises RowcastError if the file cannot be written."""
    try:
        if not root.exists():
            disk.mkdir(root)
        write_durably(root / FILE, msgspec.json.encode(Interval(every=every, steps=steps)), disk)
    except OSError as error:
        change = advice(error.errno, "let this user write there")
        raise RowcastError(f"{root}: nothing can be written there ({error.strerror}); {change}") from None


class PaceMeter:
    """Measures the pace after every plan until known. `seconds`: between checkpoints; `start`: train steps before this
    attempt; `bundle`: the most steps of a plan."""

    def __init__(self, seconds: float, start: int, bundle: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._start, self._bundle, self._clock = seconds, start, bundle, clock
        self._began: tuple[float, int] | None = None  # seconds, and steps done at that time
        # the first measurement was dropped: caches fill and pages are touched during it
        self._is_warm = False

    def steps(self, done: int, planned: int) -> int | None:
        """Returns the train steps that take `seconds`, a multiple of `bundle`; None while unknown.

        `done`: steps done in this attempt; `planned`: train steps of the run that are planned. No step planned so far
        is a multiple of the result, so a restart plans them the same way."""
        if done < SKIPPED_STEPS:
            return None
        now = self._clock()
        if self._began is None:
            self._began = now, done
        began_s, before = self._began
        elapsed_s, measured = now - began_s, done - before
        is_known = measured >= LEAST_STEPS and elapsed_s >= min(LONGEST_MEASUREMENT_S, self._seconds / 8)
        if is_known and not self._is_warm:
            self._is_warm, self._began = True, (now, done)
            return None
        if not is_known and (measured < 1 or elapsed_s < self._seconds / 2):
            return None
        return first_free(self._seconds * measured / elapsed_s, self._start, planned, self._bundle)

    def must_wait(self, planned: int) -> bool:
        return False


def first_free(steps: float, start: int, end: int, bundle: int) -> int:
    """Returns an interval of about `steps`. None of its multiples is a train step after `start` up to `end`. It is a
    multiple of `bundle`, so that known plans end at its multiples."""
    interval = bundle * max(1, -(-round(steps) // bundle))
    while end // interval > start // interval:
        interval += bundle
    return interval


WARM_UP_STEPS, MEASURED_STEPS = 16, 32  # of the first rank


def held_after(ahead: int) -> int:
    """Returns how many steps of an attempt may be planned before the interval is known. `ahead`: how far planning may
    be ahead of the last step done. Planning runs that far beyond the last measured step, and as far again while steps
    finish."""
    return WARM_UP_STEPS + MEASURED_STEPS + 3 * ahead


class RankPace:
    """Measures, on the first rank, the pace of several."""

    def __init__(
        self, seconds: float, start: int, ahead: int, bundle: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """As `PaceMeter`; `ahead` as in `held_after`."""
        self._seconds, self._start, self._bundle, self._clock = seconds, start, bundle, clock
        self._free = start + held_after(ahead)  # train steps without a checkpoint
        self._began: tuple[float, int] | None = None

    def steps(self, done: int, planned: int) -> int | None:
        """As `PaceMeter.steps`; no step that any rank has planned is a multiple of the result."""
        if done < WARM_UP_STEPS:
            return None
        now_s = self._clock()
        began_s, before = self._began = self._began or (now_s, done)
        if done - before < MEASURED_STEPS:
            return None
        steps = self._seconds * (done - before) / max(now_s - began_s, 1e-6)
        return first_free(steps, self._start, self._free, self._bundle)

    def must_wait(self, planned: int) -> bool:
        return False


class AwaitedPace:
    """Waits, on the other ranks, for the interval that the first rank found."""

    def __init__(self, read: Callable[[], int | None], ahead: int) -> None:
        """`read`: returns the interval once the file exists."""
        self._read, self._held_after = read, held_after(ahead)

    def steps(self, done: int, planned: int) -> int | None:
        return self._read() if done >= WARM_UP_STEPS else None

    def must_wait(self, planned: int) -> bool:
        return planned >= self._held_after


class AttemptInterval:
    """Decides when an attempt makes checkpoints: by the job's interval, converted from a time to train steps."""

    def __init__(self, job: Job, root: Path, disk: Disk, rank: int, mode: Mode) -> None:
        self._job, self._root, self._disk, self._rank = job, root, disk, rank
        self._seconds = None if mode == "eval" else job.checkpoint.every_seconds

    @cached_property  # rank 0 may find the interval between two reads on a different rank
    def known(self) -> CheckpointInterval:
        """The interval; 0 if it is a time that this run had not yet converted to train steps at the first read."""
        return self._job.checkpoint.interval if self._seconds is None else self._read() or 0

    def pace(self, train_steps: int) -> Pace | None:
        """Returns what finds the unknown interval; None if it is known. `train_steps`: before this attempt."""
        if self._seconds is None or self.known:
            return None
        bundle = self._job.bundle
        ahead = plans_ahead(self._job.lookahead.depth) * bundle
        if self._job.ranks.count == 1:
            return PaceMeter(self._seconds, train_steps, bundle)
        return AwaitedPace(self._read, ahead) if self._rank else RankPace(self._seconds, train_steps, ahead, bundle)

    def keep(self, steps: int) -> None:
        """Keeps the interval found by the pace. Rank 0 writes it for all ranks and restarts."""
        if self._rank == 0:
            keep_interval(self._disk, self._root, self._every, steps)
        get_logger().info("the pace is known", checkpoint_every=self._every, train_steps=steps)

    def _read(self) -> int | None:
        return read_interval(self._root, self._every)

    @property
    def _every(self) -> str:
        every = self._job.checkpoint.every
        assert isinstance(every, str), "a time must be text"
        return every
