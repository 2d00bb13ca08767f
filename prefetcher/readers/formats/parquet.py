"""Reads Parquet: a feature is the column of its name, with one id per sample or a list of ids (a bag; null = empty).

Ids are integers or, under data.columns.hash, strings. A null id is missing, in a list too. data.columns names the
labels and the dense columns; their values are used unchanged. A feature's weights are a column of numbers, or of lists
as long as its lists of ids.

Reads rows of Parquet files as a sequence of Arrow record batches.

    file  | row group       | row group       | ...
          | batch | batch | | batch | batch | |       read forward, only the requested columns
                | held        |                       the part within the current rows, in one table per file

Row groups without a requested row are skipped. Within a row group, Arrow can only read forward, so each worker that
needs rows of a group decompresses all its requested columns.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.arrow_rows import AS_IT_IS, Roles, RowDecoder, Rules, is_list, require_columns, roles_of
from rowcast.prefetcher.readers.clocks import is_time
from rowcast.prefetcher.readers.columns import FileRows, as_slice
from rowcast.prefetcher.readers.data_files import cumulative, no_rows
from rowcast.prefetcher.readers.formats.csv import typed_columns
from rowcast.prefetcher.readers.hashed_ids import can_hash, first_kinds, is_all_missing, is_text, type_of
from rowcast.prefetcher.readers.id_check import CheckedFeature, IdCheck, Location, decoding, job_features, row_location
from rowcast.prefetcher.readers.reader import Columns
from rowcast.prefetcher.readers.row_reader import ColumnRows, RowReader, open_named_columns
from rowcast.runtime.errors import ConfigError, DataError

RECORD_BATCH_ROWS = 32768  # read at once, at most


class RowGroup(NamedTuple):
    file: int
    number: int  # in the file


class ParquetFiles:
    """The metadata of the files with rows. Raises DataError for a damaged file, or if none has rows."""

    def __init__(self, paths: list[Path], features: Sequence[CheckedFeature]) -> None:
        """`features`: of the job; those under a hash become hashes."""
        self.features = features
        found = ((path, *file_facts(path)) for path in paths)
        filled = [own for own in found if sum(own[2])]
        if not filled:
            raise no_rows(paths)
        self.paths, self.schemas, rows_of_groups = map(list, zip(*filled, strict=True))
        self.kinds = first_kinds(self.schemas)
        self.groups = [
            RowGroup(file, number) for file, counts in enumerate(rows_of_groups) for number in range(len(counts))
        ]
        self.group_bounds = cumulative([num_rows for counts in rows_of_groups for num_rows in counts])
        self.bounds = np.array(cumulative([sum(counts) for counts in rows_of_groups]), np.int64)  # of the files

    def cursor(self, names: Sequence[str]) -> "ArrowCursor":
        return ArrowCursor(self, names)

    def location(self, rows: FileRows) -> Location:
        return row_location(self.paths[rows.file], rows.rows)


class RecordBatch(NamedTuple):
    file: int
    start: int  # row, counted over all files
    content: Any  # pyarrow.RecordBatch

    @property
    def stop(self) -> int:
        return self.start + int(self.content.num_rows)


class ArrowCursor:
    """Reads the given columns, typed; holds one file open and the record batches of the last `hold`."""

    def __init__(self, files: ParquetFiles, columns: Sequence[str]) -> None:
        self._files, self._columns = files, [*columns]
        self._file: pq.ParquetFile | None = None
        self._group: RowGroup | None = None  # of the open file
        self._batches: Iterator[Any] = iter(())  # of the group
        self._next_row = 0  # the first row of the next batch
        self._held: list[RecordBatch] = []  # consecutive, without gaps
        self._within = range(0)
        self._tables: dict[int, tuple[int, Any]] = {}  # file -> (its first held row, the held rows)

    def close(self) -> None:
        self._group, self._batches = None, iter(())
        if self._file is not None:
            self._file.close()
        self._file = None

    def hold(self, within: range) -> None:
        """Prepares these rows for `take`. Reads nothing twice if calls move forward."""
        if within == self._within:
            return
        held = [batch for batch in self._held if batch.start < within.stop and within.start < batch.stop]
        self._held = held if held and held[0].start <= within.start else []
        row = self._held[-1].stop if self._held else within.start
        while row < within.stop:
            self._held.append(self._read(row))
            row = self._held[-1].stop
        files = dict.fromkeys(batch.file for batch in self._held)
        self._tables = {file: self._table(file, within) for file in files}
        self._within = within

    def take(self, rows: FileRows) -> Any:
        first, table = self._tables[rows.file]
        where = as_slice(rows.rows - first)
        return table.slice(where.start, len(rows.rows)) if isinstance(where, slice) else table.take(pa.array(where))

    def _table(self, file: int, within: range) -> tuple[int, Any]:
        held = [batch for batch in self._held if batch.file == file]
        start = max(held[0].start, within.start)
        cut = [
            batch.content.slice(max(start - batch.start, 0), min(within.stop, batch.stop) - max(start, batch.start))
            for batch in held
        ]
        table = cut[0] if len(cut) == 1 else pa.Table.from_batches(cut).combine_chunks().to_batches()[0]
        return start - int(self._files.bounds[file]), table

    def _read(self, row: int) -> RecordBatch:
        """Returns the batch with this row. Continues from the last batch if the row is in the same row group."""
        index = bisect_right(self._files.group_bounds, row) - 1
        group = self._files.groups[index]
        path = self._files.paths[group.file]
        with decoding(lambda i: f"{path}, row group {group.number}", 1):
            if group != self._group or row < self._next_row:
                self._open(group)
                self._next_row = self._files.group_bounds[index]
            for content in self._batches:
                start, self._next_row = self._next_row, self._next_row + content.num_rows
                if row < self._next_row:
                    rows = np.arange(start, self._next_row) - self._files.bounds[group.file]
                    files, where = self._files, row_location(path, rows)
                    columns = typed_columns(content, files.features, files.kinds, where)
                    return RecordBatch(group.file, start, columns)
        raise DataError(f"{path}: row group {group.number} ends before its last row; write the file again")

    def _open(self, group: RowGroup) -> None:
        if self._group is None or self._group.file != group.file:
            self.close()
            self._file = pq.ParquetFile(self._files.paths[group.file])
        assert self._file is not None, f"no file is open for {self._group}"
        self._group = group
        self._batches = self._file.iter_batches(
            batch_size=RECORD_BATCH_ROWS, row_groups=[group.number], columns=self._columns, use_threads=False
        )


def file_facts(path: Path) -> tuple[Any, list[int]]:
    with decoding(lambda i: str(path), 1), pq.ParquetFile(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
    return schema, [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]


def open_reader(job: Job, columns: Columns = "all") -> RowReader:
    """Raises ConfigError for a missing path or column, DataError for a file that is empty, damaged or mistyped."""
    if job.data.hash:
        raise ConfigError(
            "data.hash: parquet ids are used as they are; remove it, or set data.columns.hash = true to hash them"
        )
    return open_named_columns(job, columns, rows_of)


def rows_of(job: Job, ids: IdCheck, part: Columns, paths: list[Path]) -> ColumnRows:
    files = ParquetFiles(paths, job_features(job))
    roles = roles_in(job, files.paths, files.schemas, ids)
    return ColumnRows(files, roles.names(part), RowDecoder(job, roles, ids), roles.dense, part)


def roles_in(job: Job, paths: list[Path], schemas: list[Any], ids: IdCheck) -> Roles:
    """Returns the roles of the first file's columns. Raises DataError or ConfigError for a file without
    them, or whose ids have another type than those of an earlier file."""
    first = schemas[0]
    roles = roles_of(job, paths[0], first.names, lambda: [field.name for field in first if is_number(field.type)])
    for path, schema in zip(paths, schemas, strict=True):
        require_columns(job, roles, path, schema.names)
        check_types(roles, job.data.columns.prepare, path, schema)
        for feature in roles.features:
            if feature.hashed and not feature.by_value and not is_all_missing(kind := schema.field(feature.name).type):
                ids.note_type(feature.name, type_of(kind), str(path))
    return roles


def check_types(roles: Roles, rules: Rules, path: Path, schema: Any) -> None:
    """Raises DataError for a column of a type that its role does not allow."""
    for feature in roles.features:
        kind = schema.field(roles.column(feature.name)).type
        single = kind.value_type if is_list(kind) else kind
        may_be_hashed = can_hash(single, by_value=feature.by_value)
        if is_all_missing(kind):
            continue
        if feature.name in rules:
            require_numbers(rules, path, feature.name, single)
        elif feature.separator and is_text(single):
            continue
        elif not pa.types.is_integer(single) and not (feature.hashed and may_be_hashed):
            remedy = "; set data.columns.hash = true to use strings as ids" if may_be_hashed else ""
            raise DataError(
                f"{path}, column {feature.name}: the type is {kind}; it must be integers or lists of integers{remedy}"
            )
    arrays = [name for name in roles.inputs if name not in {feature.name for feature in roles.features}]
    for name in [*roles.labels, *roles.dense, *roles.weights, *arrays]:
        kind = schema.field(roles.column(name)).type
        if name in arrays and is_list(kind) and name not in roles.of:
            raise DataError(
                f"{path}, column {name}: the type is {kind}, and lists belong to the look-ups of a feature; set "
                f'data.of.{name} = "FEATURE"'
            )
        has_lists = is_list(kind) and (name in roles.weights or name in roles.of)
        require_numbers(rules, path, name, kind.value_type if has_lists else kind)


def require_numbers(rules: Rules, path: Path, name: str, kind: Any) -> None:
    rule = rules.get(name, AS_IT_IS)
    if rule.clock:
        if not (is_time(kind) or is_all_missing(kind)):
            raise DataError(
                f"{path}, column {rule.of or name}: the type is {kind}; a time is text, a number, or a timestamp"
            )
        return
    is_read = rule.takes_text and can_hash(kind, by_value=True)
    if not (is_number(kind) or is_all_missing(kind) or is_read):
        raise DataError(f"{path}, column {name}: the type is {kind}; it must be numbers")


def is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
