"""Converts `checkpoint.every = "10m"` into a number of train steps, once, and keeps it with the checkpoints.

    start of the run | measure the pace: no checkpoint | N steps | N steps | ...       a restart reads N

So a plan stays a function of job, data, step and this number. What the run computes does not depend on it at all.

Where there are several ranks, the first one measures, over steps that are the same in every run (`RankPace`). The
others wait with their plans at a step that the first has not planned either before it knows (`AwaitedPace`).
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import RowcastError

FILE = "interval.json"  # in the checkpoints' folder
LONGEST_MEASUREMENT_S = 15.0
LEAST_STEPS = 10  # to measure, unless they take half of the interval
SKIPPED_STEPS = 2  # the first ones are slow, as they compile


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    every: str  # checkpoint.every, as the job had it
    steps: int  # train steps


def read_interval(root: Path, every: str) -> int | None:
    """Returns the train steps between checkpoints if this run has fixed them for `every`."""
    try:
        found = msgspec.json.decode((root / FILE).read_bytes(), type=Interval)
    except (OSError, msgspec.DecodeError):
        return None
    return found.steps if found.every == every and found.steps >= 1 else None


def keep_interval(disk: Disk, root: Path, every: str, steps: int) -> None:
    """Raises RowcastError if the file cannot be written."""
    try:
        if not root.exists():
            disk.mkdir(root)
        write_durably(root / FILE, msgspec.json.encode(Interval(every=every, steps=steps)), disk)
    except OSError as error:
        raise RowcastError(
            f"{root}: nothing can be written there ({error.strerror}); free space and run again"
        ) from None


class PaceMeter:
    """Measures the pace after every step until it is known. `seconds`: between checkpoints; `start`: train steps before
    this attempt."""

    def __init__(self, seconds: float, start: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._start, self._clock = seconds, start, clock
        self._began: tuple[float, int] | None = None  # seconds, steps done then
        # the first measurement was dropped, as caches fill and pages are touched during it
        self._is_warm = False

    def steps(self, done: int, planned: int) -> int | None:
        """Returns the train steps that take `seconds`, or None while that is unknown.

        `done`: steps done in this attempt; `planned`: train steps of the run that are planned. No multiple of the
        result is among the steps planned here, so that a restart plans them the same way.
        """
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
        steps = max(1, round(self._seconds * measured / elapsed_s))
        while planned // steps > self._start // steps:
            steps += 1
        return steps

    def must_wait(self, planned: int) -> bool:
        return False


WARM_UP_STEPS, MEASURED_STEPS = 16, 32  # of the first rank


def held_after(ahead: int) -> int:
    """The steps of an attempt that may be planned before the interval is known. `ahead`: how far planning may be ahead
    of the last step done: so far beyond the last measured step, and as far again while steps are done meanwhile."""
    return WARM_UP_STEPS + MEASURED_STEPS + 3 * ahead


class RankPace:
    """The pace of several ranks, measured by the first."""

    def __init__(self, seconds: float, start: int, ahead: int, clock: Callable[[], float] = time.monotonic) -> None:
        """As `PaceMeter`; `ahead` as in `held_after`."""
        self._seconds, self._start, self._clock = seconds, start, clock
        self._free = start + held_after(ahead)  # train steps that have no checkpoint among them
        self._began: tuple[float, int] | None = None

    def steps(self, done: int, planned: int) -> int | None:
        """As `PaceMeter.steps`; no multiple of the result is among the steps that any rank has planned."""
        if done < WARM_UP_STEPS:
            return None
        now_s = self._clock()
        began_s, before = self._began = self._began or (now_s, done)
        if done - before < MEASURED_STEPS:
            return None
        steps = max(1, round(self._seconds * (done - before) / max(now_s - began_s, 1e-6)))
        while self._free // steps > self._start // steps:
            steps += 1
        return steps

    def must_wait(self, planned: int) -> bool:
        return False


class AwaitedPace:
    """The interval that the first rank has found, for another rank."""

    def __init__(self, read: Callable[[], int | None], ahead: int) -> None:
        """`read`: the interval, once the file is there."""
        self._read, self._held_after = read, held_after(ahead)

    def steps(self, done: int, planned: int) -> int | None:
        return self._read() if done >= WARM_UP_STEPS else None

    def must_wait(self, planned: int) -> bool:
        return planned >= self._held_after
