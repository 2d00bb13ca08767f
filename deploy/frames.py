"""Reads a frame in memory as `rowcast score` reads the file that it came from.

A frame: a pandas or polars frame, an Arrow table, record batch or stream, or a dict of arrays or lists.

    frame -> Arrow columns -> typed as the format's reader types them, batch by batch -> RowDecoder -> Batch
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from rowcast.job.formats import LabelValues, format_of
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.arrow_rows import Roles, RowDecoder, bag_lengths, is_list, roles_of, typed
from rowcast.prefetcher.readers.clocks import is_time
from rowcast.prefetcher.readers.columns import Ids, offsets_of
from rowcast.prefetcher.readers.formats.criteo_tsv import hash_columns, logarithms
from rowcast.prefetcher.readers.formats.csv import Cell, split_cells, without_empty
from rowcast.prefetcher.readers.hashed_ids import can_hash, is_all_missing, is_text, text_of, type_of
from rowcast.prefetcher.readers.id_check import IdCheck, job_features, row_location
from rowcast.prefetcher.readers.reader import DrawingReader, Reader, job_of_files
from rowcast.prefetcher.readers.row_reader import RowReader
from rowcast.protocol.batch import Batch
from rowcast.runtime.errors import DataError
from rowcast.serving.raw_ids import id_rules, rows_of

FRAME = Path("the frame")  # in sentences
Convert = Callable[[Any], Any]  # a pyarrow array -> one of the type that the decoder takes


def open_frame(job: Job, frame: Any, label_values: LabelValues = "none") -> Reader:
    """Raises ConfigError for a missing column, DataError for a frame or a column of another type."""
    if job.data.negatives:
        return DrawingReader(job, open_frame(job_of_files(job), frame, label_values))
    ids = IdCheck(job)
    rows = FrameRows(job, ids, frame, label_values)
    return RowReader(job, ids, rows, rows)


class FrameRows:
    """Implements `DataSetRows`, and its cursor."""

    def __init__(self, job: Job, ids: IdCheck, frame: Any, label_values: LabelValues) -> None:
        # in a format without names the columns are label, int_0, cat_0, ...
        data, has_names = job.data, format_of(job.data.format).named_columns
        columns = replace(data.columns, label_values=label_values)
        named = replace(job, data=replace(data, format=data.format if has_names else "parquet", columns=columns))
        roles = roles_of(named, FRAME, names_of(frame), lambda: names_of(frame))
        self.dense_names, self._features, self._decoder = roles.dense, roles.features, RowDecoder(named, roles, ids)
        self._table = arrow_table(frame, roles.names())
        self._converts = converts(job, roles)
        self._separators = separators(job)
        for feature in self._features if not format_of(job.data.format).text_cells else ():
            kind = self._table.schema.field(roles.column(feature.name)).type
            if feature.hashed and not feature.by_value and not is_all_missing(kind):
                ids.note_type(feature.name, type_of(kind), str(FRAME))
        self.num_rows, self.paths = self._table.num_rows, list[Path]()

    @contextmanager
    def cursor(self) -> Iterator["FrameRows"]:
        yield self

    def take(self, rows: Ids, within: range) -> Batch:
        part = self._table.slice(int(rows[0]), len(rows))
        columns = {name: self._converted(name, part[name].combine_chunks()) for name in part.column_names}
        location = row_location(FRAME, rows)
        table = typed(pa.RecordBatch.from_pydict(columns), self._features, location)
        return Batch.of(self._decoder.ids(table, location), self._decoder.dense(table, location))

    def _converted(self, name: str, values: Any) -> Any:
        try:
            return converted(values, self._converts[name], self._separators.get(name))
        except (pa.ArrowException, ValueError) as error:
            raise DataError(f"{FRAME}, column {name}, of type {values.type}: {error}") from None


# a frame as Arrow columns


def names_of(frame: Any) -> list[str]:
    if isinstance(frame, Mapping):
        return list(frame)
    if isinstance(frame, pa.Table | pa.RecordBatch | pa.RecordBatchReader):
        return list(frame.schema.names)
    if hasattr(frame, "columns"):
        return list(frame.columns)
    raise DataError(
        f"{FRAME} is of type {type(frame).__name__}; give a pandas or polars frame, an Arrow table, or a dict with an "
        "array or a list for each column"
    )


def arrow_table(frame: Any, names: list[str]) -> Any:
    """Returns a pyarrow.Table of these columns. Raises DataError."""
    try:
        if isinstance(frame, Mapping):
            return pa.table({name: pa.array(frame[name], from_pandas=True) for name in names})
        if isinstance(frame, pa.RecordBatchReader):
            return frame.read_all().select(names)
        if isinstance(frame, pa.Table | pa.RecordBatch):
            return pa.table(frame).select(names)
        if hasattr(frame, "iloc"):  # of pandas
            return pa.Table.from_pandas(frame[names], preserve_index=False)
        return pa.table(frame[names])
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        reason = "; ".join(map(str, error.args))
        raise DataError(f"{FRAME}: a column has no single type, or another length ({reason}); correct it") from None


# columns as the reader of a file types them


def converted(values: Any, convert: Convert, separator: str | None) -> Any:
    """`separator`: of the items in a cell of text."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if separator is not None and is_text(values.type):
        values = split_cells(without_empty(values), Cell(kind="text", separator=separator))
    if not is_list(values.type):
        return convert(values)
    lengths = bag_lengths(values)
    assert lengths is not None, "lists have lengths"
    return pa.LargeListArray.from_arrays(offsets_of(lengths), convert(values.flatten()))


