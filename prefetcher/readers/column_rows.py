"""Rows of files whose typed columns can be taken by name: of Parquet, of Arrow, and of copies of text.

rows of a batch -> rows of each file -> ColumnCursor.take -> typed columns -> ColumnDecoder -> joined in order
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import FileRows, Ids, join_dense, join_ids, rows_by_file
from rowcast.prefetcher.readers.id_check import IdCheck, Location, decoding
from rowcast.prefetcher.readers.reader import Columns, Part, decode_part
from rowcast.prefetcher.readers.row_reader import RowReader, open_files
from rowcast.protocol.batch import Lookups, Samples
from rowcast.runtime.errors import ConfigError


class ColumnCursor(Protocol):
    """One pass through the files, by one thread."""

    def hold(self, within: range) -> None:
        """Prepares these rows, counted over all files, for `take`. Reads nothing twice if calls move forward."""

    def take(self, rows: FileRows) -> Any:
        """Returns a pyarrow.RecordBatch of typed columns: the rows in their order, all of them held."""

    def close(self) -> None: ...


class ColumnFiles(Protocol):
    """The files with rows."""

    paths: list[Path]
    bounds: Ids  # of the files, in rows

    def cursor(self, names: Sequence[str]) -> ColumnCursor: ...

    def location(self, rows: FileRows) -> Location: ...


class ColumnDecoder(Protocol):
    """Checks the columns of rows, and makes arrays of them. Raises DataError."""

    def dense(self, table: Any, location: Location) -> Samples: ...

    def lengths(self, table: Any) -> dict[str, Ids]:
        """Returns the entries of each sample in the arrays of look-ups."""

    def ids(self, table: Any, location: Location) -> Lookups: ...


class ColumnRows:
    def __init__(
        self, files: ColumnFiles, names: Sequence[str], decoder: ColumnDecoder, dense_names: list[str], part: Columns
    ) -> None:
        """`names`: the columns that `part` needs."""
        self.files, self.names, self.decoder, self.dense_names, self.part = files, names, decoder, dense_names, part
        self.paths = files.paths

    @property
    def num_rows(self) -> int:
        return int(self.files.bounds[-1])

    def cursor(self) -> AbstractContextManager["RowsCursor"]:
        return closing(RowsCursor(self))


class RowsCursor:
    def __init__(self, rows: ColumnRows) -> None:
        self._rows = rows
        self._columns = rows.files.cursor(rows.names)

    def close(self) -> None:
        self._columns.close()

    def take(self, rows: Ids, within: range) -> Part:
        self._columns.hold(within)
        decoder, files = self._rows.decoder, rows_by_file(self._rows.files.bounds, rows)
        places = [self._rows.files.location(own) for own in files]
        with decoding(places[0], len(rows)):
            taken = [(self._columns.take(own), place) for own, place in zip(files, places, strict=True)]
            return decode_part(
                self._rows.part,
                samples=lambda: join_dense(
                    files,
                    [decoder.dense(table, location) for table, location in taken],
                    [decoder.lengths(table) for table, _ in taken],
                ),
                lookups=lambda: join_ids(files, [decoder.ids(table, location) for table, location in taken]),
            )


def open_named_columns(
    job: Job, part: Columns, rows_of: Callable[[Job, IdCheck, Columns, list[Path]], ColumnRows]
) -> RowReader:
    """Opens the files of a format with named columns. Raises what `rows_of` raises, and ConfigError for data.hash or a
    missing path."""
    if job.data.hash:
        raise ConfigError("data.hash belongs to criteo-npy; remove it, or set data.columns.hash = true to hash ids")
    ids = IdCheck(job)
    return open_files(job, ids, partial(rows_of, job, ids, part))
