"""Reads JSON lines, plain or gzip: each line is an object, and a feature is the key of its name, as in Parquet.

The first lines decide the types: numbers, true and false, text, lists of these. A missing key and null are missing.

A file that is one array of objects, or one object with one list of objects, is read as a whole: each object is a line.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import BufferedReader, BytesIO
from math import isfinite
from pathlib import Path
from typing import IO, Any, cast

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
from rowcast.prefetcher.readers.id_check import IdCheck, Location, decoding, line_location
from rowcast.prefetcher.readers.reader import Columns
from rowcast.prefetcher.readers.row_reader import ColumnRows, RowReader, open_named_columns
from rowcast.prefetcher.readers.text_files import (
    LinePiece,
    first_lines,
    lines_of,
    open_text,
    pieces,
    refuse_line,
    whole_gzip,
)
from rowcast.runtime.errors import DataError, listed

Types = Mapping[str, Any]  # of columns, in Arrow
NUMBER, WHOLE, UNSIGNED, WORD, TEXT = pa.float64(), pa.int64(), pa.uint64(), pa.bool_(), pa.string()
MOST_DEPTH = 64
FLAT = rb'(?:"[^"]*"|\{[^{}]*\}|\[[^\[\]{}]*\]|[^\s"\[{,]+)'  # a value without objects in it
ARRAY, WRAPPED = rb"\s*\[\s*\{", rb'\s*\{(?:\s*"[^"]*"\s*:\s*' + FLAT + rb'\s*,)*\s*"[^"]*"\s*:\s*\[\s*\{'
LONGEST_START, OBJECTS = 8192, 20_000  # bytes that identify a file; objects that are decoded together
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
    path, first, location = first_piece(paths)
    values = values_of(first.text, location)
    schema = pa.schema([(name, kind_of(kinds)) for name, kinds in values.items()])
    roles = roles_in(job, [path], [schema], ids)
    types = types_of(roles, schema)

    def columns_of(path: Path, stream: IO[bytes]) -> Iterator[tuple[Any, int]]:
        for lines, location, by_line in object_lines(stream, path):
            with decoding(location, lines.num_lines):
                decoded = decode(types, lines.text, lines.num_lines, location)
                columns = typed_columns(decoded, roles.features, {}, location)
            yield columns, lines.num_lines * by_line

    hashed = [
        [feature.name, feature.rule, feature.separator]
        for feature in roles.features
        if feature.hashed or feature.separator
    ]
    known = ["jsonl", {name: str(kind) for name, kind in types.items()}, hashed]
    rules = TextRules(
        known=known, header_lines=0, columns=columns_of, place=lambda path, row: object_location(path, 1)(row)
    )
    files = CopiedFiles(job, paths, rules)
    return ColumnRows(files, roles.names(part), RowDecoder(job, roles, ids), roles.dense, part)


def first_piece(paths: list[Path]) -> tuple[Path, LinePiece, Location]:
    """Raises DataError if no file has rows."""
    for path in paths:
        with open_text(path) as stream:
            for piece, location, _ in object_lines(stream, path):
                return path, piece, location
    raise no_rows(paths)


def object_location(path: Path, first: int) -> Location:
    return lambda i: f"{path}, object {first + i}"


def object_lines(stream: IO[bytes], path: Path) -> Iterator[tuple[LinePiece, Location, bool]]:
    """Yields objects, one in a line, their places, and whether these are the lines of the file. Raises DataError."""
    start = cast(BufferedReader, stream).peek(LONGEST_START).removeprefix(b"\xef\xbb\xbf")
    if re.match(ARRAY, start) or (re.match(WRAPPED, start) and not has_lines(path)):
        with whole_gzip(path):
            text = stream.read()
        objects = objects_of(text.removeprefix(b"\xef\xbb\xbf"), path)
        if objects is not None:
            for first in range(0, len(objects), OBJECTS):
                lines = [re.sub(rb"[\r\n]", b" ", bytes(own)) + b"\n" for own in objects[first : first + OBJECTS]]
                yield LinePiece(first + 1, len(lines), b"".join(lines)), object_location(path, first + 1), False
            return
        stream = BytesIO(text)
    for piece in pieces(stream, path, 0):
        yield piece, line_location(path, piece.first_line), True


def has_lines(path: Path) -> bool:
    """Also True for a first line that is nested too deep, which `check_depth` refuses."""
    first, second = first_lines(path)
    try:
        return bool(second.strip()) and content_of(first.removeprefix(b"\xef\xbb\xbf")) is not None
    except RecursionError:
        return True


def objects_of(text: bytes, path: Path) -> list[msgspec.Raw] | None:
    """Returns None for objects in lines. Raises DataError."""
    try:
        if re.match(ARRAY, text):
            return msgspec.json.decode(text, type=list[msgspec.Raw])
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        if re.match(WRAPPED, text):
            return None
        raise DataError(f"{path}: the JSON array cannot be read ({error}); write it again") from None
    lists = [name for name, own in fields.items() if re.match(ARRAY, bytes(own))]
    if len(lists) > 1:
        raise DataError(f"{path}: the lists {listed(lists)} hold objects; give a file with one of them")
    return msgspec.json.decode(bytes(fields[lists[0]]), type=list[msgspec.Raw])


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
    """Returns None for a line that is not JSON."""
    for parse in (msgspec.json.decode, json.loads):  # the second, slower, takes numbers beyond fp64
        with suppress(ValueError):
            return parse(line)
    return None


def kind_of(values: Sequence[Any]) -> Any:
    """Returns a type for the first value and all others of its kind; the parser refuses other kinds. Without values,
    any type will do."""
    first = values[0] if values else 0
    if isinstance(first, list):
        items = [item for value in values if isinstance(value, list) for item in value if item is not None]
        return pa.list_(kind_of(items))
    if not isinstance(first, int | float) or isinstance(first, bool):
        return WORD if isinstance(first, bool) else TEXT if isinstance(first, str) else pa.struct([])
    numbers = [value for value in values if isinstance(value, int | float)] or [0]
    if any(isinstance(number, float) for number in numbers):
        return NUMBER
    low, high = min(numbers), max(numbers)
    return WHOLE if low >= -(2**63) and high < 2**63 else UNSIGNED if low >= 0 and high < 2**64 else NUMBER


def is_one_kind(values: Sequence[Any]) -> bool:
    return len({float if type(value) is int else type(value) for value in values}) < 2


def types_of(roles: Roles, schema: Any) -> Types:
    """Returns the types of the columns that are read, by those in the first lines."""
    features = {feature.name: feature for feature in roles.features}
    numbers = {*roles.labels, *roles.dense, *roles.weights} - features.keys()
    kinds = {name: schema.field(name).type for name in roles.names()}
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
    """Raises DataError for a line with brackets nested deeper than MOST_DEPTH, because JSON parsers recurse into
    each."""
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
        raise refuse_line(lines_of(lines), location, str(error), partial(line_error, types)) from None
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
