"""Shows a run on stdout: a progress bar and live figures on a terminal, lines elsewhere, and a summary."""

import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rowcast.protocol.messages import Mode, TierTotals
from rowcast.runtime.telemetry.format_numbers import (
    human_bytes,
    human_count,
    human_seconds,
    percent,
    plural,
    stdout_console,
)
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.execute.metrics import TrainerCounters
from rowcast.trainer.report.report_json import Evaluation, Report

LIVE_EVERY_S = 0.25
LINE_EVERY_S = 5.0
FIRST_STEPS = 5  # steps after the first one until the first line is shown, however short they are
WINDOW_S = 10.0  # speeds are averaged over about this time
WIDE = 120  # columns from which on the bar and the figures share a line
BAR_WIDTH = 20  # of a bar that shares a line


class TerminalMark(NamedTuple):
    """The counters at one moment."""

    time_s: float
    steps: int
    samples: int
    waited_s: float


class TerminalProgress:
    """Shows the counters. Between refreshes `update` costs one reading of the clock, so it may be called often."""

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
        """`total_steps`: train steps of the run, if known; `first_step`: those before this attempt.

        `eval_steps`: steps per evaluation, if known. `console` writes to stdout by default.
        """
        self._before = first_step - counters.train_steps
        self._counters = counters
        self._total_steps = total_steps
        self._mode, self._eval_steps = mode, eval_steps
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
        self._live: Live | None = None
        self._spinner = Spinner("line")  # replaces the bar if the length of the run is unknown
        self._closed_pipe = self._is_over = False

    def start(self) -> None:
        self._shown_steps = self._from_here().steps
        if not self._is_live:
            return
        self._live = Live(
            Text("waiting for the first step"),
            console=self._console,
            auto_refresh=False,
            # log lines on a terminal appear above the live line; a log file is not touched
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start(refresh=True)
        # a second signal ends the process at once and must not leave the terminal without a cursor
        self._console.show_cursor(True)

    def update(self) -> None:
        """Refreshes if it is time, but not before the first step, from which speeds count."""
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
            f"{evaluation_text(result.auc, result.logloss, result.accuracy)}"
        )

    def close(self) -> None:
        """Shows the last state, which stays. Idempotent."""
        if self._live is not None:
            self._is_over = True
            self._refresh()
            self._live.stop()
            self._live = None
        elif self._shown_steps != self._mark().steps:
            self._refresh()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            self._before + counters.train_steps,
            counters.samples + counters.eval_samples,
            counters.waited_s,
        )

    def _refresh(self) -> None:
        self._marks.append(self._mark())
        self._next_s = self._marks[-1].time_s + self._every_s
        self._is_first, self._shown_steps = False, self._marks[-1].steps
        line = progress_line(self._counters, self._total_steps, self._marks[0], self._marks[-1])
        if self._live is None:
            self._print(line)
        else:
            self._live.update(self._beside_bar(Text(line, no_wrap=True, overflow="ellipsis")), refresh=True)

    def _beside_bar(self, figures: Text) -> RenderableType:
        done, total = self._marks[-1].steps, self._total_steps
        if self._mode == "eval":
            done, total = self._counters.eval_steps, self._eval_steps
        if total is None:
            return figures if self._is_over else in_a_row(self._spinner, figures)
        if self._console.width >= WIDE:
            return in_a_row(ProgressBar(total, done, width=BAR_WIDTH), figures)
        lines = Table.grid(expand=True)
        lines.add_row(ProgressBar(total, done))
        lines.add_row(figures)
        return lines

    def _print(self, line: str) -> None:
        if self._closed_pipe:
            return
        if self._live is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif not write(self._console, f"{line}\n"):
            self._closed_pipe = True
            get_logger().warning("stdout was closed; training continues without progress lines")


def in_a_row(first: RenderableType, figures: Text) -> Table:
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_row(first, figures)
    return row


def write(console: Console, text: str) -> bool:
    """Writes and flushes; False if the reader of a pipe has gone, in which case rich would end the process."""
    try:
        console.file.write(text)
        console.file.flush()
    except BrokenPipeError:
        return False
    return True


def progress_line(counters: TrainerCounters, total_steps: int | None, first: TerminalMark, last: TerminalMark) -> str:
    """The state in one line; speed and stall share are those between the two marks."""
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


BESIDE = ("gather", "fill")


