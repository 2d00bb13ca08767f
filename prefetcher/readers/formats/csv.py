"""Reads CSV with a header, plain or gzip: the columns that data.columns and the features name, typed by their roles.

    label, dense, weights    numbers; True and False if a column starts with one of them; an empty cell is NaN
    ids                      integers, or text under data.columns.hash, whose bytes are hashed; an empty cell is missing
    data.columns.lists       several items in a cell, between separators; an empty cell is an empty bag, an empty item
                             is missing

Cells may be quoted, and have line breaks within their quotes. The fast parser reads lines as if each were a row; only
where it finds fewer rows are records looked for, byte by byte, and one that is not whole waits for the next lines.

Explains why a line does not fit its header, by reading cell by cell after the fast parser has refused its block.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.arrow_rows import AS_IT_IS, Roles, RowDecoder, is_list, roles_of, typed
from rowcast.prefetcher.readers.copies import CopiedFiles, TextRules
from rowcast.prefetcher.readers.data_files import no_rows
from rowcast.prefetcher.readers.hashed_ids import is_all_missing, is_text
from rowcast.prefetcher.readers.id_check import CheckedFeature, IdCheck, Location, decoding, line_location
from rowcast.prefetcher.readers.reader import Columns
from rowcast.prefetcher.readers.row_reader import ColumnRows, RowReader, open_named_columns
from rowcast.prefetcher.readers.text_files import (
    CHUNK_BYTES,
    MOST_LINE_BYTES,
    LinePiece,
    first_lines,
    lines_of,
    open_text,
    pieces,
    refuse_line,
    whole_gzip,
)
from rowcast.runtime.errors import DataError, nearest

CellKind = Literal["integer", "whole", "number", "boolean", "text"]
TRUE = ("true", "True", "TRUE", "yes", "Yes", "YES", "t", "T", "y", "Y")
FALSE = ("false", "False", "FALSE", "no", "No", "NO", "f", "F", "n", "N")
OPEN = "a quoted field begins here and does not end; close its quotes, and double those within a field"
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
    """Returns the sentence after the line's number, or None for a good line, which may have breaks within quotes."""
    header, cells, line = layout.header, layout.cells, content.removesuffix(b"\r").decode("utf-8", "replace")
    if not line:
        return ": the line is empty; remove it"
    if "\r" in line.replace("\r\n", "\n"):
        return ": there is a carriage return within the line; remove it"
    try:
        fields = fields_of(line, layout.delimiter, strict=True)
    except csv.Error as error:
        if "end of data" in str(error):
            return f": {OPEN}"
        return f": the quotes do not match ({error}); double those within a field"
    if len(fields) != len(header):
        needed = f"the header's {len(header)}" if layout.header_lines else f"the {len(header)} of data.columns.names"
        return f": {len(fields)} fields instead of {needed}"
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
    match = re.match(BRACKETED, field)
    inner = match[1] if match else ""
    found_items = re.finditer(BRACKET_ITEM, inner) if inner else ()
    return [item[3] or re.sub(r"\\(.)", r"\1", item[1] or item[2] or "") for item in found_items]


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


NO_LINES = LinePiece(0, 0, b"")
SEPARATOR = "\x1f"  # between cells whose delimiter is not one character
ARROW_TYPES = {
    "integer": pa.int64(),
    "whole": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "text": pa.binary(),
}


def open_reader(job: Job, columns: Columns = "all") -> RowReader:
    """Raises ConfigError for a missing path or column, DataError for an empty or torn file or another header."""
    return open_named_columns(job, columns, rows_of)


