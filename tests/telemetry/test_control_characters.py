"""No name or cell of a user's file reaches a terminal with a control character in it."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from rich.table import Table

from rowcast.analysis.new.new import new
from rowcast.runtime.errors import printable
from rowcast.runtime.telemetry.format_numbers import stdout_console
from rowcast.runtime.telemetry.logs import get_logger, print_line, say, setup_logging

ODD = "".join(map(chr, [*range(32), *range(0x7F, 0xA0)])).replace("\n", "") + "\x1b[2J\u202e\u2066\U000e0001"


def table_of(text: str) -> Table:
    table = Table(text, title=text)
    table.add_row(text)
    return table


DOORS: dict[str, Callable[[str], object]] = {
    "a table": lambda text: stdout_console().print(table_of(text)),
    "a line": lambda text: stdout_console().print(text, markup=False, soft_wrap=True),
    "a sentence": lambda text: say("prefetcher", text),
    "a script's line": print_line,
    "a log's value": lambda text: get_logger().warning("odd", path=text),
    "a log's event": lambda text: get_logger().warning(text),
}


@pytest.mark.parametrize("door", DOORS)
def test_control_characters_are_escaped(door: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("test", json=False)
    DOORS[door](f"a{ODD}b")
    written = "".join(capsys.readouterr())
    assert "\\x0" in written
    assert all(letter.isprintable() or letter == "\n" for letter in written)


def test_a_new_job_shows_a_columns_name_escaped_and_means_the_name_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = f"user{ODD}"
    columns = {"label": [0, 1] * 50, odd: [f"u{number % 7}" for number in range(100)], f"out{ODD}": [None] * 100}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    new(str(tmp_path / "rows.parquet"))
    out, err = capsys.readouterr()
    assert all(letter.isprintable() or letter == "\n" for letter in out + err)
    assert printable(odd) in err
    assert tomllib.loads(out)["data"]["columns"]["hash"] == [odd]
