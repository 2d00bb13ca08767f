"""Progress of an analysis command, on stderr."""

import sys
from collections.abc import Callable
from time import monotonic
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

EVERY_S = 5.0  # between lines where there is no terminal

Tick = Callable[[], None]


class AnalysisProgress:
    """Shows nothing."""

    def begin(self, what: str, total: int | None) -> Tick:
        """Starts a task of `total` steps (None: unknown). Call the returned function after each step."""
        return lambda: None


class ProgressBar(AnalysisProgress):
    """On stderr: a bar on a terminal, erased at the end, or lines. Use as a context manager."""

    def __init__(self) -> None:
        console = Console(stderr=True, force_terminal=None if sys.stderr.isatty() else False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("")
        self._what, self._total, self._done, self._said = "", "", 0, monotonic()

    def begin(self, what: str, total: int | None) -> Tick:
        self._bar.reset(self._task, description=what, total=total)
        self._what, self._total, self._done = what, "" if total is None else f" of {total:,}", 0
        return self._tick

    def _tick(self) -> None:
        self._bar.advance(self._task)
        self._done += 1
        if self._bar.disable and monotonic() - self._said > EVERY_S:
            self._said = monotonic()
            sys.stderr.write(f"{self._what}: {self._done:,}{self._total}\n")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
