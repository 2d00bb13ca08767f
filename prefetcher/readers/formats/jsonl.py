"""Reads JSON lines, plain or gzip: each line is an object, and a feature is the key of its name, as in Parquet.

The first lines decide the types: numbers, true and false, text, lists of these. A missing key and null are missing.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import json as arrow_json

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.arrow_rows import Roles, RowDecoder, is_list
from rowcast.prefetcher.readers.copies import CopiedFiles, TextRules
from rowcast.prefetcher.readers.data_files import no_rows
from rowcast.prefetcher.readers.formats.csv import typed_columns
from rowcast.prefetcher.readers.formats.parquet import roles_in
from rowcast.prefetcher.readers.id_check import IdCheck, Location, line_location
from rowcast.prefetcher.readers.reader import Columns
from rowcast.prefetcher.readers.row_reader import ColumnRows, RowReader, open_named_columns
from rowcast.prefetcher.readers.text_files import Piece, open_text, pieces, refuse_line
from rowcast.runtime.errors import DataError

Types = Mapping[str, Any]  # of columns, in Arrow
NUMBER, WHOLE, UNSIGNED, WORD, TEXT = pa.float64(), pa.int64(), pa.uint64(), pa.bool_(), pa.string()
MOST_DEPTH = 64
WHAT = {
    NUMBER: "a number",
    WHOLE: "an integer of 64 bits, as in the first lines",
    UNSIGNED: "an integer from 0 to 2**64 - 1, as in the first lines",
    WORD: "true or false, as in the first lines",
    TEXT: "text, as in the first lines",
}


def open_reader(job: Job, columns: Columns = "all") -> RowReader:
    """Raises ConfigError for a missing path or column, DataError for a file that is empty or torn."""
    return open_named_columns(job, columns, rows_of)


def rows_of(job: Job, ids: IdCheck, part: Columns, paths: list[Path]) -> ColumnRows:
    path, first = first_piece(paths)
    values = values_of(first.text, line_location(path, first.first_line))
    found = pa.schema([(name, kind_of(own)) for name, own in values.items()])
    roles = roles_in(job, [path], [found], ids)
    types = types_of(roles, found)

    def columns_of(lines: bytes, num_lines: int, location: Location) -> Any:
        return typed_columns(decode(types, lines, num_lines, location), roles.features, {}, location)

    hashed = [[own.name, own.rule, own.separator] for own in roles.features if own.hashed or own.separator]
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


def values_of(lines: bytes, location: Location) -> dict[str, list[Any]]:
    """Returns the values of each key that are not missing. Raises DataError."""
    values: dict[str, list[Any]] = {}
    check_depth(lines, location)
    for i, line in enumerate(lines.removesuffix(b"\n").split(b"\n")):
        row = content_of(line)
        if not isinstance(row, dict):
            raise DataError(f"{location(i)}{line_error({}, line)}")
        for name, value in row.items():
            values.setdefault(name, []).extend([] if value is None else [value])
    return values


def content_of(line: bytes) -> Any:
    """Returns None for a line that is no JSON."""
    for parse in (msgspec.json.decode, json.loads):  # the second, slower, takes numbers beyond fp64
        with suppress(ValueError):
            return parse(line)
    return None


def kind_of(values: Sequence[Any]) -> Any:
    """Returns the type of the first value, and of the others of its kind; the parser refuses those of other kinds.
    Without values, any type will do."""
    first = values[0] if values else 0
    if isinstance(first, list):
        items = [item for own in values if isinstance(own, list) for item in own if item is not None]
        return pa.list_(kind_of(items))
    if not isinstance(first, int | float) or isinstance(first, bool):
        return WORD if isinstance(first, bool) else TEXT if isinstance(first, str) else pa.struct([])
    numbers = [own for own in values if isinstance(own, int | float)] or [0]
    if any(isinstance(own, float) for own in numbers):
        return NUMBER
    low, high = min(numbers), max(numbers)
    return WHOLE if low >= -(2**63) and high < 2**63 else UNSIGNED if low >= 0 and high < 2**64 else NUMBER


def is_one_kind(values: Sequence[Any]) -> bool:
    return len({float if type(own) is int else type(own) for own in values}) < 2


def types_of(roles: Roles, found: Any) -> Types:
    """Returns the types of the columns that are read, by those `found` in the first lines."""
    features = {feature.name: feature for feature in roles.features}
    numbers = {*roles.labels, *roles.dense, *roles.weights} - features.keys()
    kinds = {name: found.field(name).type for name in roles.names()}
    # the earlier rule took numbers beyond int64 for fractions, as those of arrays still are
    inexact = {name for name in kinds if name not in features or features[name].by_value == "earlier"}
    kinds = {name: as_number(kind, UNSIGNED) if name in inexact else kind for name, kind in kinds.items()}
    return {name: as_number(kind, WHOLE) if name in numbers else kind for name, kind in kinds.items()}


def as_number(kind: Any, whole: Any) -> Any:
    """Returns the type with fractions in place of `whole`, in lists too."""
    if is_list(kind):
        return pa.list_(as_number(kind.value_type, whole))
    return NUMBER if kind == whole else kind


def check_depth(lines: bytes, location: Location) -> None:
    """Raises DataError for a line with brackets within MOST_DEPTH others: parsers of JSON call themselves for each."""
    content = np.frombuffer(lines, np.uint8)
    ends, opened = np.flatnonzero(content == ord("\n")), np.flatnonzero((content & 0xDF) == ord("["))  # and {
    counts = np.bincount(np.searchsorted(ends, opened))
    for i in np.flatnonzero(counts > MOST_DEPTH).tolist():
        line = lines[ends[i - 1] + 1 if i else 0 : ends[i] if i < len(ends) else None]
        brackets = np.frombuffer(re.sub(rb'"(?:[^"\\]|\\.)*"?', b"", line), np.uint8) & 0xDF
        depth = np.cumsum((brackets == ord("[")).astype(np.int64) - (brackets == ord("]"))).max(initial=0)
        if depth > MOST_DEPTH:
            raise DataError(
                f"{location(i)}: objects and lists lie {depth} deep in one another; give at most {MOST_DEPTH}"
            )


def decode(types: Types, lines: bytes, num_lines: int, location: Location) -> Any:
    """Returns a pyarrow.RecordBatch of `types`, of whole lines. Raises DataError."""
    check_depth(lines, location)
    try:
        table = arrow_json.read_json(
            pa.py_buffer(lines),
            arrow_json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
            arrow_json.ParseOptions(explicit_schema=pa.schema(types.items()), unexpected_field_behavior="ignore"),
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
    if kind in (WHOLE, UNSIGNED):
        low, high = (-(2**63), 2**63) if kind == WHOLE else (0, 2**64)
        return isinstance(value, int) and not isinstance(value, bool) and low <= value < high
    return isinstance(value, bool if kind == WORD else str)


def shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)[:40]
