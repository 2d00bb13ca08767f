"""How every command of this package shows its progress and says what it found: tables, sentences, or a line of JSON."""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from time import monotonic
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from rowcast.runtime.telemetry.format_numbers import print_json, stdout_console

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


FILE_WIDTH = 160  # if the output is not a terminal
CHOSEN = "bold green"
R = TypeVar("R")
Part = Table | Text | str


def table_of(
    rows: Iterable[R],
    columns: Mapping[str, Callable[[R], str]],
    *,
    left: Collection[str] = (),
    padding: int = 2,
    chosen: Callable[[R], bool] = lambda row: False,
) -> Table:
    """A line for each row. Columns in `left` are aligned left; `chosen` rows are coloured."""
    found = Table(box=None, padding=(0, padding, 0, 0), header_style="bold", pad_edge=False)
    for name in columns:
        found.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        found.add_row(*(Text(cell(row)) for cell in columns.values()), style=CHOSEN if chosen(row) else "")
    return found


def show(value: object, parts: Iterable[Part], *, as_json: bool) -> None:
    """Prints the value as JSON, or the parts that say the same."""
    if as_json:
        print_json(value)
    else:
        tell(parts, stdout_console())


def tell(parts: Iterable[Part], console: Console) -> None:
    """Prints parts; tables stand between empty lines, and a sentence is one line of a file."""
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    before: Part | None = None
    for part in parts:
        if before is not None and (isinstance(part, Table) or isinstance(before, Table)):
            console.print()
        console.print(Text(part) if isinstance(part, str) else part, soft_wrap=not console.is_terminal)
        before = part
