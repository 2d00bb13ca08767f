"""Reads JSON lines, plain or gzip: each line is an object, and a feature is the key of its name, as in Parquet.

The first lines decide the types: numbers, true and false, text, lists of these. A missing key and null are missing.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import json as arrow_json

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.arrow_rows import RowDecoder, is_list
from rowcast.prefetcher.readers.column_roles import Roles
from rowcast.prefetcher.readers.column_rows import ColumnRows, open_named_columns
from rowcast.prefetcher.readers.copies import CopiedFiles, TextRules
from rowcast.prefetcher.readers.data_files import no_rows
from rowcast.prefetcher.readers.formats.csv import typed_columns
from rowcast.prefetcher.readers.formats.parquet import roles_in
from rowcast.prefetcher.readers.id_check import IdCheck, Location, line_location
from rowcast.prefetcher.readers.reader import Columns
from rowcast.prefetcher.readers.row_reader import RowReader
from rowcast.prefetcher.readers.text_files import Piece, open_text, pieces, refuse_line

Types = Mapping[str, Any]  # of columns, in Arrow
NUMBER, WHOLE, WORD, TEXT = pa.float64(), pa.int64(), pa.bool_(), pa.string()
WHAT = {
    NUMBER: "a number",
    WHOLE: "an integer of 64 bits, as in the first lines",
    WORD: "true or false, as in the first lines",
    TEXT: "text, as in the first lines",
}


def open_reader(job: Job, columns: Columns = "all") -> RowReader:
    """Raises ConfigError for a missing path or column, DataError for a file that is empty or torn."""
    return open_named_columns(job, columns, rows_of)


def rows_of(job: Job, ids: IdCheck, part: Columns, paths: list[Path]) -> ColumnRows:
    path, first = first_piece(paths)
    inferred = decode({}, first.text, first.num_lines, line_location(path, first.first_line)).schema
    found = pa.schema([(own.name, plain(own.type)) for own in inferred])
    roles = roles_in(job, [path], [found])
    types = types_of(roles, found)

    def columns_of(lines: bytes, num_lines: int, location: Location) -> Any:
        return typed_columns(decode(types, lines, num_lines, location), roles.features, location)

    hashed = [[own.name, own.by_value, own.separator] for own in roles.features if own.hashed or own.separator]
    known = ["jsonl", {name: str(kind) for name, kind in types.items()}, hashed]
    files = CopiedFiles(job, paths, TextRules(known=known, header_lines=0, columns=columns_of))
    return ColumnRows(files, roles.names(part), RowDecoder(job, roles, ids), roles.dense, part)


def first_piece(paths: list[Path]) -> tuple[Path, Piece]:
    """Raises DataError if no file has rows."""
    for path in paths:
        with open_text(path) as stream:
            for piece in pieces(stream, path, 0):
                return path, piece
    raise no_rows(paths)


def types_of(roles: Roles, found: Any) -> Types:
    """Returns the types of the columns that are read, by those `found` in the first lines."""
    numbers = {*roles.labels, *roles.dense, *roles.weights} - {feature.name for feature in roles.features}
    kinds = {name: found.field(name).type for name in roles.names()}
    return {name: as_number(kind) if name in numbers else kind for name, kind in kinds.items()}


def as_number(kind: Any) -> Any:
    if is_list(kind):
        return pa.list_(as_number(kind.value_type))
    return NUMBER if pa.types.is_integer(kind) else kind


def plain(kind: Any) -> Any:
    """pyarrow takes dates in text for times. Where all values are missing, any type will do."""
    if is_list(kind):
        return pa.list_(plain(kind.value_type))
    return WHOLE if pa.types.is_null(kind) else TEXT if pa.types.is_temporal(kind) else kind


def decode(types: Types, lines: bytes, num_lines: int, location: Location) -> Any:
    """Returns a pyarrow.RecordBatch of whole lines: of `types`, or, if there are none, of all keys. Raises
    DataError."""
    try:
        table = arrow_json.read_json(
            pa.py_buffer(lines),
            arrow_json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
            arrow_json.ParseOptions(
                explicit_schema=pa.schema(types.items()) if types else None,
                unexpected_field_behavior="ignore" if types else "infer",
            ),
        )
        begun = lines.startswith(b"{") + lines.count(b"\n{")
        if table.num_rows != num_lines or (begun != num_lines and re.search(rb"(?m)^\s*$", lines[:-1])):
            raise ValueError("a line is not an object")
    except (pa.ArrowException, ValueError) as error:
        raise refuse_line(lines, location, str(error), partial(line_error, types)) from None
    [batch] = table.combine_chunks().to_batches()
    return batch


def line_error(types: Types, line: bytes) -> str | None:
    """Returns the sentence after the line's number, or None for a good line."""
    line = line.strip()
    try:
        row = json.loads(line) if line else None
    except ValueError as error:
        return f": the line is no JSON ({error}); give each sample as an object in a line of its own"
    if row is None:
        return ": the line is empty; remove it"
    if not isinstance(row, dict):
        return f": {line[:40].decode()!r} is no object; give each sample as an object in a line of its own"
    for name, kind in types.items():
        single = kind.value_type if is_list(kind) else kind
        value = row.get(name)
        if is_list(kind) and value is not None and not isinstance(value, list):
            return f", column {name}: {shown(value)} is no list, as in the first lines"
        for item in value if is_list(kind) and value else [value]:
            if item is not None and not holds(item, single):
                return f", column {name}: {shown(item)} is not {WHAT.get(single, single)}"
    return None


def holds(value: object, kind: Any) -> bool:
    if kind == NUMBER:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if kind == WHOLE:
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return isinstance(value, bool if kind == WORD else str)


def shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)[:40]