def rows_of(job: Job, ids: IdCheck, part: Columns, paths: list[Path]) -> ColumnRows:
    columns = job.data.columns
    filled, header, first_row = beginning(paths, columns.delimiter, columns.names)
    roles = roles_of(job, filled[0], header, lambda: [name for name, cell in first_row.items() if is_number(cell)])
    layout = CsvLayout(
        header=header,
        header_lines=0 if columns.names else 1,
        delimiter=columns.delimiter,
        cells=cells_of(job, roles, first_row),
    )

    def columns_of(path: Path, stream: IO[bytes]) -> Iterator[tuple[Any, int]]:
        for batch, num_lines, location in batches_of(path, stream, layout):
            with decoding(location, batch.num_rows):
                columns = typed(batch, roles.features, location)
            yield columns, num_lines

    known = msgspec.to_builtins(
        [layout, [[feature.name, feature.rule] for feature in roles.features if feature.hashed]]
    )
    rules = TextRules(
        known=known, header_lines=layout.header_lines, columns=columns_of, place=partial(place_of, layout)
    )
    files = CopiedFiles(job, filled, rules)
    return ColumnRows(files, roles.names(part), RowDecoder(job, roles, ids), roles.dense, part)


def batches_of(path: Path, stream: IO[bytes], layout: CsvLayout) -> Iterator[tuple[Any, int, Location]]:
    """Yields pyarrow.RecordBatches of a file's rows, with the number of lines and the places of the rows. Raises
    DataError."""
    rest = NO_LINES
    for piece in pieces(stream, path, layout.header_lines):
        lines = joined(rest, piece)
        location = line_location(path, lines.first_line)
        with decoding(location, lines.num_lines):
            batch, location, rest = rows_in(lines, layout, location)
        if batch is not None:
            yield batch, lines.num_lines - rest.num_lines, location
        if len(rest.text) > MOST_LINE_BYTES * CHUNK_BYTES:
            break
    if rest.num_lines:
        raise DataError(f"{path}, line {rest.first_line}: {OPEN}")


def rows_in(lines: LinePiece, layout: CsvLayout, location: Location) -> tuple[Any | None, Location, LinePiece]:
    """Returns a pyarrow.RecordBatch and the places of its rows, and the lines of the last record if it is not whole.
    `location(i)` names the i-th line. Raises DataError."""
    try:
        return parse(lines.text, lines.num_lines, layout), location, NO_LINES
    except (pa.ArrowInvalid, ValueError) as error:
        starts, ends, rest = records_of(lines, layout) if layout.has_quotes else ([], [], lines)
        if layout.has_quotes and len(starts) < lines.num_lines:
            places = dict(enumerate(starts))
            first, location = location, lambda i: first(places[i])
        else:
            raise refuse_line(lines_of(lines.text), location, str(error), partial(line_error, layout)) from None
    if not starts:
        return None, location, rest
    text = lines.text[: ends[-1]]
    try:
        return parse(text, len(starts), layout), location, rest
    except (pa.ArrowInvalid, ValueError) as error:
        records = [text[start : end - 1] for start, end in zip([0, *ends], ends, strict=False)]
        raise refuse_line(records, location, str(error), partial(line_error, layout)) from None


def joined(rest: LinePiece, piece: LinePiece) -> LinePiece:
    if not rest.num_lines:
        return piece
    return LinePiece(rest.first_line, rest.num_lines + piece.num_lines, rest.text + piece.text)


def records_of(lines: LinePiece, layout: CsvLayout) -> tuple[list[int], list[int], LinePiece]:
    """Returns the first line, from 0, and the end in bytes of each whole record, and the lines of one that is not."""
    record, at, line, starts, ends = record_pattern(layout.delimiter), 0, 0, list[int](), list[int]()
    while match := record.match(lines.text, at):
        starts.append(line)
        line, at = line + lines.text.count(b"\n", at, match.end()), match.end()
        ends.append(at)
    return starts, ends, LinePiece(lines.first_line + line, lines.num_lines - line, lines.text[at:])