def separators(job: Job) -> dict[str, str]:
    columns = job.data.columns
    weights = {columns.weights[name]: separator for name, separator in columns.lists.items() if name in columns.weights}
    arrays = {name: columns.lists[of] for name, of in job.data.of.items() if of in columns.lists}
    return columns.lists | weights | arrays


def converts(job: Job, roles: Roles) -> dict[str, Convert]:
    form, features, rules = format_of(job.data.format), job_features(job), job.data.columns.prepare
    is_criteo = job.data.format == "criteo-tsv"
    number = cells_of_numbers if form.text_cells else numbers
    convert: dict[str, Convert] = dict.fromkeys(roles.dense, criteo_dense if is_criteo else number)
    convert |= dict.fromkeys([*roles.labels, *roles.weights, *roles.inputs, *roles.of.values()], number)
    if form.named_columns:
        hashed, plain = (texts, cells_of_integers) if form.text_cells else (hashable, integers)
        convert |= {
            feature.name: (any_value if feature.by_value else hashed) if feature.hashed else plain
            for feature in features
        }
        mapped = {name: any_value if rule.takes_text else number for name, rule in rules.items() if name in convert}
        return dict.fromkeys(roles.sources.values(), times) | {
            name: own for name, own in (convert | mapped).items() if name not in roles.sources
        }
    rows = {
        feature.name: partial(rows_of, rule, feature.num_embeddings, prepare=rules)
        for feature, rule in zip(features, id_rules(job, {}), strict=True)
    }
    return convert | {name: after(criteo_hashes if is_criteo else integers, of_row) for name, of_row in rows.items()}


def after(first: Convert, then: Convert) -> Convert:
    return lambda values: pa.array(then(first(values)))


def numbers(values: Any) -> Any:
    kind = values.type
    if pa.types.is_null(kind) or pa.types.is_decimal(kind):
        return values.cast(pa.float64())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return values
    raise ValueError("it must be numbers")


def cells_of_numbers(values: Any) -> Any:
    """Of 64 bits, as they are read from text."""
    as_numbers = without_empty(values).cast(pa.string()).cast(pa.float64()) if is_text(values.type) else numbers(values)
    return as_numbers.cast(pa.int64()) if pa.types.is_integer(as_numbers.type) else as_numbers.cast(pa.float64())


def integers(values: Any) -> Any:
    """pandas makes floats of integers if one is missing."""
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), None, values).cast(pa.int64())
    if pa.types.is_null(values.type):
        return values.cast(pa.int64())
    if pa.types.is_integer(values.type):
        return values
    raise ValueError("ids must be integers; a job with data.columns.hash takes text")


def cells_of_integers(values: Any) -> Any:
    return without_empty(values).cast(pa.string()).cast(pa.int64()) if is_text(values.type) else integers(values)


def hashable(values: Any) -> Any:
    return values if can_hash(values.type, by_value=False) else integers(values)


def any_value(values: Any) -> Any:
    """Of a column that is hashed by value, or mapped."""
    if is_text(values.type) or pa.types.is_null(values.type):
        return without_empty(values)
    if can_hash(values.type, by_value=True):
        return values
    raise ValueError("it must be text or numbers")


def times(values: Any) -> Any:
    if pa.types.is_null(values.type):
        return values.cast(pa.int64())
    if is_time(values.type):
        return values
    raise ValueError("a time is text, a number, or a timestamp")


def texts(values: Any) -> Any:
    """Returns cells as `to_csv` of pandas writes them; an empty one is missing."""
    if is_text(values.type) or pa.types.is_null(values.type):
        return without_empty(values)
    if pa.types.is_integer(values.type):
        return values.cast(pa.string())
    if pa.types.is_floating(values.type) or pa.types.is_boolean(values.type):
        coded = values.dictionary_encode()
        written = [text_of(value) for value in coded.dictionary.to_numpy(zero_copy_only=False)]
        return pa.array([None if text == "nan" else text for text in written], pa.string()).take(coded.indices)
    raise ValueError("ids must be text or numbers; make them the text that the file of training has")


def criteo_dense(values: Any) -> Any:
    return pa.array(logarithms(cells_of_integers(values).cast(pa.int64())))


def criteo_hashes(values: Any) -> Any:
    """Of hashes as 8 hex digits, or as numbers."""
    return pa.array(hash_columns([values.cast(pa.binary())])[0]) if is_text(values.type) else integers(values)
