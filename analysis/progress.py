"""Progress of an analysis command, on stderr."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

Tick = Callable[[], None]


class AnalysisProgress(Protocol):
    def begin(self, what: str, total: int | None) -> Tick:
        """Starts a task of `total` steps (None: unknown). Call the returned function after each step."""


class Silent:
    def begin(self, what: str, total: int | None) -> Tick:
        return lambda: None


class ProgressBar:
    """An `AnalysisProgress` on stderr if that is a terminal; erased at the end. Use as a context manager."""

    def __init__(self) -> None:
        console = Console(stderr=True, force_terminal=None if sys.stderr.isatty() else False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("")

    def begin(self, what: str, total: int | None) -> Tick:
        self._bar.reset(self._task, description=what, total=total)
        return lambda: self._bar.advance(self._task)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