def record_pattern(delimiter: str) -> re.Pattern[bytes]:
    """Returns the pattern of a record. A quote opens a cell only at its beginning; inside, two quotes are one. A cell
    with line breaks must end with its quotes: otherwise two stray quotes would hide the rows between them."""
    mark = re.escape(delimiter.encode())
    broken, quoted = rb'"[^"]*+(?:""[^"]*+)*+"(?=%b|\r?\n)' % mark, rb'"[^"\n]*+(?:""[^"\n]*+)*+"[^%b\n]*+' % mark
    cell = rb'(?:%b|%b|(?!")[^%b\n]*+)' % (broken, quoted, mark)
    return re.compile(rb"%b(?:%b%b)*+\n" % (cell, mark, cell))


def place_of(layout: CsvLayout, path: Path, row: int) -> str:
    """Names the first line of a row, for which it reads the file."""
    rest, seen = NO_LINES, 0
    with open_text(path) as stream:
        for piece in pieces(stream, path, layout.header_lines):
            lines = joined(rest, piece)
            starts, _, rest = records_of(lines, layout)
            if row < seen + len(starts):
                return f"{path}, line {lines.first_line + starts[row - seen]}"
            seen += len(starts)
    return f"{path}, row {row}"


def parse(lines: bytes, num_lines: int, layout: CsvLayout) -> Any:
    """Returns a pyarrow.RecordBatch of whole records, which all end in a line break; by default a record is a line.
    Raises ArrowInvalid or ValueError for one that does not fit.

    To detect a quoted field left open, adds a row of empty cells, which such a field would swallow, and counts the
    rows.
    """
    cells = layout.cells
    types = {name: ARROW_TYPES["text" if cell.separator else cell.kind] for name, cell in cells.items()}
    delimiter = layout.delimiter if layout.has_quotes else SEPARATOR
    guard = delimiter.encode() * (len(layout.header) - 1) + b"\n"
    separated = lines if layout.has_quotes else with_separators(lines, layout.delimiter)
    table = arrow_csv.read_csv(
        pa.py_buffer(separated + guard),
        read_options=arrow_csv.ReadOptions(
            use_threads=False, block_size=len(separated) + len(guard) + 1, column_names=layout.header
        ),
        parse_options=arrow_csv.ParseOptions(
            delimiter=delimiter, quote_char='"' if layout.has_quotes else False, ignore_empty_lines=False
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types=types,
            include_columns=list(cells),
            null_values=[""],
            strings_can_be_null=True,
            true_values=[*TRUE, "1"],
            false_values=[*FALSE, "0"],
            check_utf8=False,
        ),
    ).combine_chunks()
    if table.num_rows != num_lines + 1 or (b"\r" in lines and lines.count(b"\r") != lines.count(b"\r\n")):
        raise ValueError("a line is not a row")
    if any(cell.required and table[name].null_count > 1 for name, cell in cells.items()):  # the added row has one null
        raise ValueError("a cell is empty")
    [batch] = table.slice(0, num_lines).to_batches()
    columns = {name: split_cells(batch[name], cell) if cell.separator else batch[name] for name, cell in cells.items()}
    return pa.RecordBatch.from_pydict(columns)


def with_separators(lines: bytes, delimiter: str) -> bytes:
    """Returns the lines with one separator between cells. Raises ValueError for a cell that holds it."""
    if SEPARATOR.encode() in lines:
        raise ValueError(f"a cell holds {SEPARATOR!r}")
    if delimiter != SPACES:
        return lines.replace(delimiter.encode(), SEPARATOR.encode())
    return re.sub(rb"[ \t]+", SEPARATOR.encode(), re.sub(rb"(?m)^[ \t]+|[ \t]+(?=\r?$)", b"", lines))


def split_cells(texts: Any, cell: Cell) -> Any:
    """Splits cells of text into lists; an empty item is null. Raises ArrowInvalid for an item of another kind, and
    ValueError for a cell that should be a list and is not."""
    lists = split_brackets(texts) if cell.separator == BRACKETS else pc.split_pattern(texts, cell.separator)
    items = pc.if_else(pc.equal(pc.binary_length(lists.values), 0), None, lists.values)
    if cell.kind != "text":
        items = items.cast(pa.string()).cast(ARROW_TYPES[cell.kind])
    return pa.ListArray.from_arrays(lists.offsets, items)


