"""Parquet: a feature is the column of its name, integers (one id a sample; null = id 0) or lists of integers (a bag; null = empty).

Label and dense columns are named by data.columns; dense values are used as they are. A feature's weights are a column of numbers or
of lists as long as its lists of ids. How files are read, and by several workers, stands in `parquet_files.py`.
"""

import re
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefetcher.readers.assemble import RowReader
from prefetcher.readers.files import Span, data_files, eval_path, sizes_of
from prefetcher.readers.ids import Feature, IdCheck, Place, check_dense, check_labels, job_features, require_features, row_place
from prefetcher.readers.parquet_files import ArrowCursor, ParquetFiles
from prefetcher.readers.parts import Columns, IdsBatch, Part, Rest, decode_part
from prefetcher.readers.rows import Column, Floats, Ids, join_columns, join_ids, join_rest, rows_by_file
from protocol.errors import ConfigError, DataError
from protocol.job import Job

FILE_NAMES = r".*\.(parquet|pq)"  # of a folder's data files


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Which columns of the files are read, and as what."""

    label: str
    dense: list[str]
    features: list[Feature]

    def names(self, wanted: Columns = "all") -> list[str]:
        rest = [self.label, *self.dense]
        weights = [feature.weights_column for feature in self.features if feature.weights_column is not None]
        ids = [*(feature.name for feature in self.features), *weights]
        return list(dict.fromkeys({"all": rest + ids, "ids": ids, "rest": rest}[wanted]))


def open_reader(job: Job, columns: Columns = "all") -> RowReader:
    """Raises ConfigError for a missing path or column, DataError for a file that is empty, damaged or of the wrong types."""
    assert job.data.path is not None, "the job file refuses parquet without a path"
    if job.data.hash:
        raise ConfigError('data.hash: parquet ids are used as they are; remove it and set data.on_invalid_id = "modulo"')
    ids, held_out = IdCheck(job), eval_path(job)
    rows = ParquetRows(job, ids, data_files(job.data.path, "data.path", FILE_NAMES), columns)
    evaluation = None if held_out is None else ParquetRows(job, ids, data_files(held_out, "data.eval_path", FILE_NAMES), columns)
    return RowReader(job, ids, rows, evaluation)


class ParquetRows:
    def __init__(self, job: Job, ids: IdCheck, paths: list[Path], columns: Columns) -> None:
        self.files, self.wanted = ParquetFiles(paths), columns
        self.file_sizes = sizes_of(paths)
        self.roles = roles_of(job, self.files.schemas[0])
        for path, schema in zip(paths, self.files.schemas, strict=True):
            check_schema(job, self.roles, path, schema)
        self.decoder = RowDecoder(self.roles, ids)

    @property
    def num_dense(self) -> int:
        return len(self.roles.dense)

    @property
    def num_rows(self) -> int:
        return self.files.num_rows

    def cursor(self) -> AbstractContextManager["ParquetCursor"]:
        return closing(ParquetCursor(self))


class ParquetCursor:
    def __init__(self, rows: ParquetRows) -> None:
        self._rows = rows
        self._arrow = ArrowCursor(rows.files, rows.roles.names(rows.wanted))

    def close(self) -> None:
        self._arrow.close()

    def take(self, rows: Ids, within: Span) -> Part:
        self._arrow.hold(within)
        decoder, paths = self._rows.decoder, self._rows.files.paths
        files = rows_by_file(self._rows.files.bounds, rows)
        taken = [(self._arrow.take(own), row_place(paths[own.file], own.rows)) for own in files]
        return decode_part(
            self._rows.wanted,
            rest=lambda: join_rest(files, [decoder.rest(table, place) for table, place in taken]),
            ids=lambda: join_ids(files, [decoder.ids(table, place) for table, place in taken]),
        )


class RowDecoder:
    """Rows as Arrow has them -> checked arrays."""

    def __init__(self, roles: Roles, ids: IdCheck) -> None:
        self._roles, self._ids = roles, ids

    def rest(self, table: Any, place: Place) -> Rest:
        roles = self._roles
        with np.errstate(over="ignore"):  # beyond fp32 becomes infinite, which the checks refuse
            labels, *dense = (floats(table[name]) for name in (roles.label, *roles.dense))
        stacked = np.stack(dense, axis=1) if dense else np.zeros((table.num_rows, 0), np.float32)
        return Rest(dense=check_dense(stacked, roles.dense, place), labels=check_labels(labels, roles.label, place))

    def ids(self, table: Any, place: Place) -> IdsBatch:
        columns = [feature_column(table, feature, place) for feature in self._roles.features]
        joined = join_columns(columns, table.num_rows, weighted=any(feature.weights_column for feature in self._roles.features))
        bounds = np.cumsum([0, *(len(column.ids) for column in columns)])
        return replace(joined, ids=self._ids.check(joined.ids, bounds, lambda f: lookup_place(columns[f].lengths, place)))


def feature_column(table: Any, feature: Feature, place: Place) -> Column:
    values = table[feature.name]
    lengths = bag_lengths(values)
    ids = integers(values if lengths is None else values.flatten(), feature, place)
    return Column(ids=ids, lengths=lengths, weights=feature_weights(table, feature, lengths, place))


def feature_weights(table: Any, feature: Feature, lengths: Ids | None, place: Place) -> Floats | None:
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
    with np.errstate(over="ignore"):  # as dense values
        weights = floats(values.flatten() if is_list(values.type) else values)
    check_dense(weights[:, None], [feature.weights_column], lookup_place(lengths, place))
    return weights


def counts_of(lengths: Ids | None, num_samples: int) -> Ids:
    return np.ones(num_samples, np.int64) if lengths is None else lengths


def lookup_place(lengths: Ids | None, place: Place) -> Place:
    """Names the row in which the i-th id of a column stands."""
    return place if lengths is None else lambda i: place(int(np.searchsorted(np.cumsum(lengths), i, side="right")))


def bag_lengths(values: Any) -> Ids | None:
    """Ids in each row of a column of lists; None for a column of numbers."""
    if not is_list(values.type):
        return None
    lengths: Ids = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def integers(values: Any, feature: Feature, place: Place) -> Ids:
    """Null = 0."""
    try:
        wide = values if pa.types.is_int64(values.type) else values.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise DataError(f"{place(0)} and following, column {feature.name}: an id is beyond 2**63 ({error})") from None
    ids: Ids = (wide.fill_null(0) if wide.null_count else wide).to_numpy(zero_copy_only=False)
    return ids


def floats(values: Any) -> Floats:
    """Numbers as fp32; null becomes NaN, which the checks refuse."""
    numbers: Floats = values.to_numpy(zero_copy_only=False).astype(np.float32)
    return numbers


def is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def roles_of(job: Job, schema: Any) -> Roles:
    """data.columns as this schema has them. Raises ConfigError for a feature that it has not."""
    require_features(job, schema.names, "the Parquet file's columns")
    dense = job.data.columns.dense
    if dense is None:
        numbered = sorted((int(match[1]), name) for name in schema.names if (match := re.fullmatch(r"int_(\d+)", name)))
        dense = [name for _, name in numbered]
    return Roles(label=job.data.columns.label, dense=dense, features=job_features(job))


def check_schema(job: Job, roles: Roles, path: Path, schema: Any) -> None:
    """Raises ConfigError for a column that the file has not, DataError for one of a type that its role does not allow."""
    require_features(job, schema.names, f"{path}")
    for name in roles.names():
        if name not in schema.names:
            raise ConfigError(f"data.columns: {path} has no column {name}; name one that it has, such as {schema.names[0]}")
    ids = {feature.name for feature in roles.features}
    weights = {feature.weights_column for feature in roles.features}
    for name in roles.names():
        kind = schema.field(name).type
        single = kind.value_type if is_list(kind) and name in ids | weights else kind
        if not (pa.types.is_integer(single) or (name not in ids and is_number(single))):
            wanted = "integers or lists of integers" if name in ids else "numbers"
            raise DataError(f"{path}, column {name}: the type is {kind}; it must be {wanted}")


def is_number(kind: Any) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_boolean(kind))
