"""Reads uncompressed Arrow files (`.arrow`, `.feather`) as they lie on the disk; columns as in Parquet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.arrow_rows import RowDecoder
from rowcast.prefetcher.readers.columns import FileRows
from rowcast.prefetcher.readers.copies import CopyCursor
from rowcast.prefetcher.readers.data_files import cumulative, no_rows
from rowcast.prefetcher.readers.formats.csv import typed_columns
from rowcast.prefetcher.readers.formats.parquet import roles_in
from rowcast.prefetcher.readers.hashed_ids import first_kinds
from rowcast.prefetcher.readers.id_check import CheckedFeature, IdCheck, Location, job_features, row_location
from rowcast.prefetcher.readers.mapped_files import MappedFile
from rowcast.prefetcher.readers.reader import Columns
from rowcast.prefetcher.readers.row_reader import ColumnRows, RowReader, open_named_columns
from rowcast.runtime.errors import DataError


def open_reader(job: Job, columns: Columns = "all") -> RowReader:
    """Raises ConfigError for a missing path or column, DataError for a file that is empty, compressed or mistyped."""
    return open_named_columns(job, columns, rows_of)


def rows_of(job: Job, ids: IdCheck, part: Columns, paths: list[Path]) -> ColumnRows:
    files = ArrowFiles(paths, job_features(job))
    roles = roles_in(job, files.paths, [file.schema for file in files.files], ids)
    return ColumnRows(files, roles.names(part), RowDecoder(job, roles, ids), roles.dense, part)


class ArrowFiles:
    """Mapped files with rows. Raises DataError for one that cannot be mapped, or if none has rows."""

    def __init__(self, paths: list[Path], features: Sequence[CheckedFeature]) -> None:
        self._features = features
        found = ((path, *mapped(path)) for path in paths)
        filled = [own for own in found if own[2][-1]]
        if not filled:
            raise no_rows(paths)
        self.paths, self.files, self._batch_bounds = map(list, zip(*filled, strict=True))
        self.kinds = first_kinds([file.schema for file in self.files])
        self.bounds = np.array(cumulative([int(own[-1]) for own in self._batch_bounds]), np.int64)

    def cursor(self, names: Sequence[str]) -> CopyCursor:
        return CopyCursor(self, names)

    def take(self, rows: FileRows, names: Sequence[str]) -> Any:
        table = self.files[rows.file].take(rows.rows, self._batch_bounds[rows.file], names)
        return typed_columns(table, self._features, self.kinds, self.location(rows))

    def location(self, rows: FileRows) -> Location:
        return row_location(self.paths[rows.file], rows.rows)


def mapped(path: Path) -> tuple[MappedFile, Any]:
    """Returns a file, and the bounds of its record batches in rows."""
    try:
        file = MappedFile(path)
        return file, np.array(cumulative(file.open()), np.int64)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{path}: no uncompressed Arrow file ({reason}); write it with "
            'pyarrow.feather.write_feather(table, path, compression="uncompressed"), or as Parquet'
        ) from error
