"""Parquet: a feature is the column of its name, integers (one id a sample; null = id 0) or lists of integers (a bag; null = empty).

Label and dense columns are named by data.columns; dense values are used as they are. A feature's weights are a column of numbers or
of lists as long as its lists of ids. Files are read row group by row group; memory is bounded by one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet as pq

from prefetcher.readers.assemble import StreamedReader
from prefetcher.readers.files import Span, cumulative, data_files, eval_path, file_spans, sizes_of
from prefetcher.readers.ids import Feature, IdCheck, Place, check_dense, check_labels, job_features, require_features, row_place
from prefetcher.readers.rows import Column, Floats, Ids, block_of
from protocol.batch import Batch
from protocol.errors import ConfigError, DataError
from protocol.job import Job

FILE_NAMES = r".*\.(parquet|pq)"  # of a folder's data files
BLOCK_ROWS = 32768  # decoded at once, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Which columns of the files are read, and as what."""

    label: str
    dense: list[str]
    features: list[Feature]

    @property
    def names(self) -> list[str]:
        weights = [feature.weights_column for feature in self.features if feature.weights_column is not None]
        return list(dict.fromkeys([self.label, *self.dense, *(feature.name for feature in self.features), *weights]))


def open_reader(job: Job) -> StreamedReader:
    """Raises ConfigError for a missing path or column, DataError for a file that is empty, damaged or of the wrong types."""
    assert job.data.path is not None, "the job file refuses parquet without a path"
    if job.data.hash:
        raise ConfigError('data.hash: parquet ids are used as they are; remove it and set data.on_invalid_id = "modulo"')
    ids, held_out = IdCheck(job), eval_path(job)
    rows = ParquetRows(job, ids, data_files(job.data.path, "data.path", FILE_NAMES))
    evaluation = None if held_out is None else ParquetRows(job, ids, data_files(held_out, "data.eval_path", FILE_NAMES))
    return StreamedReader(job, ids, rows, evaluation)


class ParquetRows:
    def __init__(self, job: Job, ids: IdCheck, paths: list[Path]) -> None:
        self._ids, self._paths = ids, paths
        self.file_sizes = sizes_of(paths)
        schemas, counts = zip(*(file_facts(path) for path in paths), strict=True)
        self._columns = columns_of(job, schemas[0])
        for path, schema in zip(paths, schemas, strict=True):
            check_schema(job, self._columns, path, schema)
        self._bounds = cumulative(list(counts))

    @property
    def num_dense(self) -> int:
        return len(self._columns.dense)

    @property
    def num_rows(self) -> int:
        return self._bounds[-1]

    def blocks(self, span: Span) -> Iterator[Batch]:
        for index, part in file_spans(self._bounds, span):
            path = self._paths[index]
            for row, table in record_batches(path, self._columns.names, part):
                yield self._decode(table, row_place(path, row))

    def _decode(self, table: Any, place: Place) -> Batch:
        columns = self._columns
        dense = [floats(table[name]) for name in columns.dense]
        stacked = np.stack(dense, axis=1) if dense else np.zeros((table.num_rows, 0), np.float32)
        return block_of(
            check_dense(stacked, columns.dense, place),
            check_labels(floats(table[columns.label]), columns.label, place),
            [self._feature(table, feature, place) for feature in columns.features],
            weighted=any(feature.weights_column for feature in columns.features),
        )

    def _feature(self, table: Any, feature: Feature, place: Place) -> Column:
        values = table[feature.name]
        lengths = bag_lengths(values)
        lookup_place = place if lengths is None else bag_place(lengths, place)
        ids = self._ids.check(integers(values, feature, place), feature, lookup_place)
        return Column(ids=ids, lengths=lengths, weights=feature_weights(table, feature, lengths, place, lookup_place))