def print_summary(report: Report, console: Console | None = None, page: Path | None = None) -> None:
    """Prints the report, and where the page is, on stdout or `console`.

    A closed pipe is not an error, because the report is on disk.
    """
    table = Table.grid(padding=(0, 2))
    for name, value in summary_rows(report):
        table.add_row(name, value)
    target = console or stdout_console()
    with target.capture() as text:
        target.print(summary_title(report), style="bold", highlight=False, soft_wrap=True)
        target.print(table, highlight=False, soft_wrap=True)
    lines = [line.rstrip() for line in text.get().splitlines()]
    if page is not None:  # not wrapped, however long it is
        lines.append(f"{'report':{max(len(name) for name, _ in summary_rows(report)) + 2}}{page}")
    write(target, "\n".join(["", *lines, ""]))


def summary_title(report: Report) -> str:
    if report.eval_steps and not report.steps and report.finished:
        return f"rowcast: evaluated after {report.train_steps:,} train steps in {human_seconds(report.wall_s)}"
    how = "finished" if report.finished else f"stopped by {report.stopped_by or 'request'}"
    here = "" if report.steps == report.train_steps else f" ({report.steps:,} of this process)"
    return f"rowcast: {how} after {report.train_steps:,} steps{here} in {human_seconds(report.wall_s)}"


def summary_rows(report: Report) -> list[tuple[str, str]]:
    rows = []
    if report.steps or not report.eval_steps:
        rows.append(("samples", f"{report.samples:,} ({human_count(report.samples_per_s)}/s)"))
        rows.append(("mean loss", "none" if report.loss is None else f"{report.loss:.6f}"))
    if report.logloss is not None:
        rows.append(("evaluation", evaluation_text(report.auc, report.logloss, report.accuracy)))
    hits = "" if report.hit_ratio is None else f", hit ratio {percent(report.hit_ratio)}"
    return [
        *rows,
        ("look-ups", f"{report.lookups:,}, distinct within a step {report.unique_rows:,}{hits}"),
        (
            "rows",
            f"{report.rows_fetched:,} fetched, {report.rows_evicted:,} evicted, "
            f"{report.rows_written_back:,} written back",
        ),
        *([] if report.tier is None else tier_rows(report.tier)),
        ("waited for rows", f"{human_seconds(report.trainer_wait_s)} ({percent(report.stall_share)} of the time)"),
        ("each step", phases(report.phase_ms, beside=False)),
        ("moving rows", phases(report.phase_ms, beside=True)),
        (
            "traffic",
            f"{human_bytes(report.bytes_to_device)} to the device, {human_bytes(report.bytes_from_device)} back",
        ),
        ("device memory", device_memory(report)),
        ("host memory", f"{human_bytes(report.host_bytes)} in the prefetcher"),
        ("processes", f"prefetcher {report.pids['prefetcher']}, trainer {report.pids['trainer']}"),
        ("device", f"{report.device}, threads: {report.threads}, {'pinned' if report.pinned else 'unpinned'} rings"),
    ]


def tier_rows(tier: TierTotals) -> list[tuple[str, str]]:
    disk = f"; {human_bytes(tier.disk_bytes)} of disk" if tier.disk_bytes else ""
    return [
        ("cold tier", f"{tier.rows_from_cold:,} rows from it, {tier.late_rows:,} late, {tier.rows_to_cold:,} to it"),
        ("its traffic", f"{human_bytes(tier.bytes_read)} read, {human_bytes(tier.bytes_written)} written{disk}"),
    ]


def device_memory(report: Report) -> str:
    parts = {"rows": report.cache_bytes, "staging": report.staging_bytes, "plans": report.plans_bytes}
    listed = ", ".join(f"{human_bytes(nbytes)} {name}" for name, nbytes in parts.items())
    return f"{listed}; all {human_bytes(report.device_bytes)}"


def evaluation_text(auc: float | None, logloss: float, accuracy: float | None) -> str:
    """Without AUC and accuracy if a model with a loss of its own has no logits."""
    if accuracy is None:
        return f"loss {logloss:.6f}"
    return f"AUC {'undefined' if auc is None else f'{auc:.6f}'}, log loss {logloss:.6f}, accuracy {accuracy:.6f}"


def phases(phase_ms: dict[str, float], *, beside: bool) -> str:
    """`beside`: the phases that move rows, which run in parallel with a step on a device; otherwise the others."""
    listed = [
        f"{name} {milliseconds:.1f}"
        for name, milliseconds in phase_ms.items()
        if (name in BESIDE) == beside and (name != "exchange" or milliseconds)  # a trainer alone has none
    ]
    return f"{', '.join(listed)} ms"