def without_empty(texts: Any) -> Any:
    """Returns binaries; an empty cell is null, as in CSV."""
    cells = texts.cast(pa.binary())
    return pc.if_else(pc.equal(pc.binary_length(cells), 0), None, cells)


def typed_columns(table: Any, features: Sequence[CheckedFeature], kinds: Mapping[str, Any], location: Location) -> Any:
    """Returns the typed columns of a table of a format with types: splits the text of features with data.columns.lists.
    A column without any value has the type in `kinds`, of another file. Raises DataError."""
    kinds = {feature.name: pa.string() for feature in features if feature.separator} | dict(kinds)
    for at, field in enumerate(table.schema):
        if is_all_missing(field.type):
            any_kind = pa.list_(pa.int64()) if is_list(field.type) else pa.int64()
            table = table.set_column(at, field.name, table.column(at).cast(kinds.get(field.name, any_kind)))
    for feature in features:
        if feature.separator and feature.name in table.schema.names:
            at = table.schema.get_field_index(feature.name)
            values = table.column(at)
            values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
            if is_text(values.type):
                cell = Cell(kind="text" if feature.hashed else "integer", separator=feature.separator)
                table = table.set_column(
                    at, feature.name, lists_of(without_empty(values), cell, feature.name, location)
                )
    return typed(table, features, location)


def lists_of(texts: Any, cell: Cell, name: str, location: Location) -> Any:
    try:
        return split_cells(texts, cell)
    except ValueError:  # of Arrow, too
        cells = [(text or b"").decode("utf-8", "replace") for text in texts.to_pylist()]
        row, why = next((i, why) for i, text in enumerate(cells) if (why := cell_error(text, cell)) is not None)
        raise DataError(f"{location(row)}, column {name}: {why}") from None


def split_brackets(texts: Any) -> Any:
    if pc.any(pc.invert(pc.match_substring_regex(texts, f"^{BRACKETED}$"))).as_py():
        raise ValueError("a cell is no list such as [1, 2]")
    if pc.any(pc.match_substring_regex(texts, "['\"]")).as_py():
        lists = [None if text is None else items_of(text.decode(), BRACKETS) for text in texts.to_pylist()]
        return pa.array(lists, pa.list_(pa.binary()))
    inner = pc.replace_substring_regex(texts, f"^{BRACKETED}$", r"\1")
    return pc.split_pattern_regex(pc.if_else(pc.equal(pc.binary_length(inner), 0), None, inner), r"\s*,\s*")


def cells_of(job: Job, roles: Roles, first_row: dict[str, str]) -> dict[str, Cell]:
    columns, cells = job.data.columns, dict[str, Cell]()
    for name in (*roles.labels, *roles.dense):
        if name in roles.sources:
            continue
        rule = columns.prepare.get(name, AS_IT_IS)
        kind: CellKind = (
            "text" if rule.takes_text else "boolean" if first_row.get(name) in (*TRUE, *FALSE) else "number"
        )
        is_needed = name in roles.labels and not columns.labels and rule.fill is None
        cells[name] = Cell(kind=kind, required=is_needed)
    for feature in roles.features:
        if feature.name in roles.sources:
            continue
        separator, rule = columns.lists.get(feature.name), columns.prepare.get(feature.name, AS_IT_IS)
        kind = "text" if feature.hashed or rule.takes_text else "number" if rule.buckets else "integer"
        cells[feature.name] = Cell(kind=kind, separator=separator)
        if feature.weights_column is not None:
            cells[feature.weights_column] = Cell(kind="number", separator=separator)
    for name in roles.inputs:
        separator = job.data.columns.lists.get(roles.of.get(name, ""))
        first = next(iter(items_of(first_row.get(name, ""), separator or "\n")), "")
        kind = "boolean" if first in (*TRUE, *FALSE) else "whole" if holds(first, "whole") else "number"
        cells.setdefault(name, Cell(kind=kind, separator=separator))
    return dict.fromkeys(roles.sources.values(), Cell(kind="text")) | cells


