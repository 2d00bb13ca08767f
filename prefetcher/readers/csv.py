"""CSV with a header, plain or gzip: the columns that data.columns and the features name, in the types that their roles ask for.

    label, dense, weights    numbers; True and False where a column begins with one of them; an empty cell is NaN, which is refused
    ids                      integers, or text under data.columns.hash, whose bytes are hashed; an empty cell is a missing id
    data.columns.lists       several of them in a cell, between separators; an empty cell is an empty bag, an empty item a missing id

Cells may be quoted, but a line is a row: line breaks within quotes are refused. Lines are found and read as those of Criteo TSV.
"""

import csv
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from prefetcher.readers.arrow_rows import RowDecoder
from prefetcher.readers.assemble import RowReader
from prefetcher.readers.csv_line import Cell, is_number, refuse_line
from prefetcher.readers.files import Span, cumulative, data_files, eval_path, sizes_of
from prefetcher.readers.ids import IdCheck, Place
from prefetcher.readers.parts import join_parts
from prefetcher.readers.roles import Roles, roles_of
from prefetcher.readers.rows import Ids
from prefetcher.readers.text import TextCursor, TextIndex, open_text, read
from protocol.batch import Batch
from protocol.errors import ConfigError, DataError
from protocol.job import Job
from protocol.names import nearest

FILE_NAMES = r".*\.csv(\.gz)?"  # of a folder's data files
HEADER_BYTES = 2**20  # that header and first row may take
LINES_AT_ONCE = 8192  # decoded together, as of TSV
TRUE, FALSE = ("1", "true", "True", "TRUE"), ("0", "false", "False", "FALSE")
ARROW_TYPES = {"integer": pa.int64(), "number": pa.float64(), "text": pa.binary()}


def open_reader(job: Job) -> RowReader:
    """Raises ConfigError for a missing path or column, DataError for a file that is empty, torn or has another header than the first."""
    assert job.data.path is not None, "the job file refuses csv without a path"
    if job.data.hash:
        raise ConfigError("data.hash belongs to criteo-npy; remove it, or set data.columns.hash = true to hash ids")
    ids, held_out = IdCheck(job), eval_path(job)
    rows = CsvRows(job, ids, data_files(job.data.path, "data.path", FILE_NAMES))
    evaluation = None if held_out is None else CsvRows(job, ids, data_files(held_out, "data.eval_path", FILE_NAMES))
    return RowReader(job, ids, rows, evaluation)


class CsvRows:
    def __init__(self, job: Job, ids: IdCheck, paths: list[Path]) -> None:
        self.delimiter = job.data.columns.delimiter
        self.header, first_row = beginning(paths[0], self.delimiter)
        cells = dict(zip(self.header, first_row, strict=False))
        self.roles = roles_of(job, paths[0], self.header, lambda: [name for name, cell in cells.items() if is_number(cell)])
        for path in paths[1:]:
            require_header(path, beginning(path, self.delimiter)[0], paths[0], self.header)
        self.cells = cells_of(job, self.roles)
        self.booleans = [name for name in (self.roles.label, *self.roles.dense) if cells.get(name) in (*TRUE[1:], *FALSE[1:])]
        self.decoder = RowDecoder(self.roles, ids)
        self.file_sizes = sizes_of(paths)
        self.index = TextIndex(paths)
        self.bounds = cumulative(rows_of_files(self.index, paths))

    @property
    def num_dense(self) -> int:
        return len(self.roles.dense)

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    def line(self, row: int) -> int:
        """All files counted through; each has a header."""
        return row + bisect_right(self.bounds, row)

    def lines(self, rows: Ids) -> Ids:
        lines: Ids = rows + np.searchsorted(self.bounds, rows, side="right")
        return lines

    def cursor(self) -> AbstractContextManager["CsvCursor"]:
        return closing(CsvCursor(self))


class CsvCursor:
    def __init__(self, rows: CsvRows) -> None:
        self._rows = rows
        self._text = TextCursor(rows.index)

    def close(self) -> None:
        self._text.close()

    def take(self, rows: Ids, within: Span) -> Batch:
        own, lines = self._rows, self._rows.lines(rows)
        span = Span(start=own.line(within.start), stop=own.line(within.stop - 1) + 1)
        pieces = (lines[at : at + LINES_AT_ONCE] for at in range(0, len(lines), LINES_AT_ONCE))
        decoded = [decode(self._text.lines(piece, span), len(piece), own, self._place(piece)) for piece in pieces]
        [table] = pa.Table.from_batches(decoded).combine_chunks().to_batches()
        rest, ids = own.decoder.rest(table, self._place(lines)), own.decoder.ids(table, self._place(lines))
        return join_parts(ids, rest)

    def _place(self, lines: Ids) -> Place:
        return lambda i: self._rows.index.place(int(lines[i]))


