"""Shows the progress and the results of every command of this package: tables, sentences, or a line of JSON; and the
findings of `rowcast check`.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Literal, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from rowcast.runtime.errors import RowcastError
from rowcast.runtime.telemetry.format_numbers import print_json, stdout_console
from rowcast.runtime.telemetry.logs import get_logger

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


FILE_WIDTH = 2000  # if the output is not a terminal: a row of a table is one line of a file
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
    table = Table(box=None, padding=(0, padding, 0, 0), header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(row)) for cell in columns.values()), style=CHOSEN if chosen(row) else "")
    return table


def show(value: object, parts: Iterable[Part], *, as_json: bool) -> None:
    """Prints the value as JSON, or the equivalent parts."""
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


Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    level: Level  # error: a run would not start, or would fail; warning: it may fail, or not do what was intended
    subject: str = ""
    sentence: str  # with numbers; says what to change unless the level is ok


def ok(sentence: str) -> Finding:
    return Finding(level="ok", sentence=sentence)


def warning(sentence: str) -> Finding:
    return Finding(level="warning", sentence=sentence)


def error(sentence: str) -> Finding:
    return Finding(level="error", sentence=sentence)


def about(subject: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Gives a subject to the findings that have none."""
    yield from (finding if finding.subject else replace(finding, subject=subject) for finding in findings)


def findings_of(subject: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Returns the findings of a check. An exception, which a run would report too, becomes an error that ends the
    check."""
    printed: list[Finding] = []
    try:
        printed.extend(check())
    except RowcastError as raised:
        printed.append(error(str(raised)))
    except Exception as raised:  # noqa: BLE001 - a user's factory may raise anything, and the other checks still run
        get_logger().exception("unexpected error", check=subject)
        printed.append(error(f"unexpected error: {type(raised).__name__}: {raised}; the log has the traceback"))
    return list(about(subject, printed))
