"""Measures the time of each phase of a step.

HostClock      work runs when issued, as on a CPU: measured by the host's clock
DeviceClock    marks between the work on a stream, read when the host knows that the step is complete: never waits
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from rowcast.trainer.device.streams import CudaMark, Stream

# exchange: rows, sums of gradients and slices are packed, sent, awaited and added; loop.py names the others
Phase = Literal["gather", "fill", "exchange", "lookup", "forward", "backward", "update"]
Lap = Phase | Literal["ranks"]  # ranks: the time within `exchange` when collectives are in progress

Shown = Callable[[], AbstractContextManager[object]]  # records a span of the timeline


class Spent(Protocol):
    def __call__(self, lap: Lap, seconds: float, step: int, ended_s: float) -> None:
        """A lap of `step` took `seconds` and ended at `ended_s` (time.perf_counter())."""


class PhaseClock(Protocol):
    """Times the work on one stream: each step is a `begin` and its laps."""

    def begin(self, step: int) -> None: ...

    def lap(self, lap: Lap) -> None:
        """Assigns the work issued since `begin` or the last lap to this lap."""

    def complete(self, step: int) -> None:
        """Called when all work up to the end of `step` is done."""


def discard(lap: Lap, seconds: float, step: int, ended_s: float) -> None:
    """Implements `Spent` for a clock whose readings are not used."""


class HostClock:
    def __init__(self, spent: Spent = discard) -> None:
        self._spent = spent
        self._step = 0
        self._since_s = 0.0

    def begin(self, step: int) -> None:
        self._step, self._since_s = step, time.perf_counter()

    def lap(self, lap: Lap) -> None:
        now_s = time.perf_counter()
        self._spent(lap, now_s - self._since_s, self._step, now_s)
        self._since_s = time.perf_counter()  # the time of `spent` belongs to no phase

    def complete(self, step: int) -> None:
        pass


class DeviceClock:
    """On the timeline, a step's phases end when the host saw the step complete, up to one turn of the main loop
    late."""

    def __init__(self, stream: Stream, spent: Spent) -> None:
        self._stream = stream
        self._spent = spent
        self._marks: deque[tuple[int, Lap | None, CudaMark]] = deque()  # step, the lap that ends here, mark

    def begin(self, step: int) -> None:
        self._marks.append((step, None, self._stream.mark()))

    def lap(self, lap: Lap) -> None:
        self._marks.append((self._marks[-1][0], lap, self._stream.mark()))

    def complete(self, step: int) -> None:
        laps: list[tuple[Lap, float]] = []
        before: CudaMark | None = None
        while self._marks and self._marks[0][0] <= step:
            _, lap, mark = self._marks.popleft()
            if lap is not None and before is not None:
                laps.append((lap, mark.seconds_since(before)))
            before = mark
        ended_s = time.perf_counter()
        for lap, seconds in reversed(laps):
            self._spent(lap, seconds, step, ended_s)
            ended_s -= seconds


def phase_clock(stream: Stream, spent: Spent) -> PhaseClock:
    return DeviceClock(stream, spent) if stream.is_device else HostClock(spent)
