"""`checkpoint.every = "10m"`: how many train steps ten minutes are, found once and kept with the checkpoints.

    start of the run | pace is measured: no checkpoint | N steps | N steps | ...       a restart reads N and never measures again

So a plan stays a function of job, data, step and this number; what the run computes does not depend on it at all.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from rowcast.runtime.checkpoint_manifest import write_durably
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import RowcastError

FILE = "interval.json"  # in the folder of the checkpoints
LONGEST_MEASUREMENT_S = 15.0
LEAST_STEPS = 10  # where that many do not take half of the interval
SKIPPED_STEPS = 2  # compiling makes the first ones slow


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds."""

    every: str  # checkpoint.every, as the job had it
    steps: int  # train steps


def read_interval(root: Path, every: str) -> int | None:
    """Train steps between checkpoints, where the run in this folder has fixed them for `every`."""
    try:
        found = msgspec.json.decode((root / FILE).read_bytes(), type=Interval)
    except (OSError, msgspec.DecodeError):
        return None
    return found.steps if found.every == every and found.steps >= 1 else None


def keep_interval(disk: Disk, root: Path, every: str, steps: int) -> None:
    """Raises RowcastError where the disk does not take it."""
    try:
        if not root.exists():
            disk.mkdir(root)
        write_durably(root / FILE, msgspec.json.encode(Interval(every=every, steps=steps)), disk)
    except OSError as error:
        raise RowcastError(
            f"{root}: nothing can be written there ({error.strerror}); free space and run again"
        ) from None


class PaceMeter:
    """Asked after every step until it knows. `seconds`: the time between checkpoints; `start`: train steps before this incarnation."""

    def __init__(self, seconds: float, start: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._start, self._clock = seconds, start, clock
        self._began: tuple[float, int] | None = None  # seconds, steps done then
        # one measurement was made and thrown away: caches fill and pages are touched while it lasts
        self._is_warm = False

    def steps(self, done: int, planned: int) -> int | None:
        """Train steps that take `seconds`; None: not known yet. `done`: steps done in this incarnation; `planned`: train steps of the run
        that were planned. No multiple of the answer lies among those planned here, so that a restart plans them again as they were."""
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