def beginning(paths: list[Path], delimiter: str, names: Sequence[str]) -> tuple[list[Path], list[str], dict[str, str]]:
    """Returns the files with rows, their header, and the first row's cells by column. `names`: the columns of files
    without a header. Raises DataError for headers that differ, also of files without rows, or if no file has rows."""
    begun = ((path, first_lines(path)) for path in paths)
    if names:
        first_rows = {
            path: whole_record(path, start[0], 0, delimiter).rstrip(b"\r\n").removeprefix(b"\xef\xbb\xbf")
            for path, start in begun
        }
        rows = {path: row.decode(errors="replace") for path, row in first_rows.items() if row}
        if not rows:
            raise no_rows(paths)
        cells = fields_of(next(iter(rows.values())), delimiter, strict=False)
        return [*rows], [*names], dict(zip(names, cells, strict=False))
    lines = {path: start for path, start in begun if start[1] or start[0].strip(b"\xef\xbb\xbf\r\n ")}
    headers = {path: fields_by_line(path, start, delimiter) for path, start in lines.items()}
    for path, (header, _) in headers.items():
        first = next(iter(headers))
        require_header(path, header, first, headers[first][0])
    filled = [path for path, (_, first_row) in lines.items() if first_row]
    if not filled:
        raise no_rows(paths)
    header, first_row = headers[filled[0]]
    return filled, header, dict(zip(header, first_row, strict=False))


def whole_record(path: Path, line: bytes, lines_before: int, delimiter: str) -> bytes:
    """Returns the first record after some lines, of which `line` is the first line."""
    if line.count(b'"') % 2 == 0 or len(delimiter) > 1 or delimiter == SPACES:
        return line
    with open_text(path) as stream, whole_gzip(path):
        text = stream.read(MOST_LINE_BYTES * CHUNK_BYTES).split(b"\n", lines_before)[-1]
    match = record_pattern(delimiter).match(text)
    return match[0] if match else line


def fields_by_line(path: Path, lines: tuple[bytes, bytes], delimiter: str) -> tuple[list[str], list[str]]:
    header, first_row = lines[0].rstrip(b"\r\n"), whole_record(path, lines[1], 1, delimiter).rstrip(b"\r\n")
    header = header.removeprefix(b"\xef\xbb\xbf")
    if not header.strip():
        raise DataError(f"{path}: the file has no header; its first line must name the columns")
    if re.fullmatch(rb"sep=.", header):
        raise DataError(f"{path}, line 1: 'sep={chr(header[4])}' is meant for Excel; remove the line")
    try:
        names = fields_of(header.decode(), delimiter, strict=True)
        cells = fields_of(first_row.decode(errors="replace"), delimiter, strict=False)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: the header cannot be read ({error}); write the file as text in UTF-8") from None
    if (lacking := names.count("")) > 1:
        raise DataError(
            f"{path}, line 1: {lacking} of {len(names)} columns have no name; name them, or remove the line if it is a "
            "title"
        )
    for name in names:
        if names.count(name) > 1:
            values = "; if these are values, add a line above with the names of the columns" if is_number(name) else ""
            raise DataError(f"{path}: the header names column {name} twice; rename one of them{values}")
    return names, cells


def require_header(path: Path, header: list[str], first: Path, expected: list[str]) -> None:
    """Raises DataError for a header that differs from the first file's."""
    for name in expected:
        if name not in header:
            raise DataError(
                f"{path}: the header has no column {name}{nearest(name, header)}, but {first} does; "
                "give all files one header"
            )
    for name in header:
        if name not in expected:
            raise DataError(
                f"{path}: the header has a column {name}, but {first} does not{nearest(name, expected)}; "
                "give all files one header"
            )
    if header != expected:
        raise DataError(f"{path}: the columns are in another order than in {first}; give all files one header")
