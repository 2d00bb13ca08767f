"""Shows a run on stdout while it trains, and records it as marks of its counters, for the run report and TensorBoard.

On a terminal there are a progress bar and live figures, elsewhere lines.

    time     first step                            last step
             |----|----|----|----|----|----|----|--|
    marks    0    1    2    3    4    5    6    7  8       at MAX_MARKS,
    kept     0         2         4         6       8       every second one is dropped and the interval doubles

A mark holds the totals of the counters, so dropping one costs resolution but no counts.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column

from rowcast.protocol.messages import Mode
from rowcast.runtime.telemetry.format_numbers import (
    LOST,
    LastingStream,
    human_count,
    human_seconds,
    metric_text,
    percent,
    plural,
    stdout_console,
)
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.models.evaluate import Evaluation, TaskEvaluation
from rowcast.trainer.step.metrics import TrainerCounters

EVERY_S = 1.0
MAX_MARKS = 600
LIVE_EVERY_S = 0.25
LINE_EVERY_S = 5.0
FIRST_STEPS = 5  # steps after the first one before the first line, however short they are
WINDOW_S = 10.0  # speeds are averaged over about this time
WIDE = 120  # least columns for the bar beside the figures
BAR_WIDTH = 20  # characters


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


def mark_of(counters: TrainerCounters, now_s: float, train_steps_before: int) -> HistoryMark:
    """`train_steps_before`: train steps of the run that these counters do not count."""
    return HistoryMark(
        time_s=now_s,
        train_step=train_steps_before + counters.train_steps,
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


Marked = Callable[[HistoryMark, HistoryMark], None]  # the mark before, and the new one


def ignore(before: HistoryMark, mark: HistoryMark) -> None:
    """Implements `Marked` if nothing uses the marks."""


class MarkHistory:
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
        self._beginning = mark_of(self._counters, 0.0, self._train_steps_before)
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
            self._append(mark_of(self._counters, now_s, self._train_steps_before))
        self._next_s = now_s + self._every_s

    def close(self, first_step_s: float | None) -> None:
        """Sets the last mark and drops one set just before: speeds over an instant mean nothing."""
        if first_step_s is None:
            return
        if self._beginning is not None:
            self._open(self._beginning, first_step_s)
        before, now_s = self.marks[-1], self._clock()
        self._append(mark_of(self._counters, now_s, self._train_steps_before))
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


class TerminalProgress:
    """Shows the counters. Between refreshes, `update` costs one reading of the clock, so it may be called often."""

    def __init__(
        self,
        counters: TrainerCounters,
        total_steps: int | None,
        *,
        first_step: int = 0,
        mode: Mode = "train",
        eval_steps: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total_steps`: train steps of the run, if known; `first_step`: train steps before this attempt.

        `eval_steps`: steps per evaluation, if known. `console` writes to stdout by default."""
        self._counters, self._mode = counters, mode
        self._before = first_step - counters.train_steps
        self._total_steps = eval_steps if mode == "eval" else total_steps
        self._console = console or stdout_console()
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._clock = clock
        self._every_s = LIVE_EVERY_S if self._is_live else LINE_EVERY_S
        self._marks: deque[HistoryMark] = deque(maxlen=max(2, round(WINDOW_S / self._every_s)))
        self._next_s = 0.0
        self._at_start = self._steps_done()
        self._begun = False  # the first step is done
        self._is_first = True  # no line was shown yet
        self._shown_steps = 0  # in the newest line
        self._live: Progress | None = None
        self._has_lost_lines = False

    def start(self) -> None:
        self._shown_steps = self._steps_of(self._from_here())
        if not self._is_live:
            return
        bar = [BarColumn(BAR_WIDTH)] if self._console.width >= WIDE else []
        self._live = Progress(
            *(bar if self._total_steps is not None else [SpinnerColumn("line", finished_text="")]),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self._console,
            auto_refresh=False,
            # log lines on a terminal appear above the live line; a log file is not touched
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._live.add_task("waiting for the first step", total=self._total_steps)
        self._live.start()
        self._live.refresh()
        # a second signal ends the process at once and must not leave the terminal without a cursor
        self._console.show_cursor(True)

    def update(self) -> None:
        """Refreshes if it is due, but not before the first step, because speeds count from it."""
        done = self._steps_done() - self._at_start
        if not self._begun:
            self._begun = done > 0
            if self._begun:
                self._from_here()
        elif self._clock() >= self._next_s or (self._is_first and done > FIRST_STEPS):
            self._refresh()

    def evaluation(self, result: Evaluation) -> None:
        self._print(
            f"eval after {plural(result.train_step, 'train step')}: "
            f"{evaluation_text(result)}" + "".join(f"; {task.label}: {task_text(task)}" for task in result.tasks)
        )

    def close(self) -> None:
        """Shows the last state and leaves it there. Idempotent."""
        if self._live is not None:
            self._refresh(is_over=True)
            self._live.stop()
            self._live = None
        elif self._shown_steps != self._steps_of(self._mark()):
            self._refresh()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _steps_done(self) -> int:
        return self._counters.train_steps + self._counters.eval_steps

    def _from_here(self) -> HistoryMark:
        self._marks.clear()
        self._marks.append(self._mark())
        self._next_s = self._marks[-1].time_s + self._every_s
        return self._marks[-1]

    def _mark(self) -> HistoryMark:
        return mark_of(self._counters, self._clock(), self._before)

    def _steps_of(self, mark: HistoryMark) -> int:
        """Returns the steps that the line counts: train steps of the run, or those of an evaluation by itself."""
        return mark.steps - mark.train_steps if self._mode == "eval" else mark.train_step

    def _refresh(self, *, is_over: bool = False) -> None:
        self._marks.append(self._mark())
        first, last = self._marks[0], self._marks[-1]
        steps, self._is_first, self._next_s = self._steps_of(last), False, last.time_s + self._every_s
        line = progress_line(self._counters, self._total_steps, steps, steps - self._steps_of(first), first, last)
        self._shown_steps = steps
        if self._live is None:
            self._print(line)
        else:
            total = steps if is_over and self._total_steps is None else self._total_steps
            self._live.update(self._task, description=line, completed=steps, total=total, refresh=True)

    def _print(self, line: str) -> None:
        if self._live is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif not write(self._console, f"{line}\n") and not self._has_lost_lines:
            self._has_lost_lines = True
            get_logger().warning("stdout cannot be written; training continues without progress lines")


def write(console: Console, text: str) -> bool:
    """Writes and flushes. False if lines were lost."""
    lost_lines = LOST.lines
    LastingStream(console.file).write(text)
    return LOST.lines == lost_lines


def progress_line(
    counters: TrainerCounters, total_steps: int | None, steps: int, done: int, first: HistoryMark, last: HistoryMark
) -> str:
    """Formats the state in one line, after `steps` steps. `done`: those between the two marks, as the speed is."""
    seconds = last.time_s - first.time_s
    parts = [f"step {steps:,}" if total_steps is None else f"step {steps:,}/{total_steps:,}"]
    if counters.loss is not None:
        parts.append(f"loss {counters.loss:.4f}")
    if total_steps is not None and done and steps < total_steps:  # before what a narrow terminal may cut off
        parts.append(f"{human_seconds((total_steps - steps) * seconds / done)} left")
    if seconds > 0:
        samples = last.samples + last.eval_samples - first.samples - first.eval_samples
        parts.append(f"{human_count(samples / seconds)} samples/s")
        parts.append(f"stalled {percent((last.stalls[0] - first.stalls[0]) / seconds)}")  # for rows
    if last.unique_rows:
        parts.append(f"hit ratio {percent(last.hits / last.unique_rows)}")
    return "  ".join(parts)


def evaluation_text(result: Evaluation) -> str:
    """Formats what an evaluation has: a model with a custom loss may have no logits, and few have ranks."""
    text = partial(metric_text, num_samples=result.num_samples)
    texts = [] if result.accuracy is None else [f"AUC {text(result.auc)}"]
    if result.logloss is not None:
        texts.append(f"{'loss' if result.is_own_loss else 'log loss'} {text(result.logloss)}")
    if result.normalized_entropy is not None:
        texts.append(f"normalized entropy {text(result.normalized_entropy)}")
    if result.accuracy is not None:
        texts.append(f"accuracy {text(result.accuracy)}")
    texts += [f"{name.upper()} {text(value)}" for name, value in result.ranking.items()]
    return ", ".join([*texts, *(f"{name} {text(value)}" for name, value in result.means.items() if value is not None)])


def task_text(task: TaskEvaluation) -> str:
    """Formats the result of one of several labels."""
    if task.logloss is None:
        return "no log loss" if task.num_labels else "no known label"
    text = partial(metric_text, num_samples=task.num_labels)
    entropy = "" if task.normalized_entropy is None else f", normalized entropy {text(task.normalized_entropy)}"
    return f"AUC {text(task.auc)}, log loss {text(task.logloss)}{entropy}, {task.num_labels:,} known"
