"""Explains why a line does not fit its header, by reading cell by cell after the fast parser has refused its block."""

import csv
import re
from dataclasses import dataclass
from typing import Literal

CellKind = Literal["integer", "whole", "number", "boolean", "text"]
TRUE = ("true", "True", "TRUE", "yes", "Yes", "YES", "t", "T", "y", "Y")
FALSE = ("false", "False", "FALSE", "no", "No", "NO", "f", "F", "n", "N")
SPACES = " "  # the delimiter that is a run of spaces and tabs
BRACKETS = "[]"  # the separator of lists such as [1, 2]
BRACKETED = r"\s*\[\s*(.*?)\s*,?\s*\]\s*"
BRACKET_ITEM = r"""(?:^|,)\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^,]*?))\s*(?=,|$)"""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvLayout:
    header: list[str]  # or data.columns.names
    header_lines: int  # 0 with data.columns.names
    delimiter: str
    cells: dict[str, Cell]  # of the columns that are read

    @property
    def has_quotes(self) -> bool:
        return len(self.delimiter) == 1 and self.delimiter != SPACES


def line_error(layout: CsvLayout, content: bytes) -> str | None:
    """Returns the sentence after the line's number, or None for a good line."""
    header, cells, line = layout.header, layout.cells, content.removesuffix(b"\r").decode("utf-8", "replace")
    if not line:
        return ": the line is empty; remove it"
    if "\r" in line:
        return ": there is a carriage return within the line; remove it"
    try:
        fields = fields_of(line, layout.delimiter, strict=True)
    except csv.Error as error:
        if "end of data" in str(error):
            return ": a quoted field continues in the next line; remove line breaks within fields, or write Parquet"
        return f": the quotes do not match ({error}); double those within a field"
    if len(fields) != len(header):
        broken = layout.has_quotes and line.count('"') % 2
        why = "; a quoted field of an earlier line ends here: remove line breaks within fields" if broken else ""
        needed = f"the header's {len(header)}" if layout.header_lines else f"the {len(header)} of data.columns.names"
        return f": {len(fields)} fields instead of {needed}{why}"
    for name, field in zip(header, fields, strict=True):
        if name in cells:
            if cells[name].required and not field:
                return f", column {name}: the cell is empty; it must be 0 or 1"
            if (found := cell_error(field, cells[name])) is not None:
                return f", column {name}: {found}"
    return None


def fields_of(line: str, delimiter: str, *, strict: bool) -> list[str]:
    """Splits one line. Raises csv.Error. Only a delimiter of one character has quotes.

    The limit of a field is the process's, so it is raised for this line only.
    """
    if delimiter == SPACES:
        return line.split()
    if len(delimiter) > 1:
        return line.split(delimiter)
    limit = csv.field_size_limit(max(len(line), csv.field_size_limit()))
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=strict), [])
    finally:
        csv.field_size_limit(limit)


def cell_error(field: str, cell: Cell) -> str | None:
    if cell.separator == BRACKETS and field and not re.fullmatch(BRACKETED, field):
        return f"{field[:40]!r} is no list such as [1, 2]"
    bad = bad_item(field, cell)
    return None if bad is None else f"{bad[:40]!r} is not {KINDS[cell.kind]}"


def bad_item(field: str, cell: Cell) -> str | None:
    items = [field] if cell.separator is None else items_of(field, cell.separator)
    return next((item for item in items if item and not holds(item, cell.kind)), None)


def items_of(field: str, separator: str) -> list[str]:
    """Splits a cell that is a list. Items in brackets may be quoted as in Python."""
    if separator != BRACKETS:
        return field.split(separator)
    found = re.match(BRACKETED, field)
    inner = found[1] if found else ""
    found_items = re.finditer(BRACKET_ITEM, inner) if inner else ()
    return [own[3] or re.sub(r"\\(.)", r"\1", own[1] or own[2] or "") for own in found_items]


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
