"""Explains why a line does not fit its header, by reading cell by cell after the fast parser has refused its block."""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rowcast.prefetcher.readers.id_check import Location
from rowcast.runtime.errors import DataError

CellKind = Literal["integer", "whole", "number", "boolean", "text"]
TRUE = ("true", "True", "TRUE", "yes", "Yes", "YES", "t", "T", "y", "Y")
FALSE = ("false", "False", "FALSE", "no", "No", "NO", "f", "F", "n", "N")
KINDS: dict[CellKind, str] = {
    "integer": "an integer of 64 bits; set data.columns.hash = true to use strings as ids",
    "whole": "a whole number of 64 bits, as the column's first cell",
    "number": "a number",
    "boolean": "True or False (or yes and no), as the column's first cell",
    "text": "text",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """The content of a column's cells."""

    kind: CellKind
    separator: str | None = None  # of the items of a list
    required: bool = False  # an empty cell is an error


def refuse_line(
    lines: bytes, header: list[str], delimiter: str, cells: Mapping[str, Cell], location: Location, reason: str
) -> DataError:
    """Returns the error of the first bad line in `lines`; `location(i)` names the i-th line's file and number.

    `reason` is the fast parser's message, used if no line is bad.
    """
    split = lines.removesuffix(b"\n").split(b"\n")
    for i, line in enumerate(split):
        error = line_error(line.removesuffix(b"\r").decode("utf-8", "replace"), header, delimiter, cells)
        if error is not None:
            return DataError(f"{location(i)}{error}")
    return DataError(f"{location(0)}, or another of the {len(split)} lines decoded with it: {reason}")


def line_error(line: str, header: list[str], delimiter: str, cells: Mapping[str, Cell]) -> str | None:
    """Returns the sentence after the line's number, or None for a good line."""
    if not line:
        return ": the line is empty; remove it"
    if "\r" in line:
        return ": there is a carriage return within the line; remove it"
    try:
        fields = fields_of(line, delimiter, strict=True)
    except csv.Error as error:
        if "end of data" in str(error):
            return ": a quoted field continues in the next line; remove line breaks within fields, or write Parquet"
        return f": the quotes do not match ({error}); double those within a field"
    if len(fields) != len(header):
        broken = line.count('"') % 2
        why = "; a quoted field of an earlier line ends here: remove line breaks within fields" if broken else ""
        return f": {len(fields)} fields instead of the header's {len(header)}{why}"
    for name, field in zip(header, fields, strict=True):
        if name in cells:
            if cells[name].required and not field:
                return f", column {name}: the cell is empty; it must be 0 or 1"
            bad = bad_item(field, cells[name])
            if bad is not None:
                return f", column {name}: {bad[:40]!r} is not {KINDS[cells[name].kind]}"
    return None


def fields_of(line: str, delimiter: str, *, strict: bool) -> list[str]:
    """Splits one line. Raises csv.Error. The limit of a field is the process's, so it is raised for this line only."""
    limit = csv.field_size_limit(max(len(line), csv.field_size_limit()))
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=strict), [])
    finally:
        csv.field_size_limit(limit)


def bad_item(field: str, cell: Cell) -> str | None:
    items = [field] if cell.separator is None else field.split(cell.separator)
    return next((item for item in items if item and not holds(item, cell.kind)), None)


def holds(item: str, kind: CellKind) -> bool:
    if kind in ("integer", "whole"):
        return re.fullmatch(r"\s*-?[0-9]+\s*", item) is not None and -(2**63) <= int(item) < 2**63
    if kind == "boolean":
        return item in (*TRUE, *FALSE, "1", "0")
    return kind == "text" or is_number(item)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text