def decode(lines: bytes, num_lines: int, rows: CsvRows, place: Place) -> Any:
    """A pyarrow.RecordBatch of whole lines, the i-th of which is `place(i)`. Raises DataError."""
    try:
        return parse(lines, num_lines, rows)
    except (pa.ArrowInvalid, ValueError) as error:
        raise refuse_line(lines, rows.header, rows.delimiter, rows.cells, place, str(error)) from None


def parse(lines: bytes, num_lines: int, rows: CsvRows) -> Any:
    """As `decode`. Raises ArrowInvalid or ValueError for a line that does not fit.

    An empty row behind the lines would become part of a quoted field that one of them leaves open, so rows are counted with it.
    """
    types = {name: ARROW_TYPES["text" if cell.separator else cell.kind] for name, cell in rows.cells.items()}
    guard = rows.delimiter.encode() * (len(rows.header) - 1) + b"\n"
    table = arrow_csv.read_csv(
        pa.py_buffer(lines + guard),
        read_options=arrow_csv.ReadOptions(use_threads=False, block_size=len(lines) + len(guard) + 1, column_names=rows.header),
        parse_options=arrow_csv.ParseOptions(delimiter=rows.delimiter, ignore_empty_lines=False),
        convert_options=arrow_csv.ConvertOptions(
            column_types=types | dict.fromkeys(rows.booleans, pa.bool_()),
            include_columns=list(rows.cells),
            null_values=[""],
            strings_can_be_null=True,
            true_values=TRUE,
            false_values=FALSE,
            check_utf8=False,
        ),
    ).combine_chunks()
    if table.num_rows != num_lines + 1 or (b"\r" in lines and lines.count(b"\r") != lines.count(b"\r\n")):
        raise ValueError("a line is not a row")
    if table[rows.roles.label].null_count > 1:  # that of the guard; an empty line is one too
        raise ValueError("a label is missing")
    [batch] = table.slice(0, num_lines).to_batches()
    columns = {name: split_cells(batch[name], cell) if cell.separator else batch[name] for name, cell in rows.cells.items()}
    return pa.RecordBatch.from_pydict(columns)


def split_cells(texts: Any, cell: Cell) -> Any:
    """Cells of text -> lists of their items; nothing between two separators is null. Raises ArrowInvalid for an item of another kind."""
    lists = pc.split_pattern(texts, cell.separator)
    items = pc.if_else(pc.equal(pc.binary_length(lists.values), 0), None, lists.values)
    if cell.kind != "text":
        items = items.cast(pa.string()).cast(ARROW_TYPES[cell.kind])
    return pa.ListArray.from_arrays(lists.offsets, items)


def cells_of(job: Job, roles: Roles) -> dict[str, Cell]:
    """Of every column that is read."""
    cells = {name: Cell(kind="number", required=name == roles.label) for name in (roles.label, *roles.dense)}
    for feature in roles.features:
        separator = job.data.columns.lists.get(feature.name)
        cells[feature.name] = Cell(kind="text" if feature.hashed else "integer", separator=separator)
        if feature.weights_column is not None:
            cells[feature.weights_column] = Cell(kind="number", separator=separator)
    return cells


def beginning(path: Path, delimiter: str) -> tuple[list[str], list[str]]:
    """(header, cells of the first row), the latter empty where it cannot be read. Raises DataError."""
    with open_text(path) as stream:
        lines = read(stream, path, HEADER_BYTES).removeprefix(b"\xef\xbb\xbf").split(b"\n", 2)
    if not lines[0].strip():
        raise DataError(f"{path}: the file has no header; its first line must name the columns")
    try:
        header, first_row = ([field for row in csv.reader([line], delimiter=delimiter) for field in row] for line in texts(lines))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: the header cannot be read ({error}); write the file as UTF-8 with line breaks") from None
    for name in header:
        if header.count(name) > 1:
            raise DataError(f"{path}: the header names column {name} twice; rename one of them")
    return header, first_row


def texts(lines: list[bytes]) -> Iterator[str]:
    header, first_row, *_ = [*lines, b""]
    yield header.rstrip(b"\r").decode()
    yield first_row.rstrip(b"\r").decode(errors="replace")


def require_header(path: Path, header: list[str], first: Path, expected: list[str]) -> None:
    """Raises DataError for a header that differs from that of the first file."""
    for name in expected:
        if name not in header:
            raise DataError(f"{path}: the header has no column {name}{nearest(name, header)}, and {first} has; give all files one header")
    for name in header:
        if name not in expected:
            raise DataError(
                f"{path}: the header has a column {name}, and {first} has not{nearest(name, expected)}; give all files one header"
            )
    if header != expected:
        raise DataError(f"{path}: the columns stand in another order than in {first}; give all files one header")


def rows_of_files(index: TextIndex, paths: list[Path]) -> list[int]:
    """Lines of each file without its header. Raises DataError where that is none."""
    num_lines = dict.fromkeys(paths, 0)
    for chunk in index.chunks:
        num_lines[chunk.path] += chunk.num_lines
    for path, count in num_lines.items():
        if count == 1:
            raise DataError(f"{path}: the file has a header and no row; give a file with at least one row")
    return [count - 1 for count in num_lines.values()]
