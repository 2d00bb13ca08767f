"""Shows a run on stdout: a progress bar and live figures on a terminal, lines elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column

from rowcast.protocol.messages import Mode
from rowcast.runtime.telemetry.format_numbers import (
    LOST,
    LastingStream,
    human_count,
    human_seconds,
    percent,
    plural,
    stdout_console,
)
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.models.evaluate import Evaluation, TaskEvaluation
from rowcast.trainer.report.report_json import Report
from rowcast.trainer.step.metrics import TrainerCounters

LIVE_EVERY_S = 0.25
LINE_EVERY_S = 5.0
FIRST_STEPS = 5  # steps after the first one before the first line, however short they are
WINDOW_S = 10.0  # speeds are averaged over about this time
WIDE = 120  # least columns for the bar beside the figures
BAR_WIDTH = 20  # characters


class TerminalMark(NamedTuple):
    """The counters at one moment."""

    time_s: float
    steps: int
    samples: int
    waited_s: float


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
        self._before = 0 if mode == "eval" else first_step - counters.train_steps
        self._total_steps = eval_steps if mode == "eval" else total_steps
        self._console = console or stdout_console()
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._clock = clock
        self._every_s = LIVE_EVERY_S if self._is_live else LINE_EVERY_S
        self._marks: deque[TerminalMark] = deque(maxlen=max(2, round(WINDOW_S / self._every_s)))
        self._next_s = 0.0
        self._at_start = self._steps_done()
        self._begun = False  # the first step is done
        self._is_first = True  # no line was shown yet
        self._shown_steps = 0  # in the newest line
        self._live: Progress | None = None
        self._has_lost_lines = False

    def start(self) -> None:
        self._shown_steps = self._from_here().steps
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
        elif self._shown_steps != self._mark().steps:
            self._refresh()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _steps_done(self) -> int:
        return self._counters.train_steps + self._counters.eval_steps

    def _from_here(self) -> TerminalMark:
        self._marks.clear()
        self._marks.append(self._mark())
        self._next_s = self._marks[-1].time_s + self._every_s
        return self._marks[-1]

    def _mark(self) -> TerminalMark:
        counters = self._counters
        return TerminalMark(
            self._clock(),
            self._before + (counters.eval_steps if self._mode == "eval" else counters.train_steps),
            counters.shared_samples + counters.shared_eval_samples,
            counters.stalls["rows"],
        )

    def _refresh(self, *, is_over: bool = False) -> None:
        self._marks.append(self._mark())
        self._next_s = self._marks[-1].time_s + self._every_s
        self._is_first, self._shown_steps = False, self._marks[-1].steps
        line = progress_line(self._counters, self._total_steps, self._marks[0], self._marks[-1])
        if self._live is None:
            self._print(line)
        else:
            steps = self._marks[-1].steps
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


def progress_line(counters: TrainerCounters, total_steps: int | None, first: TerminalMark, last: TerminalMark) -> str:
    """Formats the state in one line; speed and stall fraction are between the two marks."""
    seconds = last.time_s - first.time_s
    parts = [f"step {last.steps:,}" if total_steps is None else f"step {last.steps:,}/{total_steps:,}"]
    if counters.loss is not None:
        parts.append(f"loss {counters.loss:.4f}")
    if seconds > 0:
        parts.append(f"{human_count((last.samples - first.samples) / seconds)} samples/s")
        parts.append(f"stalled {percent((last.waited_s - first.waited_s) / seconds)}")
    unique_rows = counters.total("unique_rows")
    if unique_rows:
        parts.append(f"hit ratio {percent(counters.total('hits') / unique_rows)}")
    if total_steps is not None and last.steps > first.steps and last.steps < total_steps:
        parts.append(f"{human_seconds((total_steps - last.steps) * seconds / (last.steps - first.steps))} left")
    return "  ".join(parts)


def evaluation_text(found: Evaluation | Report) -> str:
    """Formats what the newest evaluation has: a model with a custom loss may have no logits, and few have ranks."""
    texts = [] if found.accuracy is None else [auc_text(found.auc)]
    if found.logloss is not None:
        texts.append(f"{'loss' if found.is_own_loss else 'log loss'} {found.logloss:.6f}")
    if found.normalized_entropy is not None:
        texts.append(f"normalized entropy {found.normalized_entropy:.6f}")
    if found.accuracy is not None:
        texts.append(f"accuracy {found.accuracy:.6f}")
    return ", ".join([*texts, *(f"{name.upper()} {value:.6f}" for name, value in found.ranking.items())])


def task_text(task: TaskEvaluation) -> str:
    """Formats the result of one of several labels."""
    if task.logloss is None:
        return "no log loss" if task.num_labels else "no known label"
    entropy = "" if task.normalized_entropy is None else f", normalized entropy {task.normalized_entropy:.6f}"
    return f"{auc_text(task.auc)}, log loss {task.logloss:.6f}{entropy}, {task.num_labels:,} known"


def auc_text(auc: float | None) -> str:
    return f"AUC {'undefined' if auc is None else f'{auc:.6f}'}"