def feature_weights(table: Any, feature: Feature, lengths: Ids | None, place: Place, lookup_place: Place) -> Floats | None:
    """One weight an id, or None for a feature without weights. Raises DataError where their numbers differ."""
    if feature.weights_column is None:
        return None
    values = table[feature.weights_column]
    num_ids, num_weights = (counts_of(own, len(values)) for own in (lengths, bag_lengths(values)))
    differs = num_ids != num_weights
    if differs.any():
        row = int(np.argmax(differs))
        raise DataError(
            f"{place(row)}, column {feature.weights_column}: {num_weights[row]} weights for {num_ids[row]} ids of feature {feature.name}"
        )
    weights = floats(flat(values))
    check_dense(weights[:, None], [feature.weights_column], lookup_place)
    return weights


def counts_of(lengths: Ids | None, num_samples: int) -> Ids:
    return np.ones(num_samples, np.int64) if lengths is None else lengths


def bag_place(lengths: Ids, place: Place) -> Place:
    """Names the row in which the i-th id of a column of lists stands."""
    return lambda i: place(int(np.searchsorted(np.cumsum(lengths), i, side="right")))


def bag_lengths(values: Any) -> Ids | None:
    """Ids in each row of a column of lists; None for a column of numbers."""
    if not is_list(values.type):
        return None
    lengths: Ids = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def flat(values: Any) -> Any:
    return values.flatten() if is_list(values.type) else values


def integers(values: Any, feature: Feature, place: Place) -> Ids:
    """Every id of a column, row after row; null = 0."""
    try:
        ids: Ids = flat(values).cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise DataError(f"{place(0)} and following, column {feature.name}: an id is beyond 2**63 ({error})") from None
    return ids


def floats(values: Any) -> Floats:
    """Numbers as fp32; null becomes NaN, which the checks refuse."""
    with np.errstate(over="ignore"):  # beyond fp32 becomes infinite, which the checks refuse
        numbers: Floats = values.to_numpy(zero_copy_only=False).astype(np.float32)
    return numbers


def is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def file_facts(path: Path) -> tuple[Any, int]:
    """(schema, rows) from the file's metadata. Raises DataError for an empty or damaged file."""
    try:
        with pq.ParquetFile(path) as file:
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a whole Parquet file ({first_line(error)})") from None
    if not num_rows:
        raise DataError(f"{path}: the file is empty; give a file with at least one row")
    return schema, num_rows


def record_batches(path: Path, names: list[str], part: Span) -> Iterator[tuple[int, Any]]:
    """(row of the first, record batch) of the rows `part` of one file."""
    first = 0
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                row, first = first, first + file.metadata.row_group(group).num_rows
                if first <= part.start or row >= part.stop:
                    continue
                for table in file.iter_batches(batch_size=BLOCK_ROWS, row_groups=[group], columns=names, use_threads=False):
                    start, stop = max(part.start - row, 0), min(part.stop - row, table.num_rows)
                    if start < stop:
                        yield row + start, table.slice(start, stop - start)
                    row += table.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: the Parquet file is damaged ({first_line(error)}); write it again") from None


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def columns_of(job: Job, schema: Any) -> Columns:
    """data.columns as this schema has them. Raises ConfigError for a feature that it has not."""
    require_features(job, schema.names, "the Parquet file's columns")
    dense = job.data.columns.dense
    if dense is None:
        numbered = sorted((int(match[1]), name) for name in schema.names if (match := re.fullmatch(r"int_(\d+)", name)))
        dense = [name for _, name in numbered]
    return Columns(label=job.data.columns.label, dense=dense, features=job_features(job))


def check_schema(job: Job, columns: Columns, path: Path, schema: Any) -> None:
    """Raises ConfigError for a column that the file has not, DataError for one of a type that its role does not allow."""
    require_features(job, schema.names, f"{path}")
    for name in columns.names:
        if name not in schema.names:
            raise ConfigError(f"data.columns: {path} has no column {name}; name one that it has, such as {schema.names[0]}")
    ids = {feature.name for feature in columns.features}
    weights = {feature.weights_column for feature in columns.features}
    for name in columns.names:
        kind = schema.field(name).type
        single = kind.value_type if is_list(kind) and name in ids | weights else kind
        if not (pa.types.is_integer(single) or (name not in ids and is_number(single))):
            wanted = "integers or lists of integers" if name in ids else "numbers"
            raise DataError(f"{path}, column {name}: the type is {kind}; it must be {wanted}")


def is_number(kind: Any) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_boolean(kind))
