"""Records a run as marks of its counters, for the run report and for TensorBoard.

    time     first step                            last step
             |----|----|----|----|----|----|----|--|
    marks    0    1    2    3    4    5    6    7  8       at MAX_MARKS,
    kept     0         2         4         6       8       every second one is dropped and the interval doubles

A mark holds the totals of the counters, so dropping one costs resolution but no counts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rowcast.trainer.step.metrics import TrainerCounters

EVERY_S = 1.0
MAX_MARKS = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryMark:
    """The counters at one moment; all but `train_step` count from the start of this process."""

    time_s: float  # by the history's clock
    train_step: int  # train steps of the run so far
    train_steps: int
    steps: int  # train and evaluation steps
    samples: int  # of train steps, over all ranks
    eval_samples: int
    stalls: tuple[float, ...]  # seconds, in the order of metrics.StallReason
    unique_rows: int
    hits: int
    bytes_to_device: int  # rows and arrays of plans
    bytes_from_device: int


Marked = Callable[[HistoryMark, HistoryMark], None]  # the mark before, and the new one


def ignore(before: HistoryMark, mark: HistoryMark) -> None:
    """Implements `Marked` if nothing uses the marks."""


class History:
    """Marks of one process, over all its attempts. The main thread calls every method."""

    def __init__(self, counters: TrainerCounters, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` is that of `TrainingLoop.first_step_s`."""
        self.marks: list[HistoryMark] = []
        self.starts: list[int] = []  # for each attempt with a step: the train steps of the run before it
        self._marked: Marked = ignore
        self._counters = counters
        self._clock = clock
        self._every_s = EVERY_S
        self._next_s = 0.0
        self._train_steps_before = 0
        self._beginning: HistoryMark | None = None

    def begin(self, first_train_step: int, marked: Marked = ignore) -> None:
        """Begins an attempt after `first_train_step` train steps of the run. Waits before its first step are start-up.

        Calls `marked` with each of the attempt's marks and the mark before it."""
        self._marked = marked
        self._train_steps_before = first_train_step - self._counters.train_steps
        self._beginning = self._mark(0.0)
        self._next_s = 0.0

    def update(self, first_step_s: float | None) -> None:
        """Sets a mark if it is due; otherwise costs one reading of the clock.

        `first_step_s`: when the attempt's first step began."""
        now_s = self._clock()
        if now_s < self._next_s or first_step_s is None:
            return
        if self._beginning is not None:
            self._open(self._beginning, first_step_s)
        else:
            self._append(self._mark(now_s))
        self._next_s = now_s + self._every_s

    def close(self, first_step_s: float | None) -> None:
        """Sets the last mark and drops one set just before: speeds over an instant mean nothing."""
        if first_step_s is None:
            return
        if self._beginning is not None:
            self._open(self._beginning, first_step_s)
        before, now_s = self.marks[-1], self._clock()
        self._append(self._mark(now_s))
        if len(self.marks) > 2 and now_s - before.time_s < self._every_s / 2:
            del self.marks[-2]

    def _open(self, beginning: HistoryMark, first_step_s: float) -> None:
        """Sets the first mark, which includes counts before the first step."""
        self.starts.append(beginning.train_step)
        self._append(replace(beginning, time_s=first_step_s))
        self._beginning = None

    def _append(self, mark: HistoryMark) -> None:
        if len(self.marks) >= MAX_MARKS:
            del self.marks[1::2]
            self._every_s *= 2
        self.marks.append(mark)
        if len(self.marks) > 1:
            self._marked(self.marks[-2], mark)

    def _mark(self, now_s: float) -> HistoryMark:
        counters = self._counters
        return HistoryMark(
            time_s=now_s,
            train_step=self._train_steps_before + counters.train_steps,
            train_steps=counters.train_steps,
            steps=counters.train_steps + counters.eval_steps,
            samples=counters.shared_samples,
            eval_samples=counters.shared_eval_samples,
            stalls=tuple(counters.stalls.values()),
            unique_rows=counters.total("unique_rows"),
            hits=counters.total("hits"),
            bytes_to_device=counters.total("row_bytes_to_device") + counters.plan_bytes_to_device,
            bytes_from_device=counters.total("row_bytes_from_device"),
        )
