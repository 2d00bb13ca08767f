"""How every command of this package says what it found: tables, sentences, or one line of JSON."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rowcast.runtime.telemetry.format_numbers import print_json, stdout_console

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
