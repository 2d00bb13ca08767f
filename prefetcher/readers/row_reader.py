"""Turns rows into batches: does the split, the shuffle and the batch boundaries for all file formats.

A format implements `DataSetRows`: the number of rows, and a `Cursor` that reads any row.

    data.batch_size, data.shuffle -> rows of batch k, of one rank -> Cursor.take -> Batch

Rows of files whose typed columns can be taken by name: of Parquet, of Arrow, and of copies of text.

rows of a batch -> rows of each file -> ColumnCursor.take -> typed columns -> ColumnDecoder -> joined in order
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol, cast

from rowcast.job.formats import Data
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import FileRows, Ids, join_dense, join_ids, rows_by_file
from rowcast.prefetcher.readers.data_files import eval_path, files_of, split_rows
from rowcast.prefetcher.readers.id_check import IdCheck, Location, decoding
from rowcast.prefetcher.readers.reader import Columns, Part, Pending, RowOrder, decode_part, decoded
from rowcast.protocol.batch import Batch, Kind, Lookups, SampleCut, Samples
from rowcast.protocol.parts import Rank, samples_of
from rowcast.runtime.checkpoint_manifest import IdType
from rowcast.runtime.errors import ConfigError, DataError, instead


class Cursor(Protocol):
    """One pass through a data set, by one thread. It may hold files open and keep what it has read."""

    def take(self, rows: Ids, within: range) -> Part:
        """Reads the given rows, at least one, in the given order, decoded and checked.

        All are `within`. Keeps only rows in that span until the next call, so a pass whose `within` moves forward reads
        nothing twice. Never decodes rows that were not requested.
        """


class DataSetRows(Protocol):
    """The rows of one or more files, counted from 0 over all of them."""

    @property
    def dense_names(self) -> list[str]: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def paths(self) -> list[Path]: ...  # of the files, in reading order

    def cursor(self) -> AbstractContextManager[Cursor]: ...


class RowsOfFiles(DataSetRows, Protocol):
    @property
    def bounds(self) -> Ids: ...  # of the files, in rows


def open_files(job: Job, ids: IdCheck, rows_of: Callable[[list[Path]], DataSetRows]) -> "RowReader":
    """Opens the files of data.path, and of data.eval_path if the job has it, with `rows_of`. Raises what it raises, and
    ConfigError if there is no file.
    """
    held_out, rows = eval_path(job), rows_of(files_of(job, "path"))
    if held_out is None or held_out == job.data.path:  # one index is enough for the same files
        return RowReader(job, ids, rows, None if held_out is None else rows)
    return RowReader(job, ids, rows, rows_of(files_of(job, "eval_path")))


class ReaderOfRows(ABC):
    """What readers of rows share: the check of their ids, and batches of decoded parts."""

    def __init__(self, job: Job, ids: IdCheck) -> None:
        self._job, self._ids = job, ids

    @property
    def invalid_ids(self) -> int:
        return self._ids.num_invalid

    @property
    def id_types(self) -> dict[str, IdType]:
        return {name: kind for name, (kind, _) in self._ids.types.items()}

    def batches(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Batch]:
        return decoded(self.pending(split, epoch, start))

    @abstractmethod
    def pending(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Pending]: ...


class RowReader(ReaderOfRows):
    """A `Reader` of both splits. `evaluation` None: data.eval_fraction reserves the last rows for evaluation."""

    def __init__(self, job: Job, ids: IdCheck, rows: DataSetRows, evaluation: DataSetRows | None = None) -> None:
        super().__init__(job, ids)
        self._rows = {"train": rows, "eval": evaluation or rows}
        self._spans = split_spans(job, rows, evaluation)
        self.dense_names = rows.dense_names
        self.paths = [*rows.paths, *(evaluation.paths if evaluation else [])]

    def num_samples(self, split: Kind) -> int | None:
        return len(self._spans[split])

    def pending(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Pending]:
        size, span = self._job.data.batch_size, self._spans[split]
        window = self._job.data.shuffle_window if split == "train" else None
        order = RowOrder(seed=self._job.job.seed, epoch=epoch, num_rows=len(span), window=window)
        with self._rows[split].cursor() as cursor:
            for first in range(start * size, len(span), size):
                yield PendingRows(
                    cursor=cursor, order=order, origin=span.start, start=first, stop=min(first + size, len(span))
                )

    def untrained(self, batch: int) -> Iterator[Pending]:
        rows, data = cast(RowsOfFiles, self._rows["train"]), self._job.data
        new = new_rows(data, batch, rows.num_rows)
        spans = (range(*span) for span in pairwise(rows.bounds.tolist()) if span[0] in new)
        return chain.from_iterable(rows_in_order(rows, span, data.batch_size) for span in spans)


def new_rows(data: Data, batch: int, num_rows: int) -> range:
    """Returns the rows of a training batch, or of its shuffled blocks, that no batch before it may have."""
    order = RowOrder(seed=0, epoch=0, num_rows=num_rows, window=data.shuffle_window)
    first, size = batch * data.batch_size, data.batch_size
    before = order.within(first - 1, first).stop if batch else 0
    return range(before, order.within(first, min(first + size, num_rows)).stop)


def rows_in_order(rows: DataSetRows, span: range, size: int) -> Iterator["PendingRows"]:
    order = RowOrder(seed=0, epoch=0, num_rows=span.stop, window=None)
    with rows.cursor() as cursor:
        for start in span[::size]:
            yield PendingRows(cursor=cursor, order=order, origin=0, start=start, stop=min(start + size, span.stop))


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingRows:
    """The batch at positions start to stop of a split that begins at row `origin`."""

    cursor: Cursor
    order: RowOrder
    origin: int
    start: int
    stop: int

    def __call__(self, rank: Rank) -> Part:
        samples = samples_of(self.stop - self.start, rank)
        start, stop = self.start + samples.start, self.start + samples.stop
        part = self._take(start, max(stop, start + 1))  # arrays of no sample have the dtypes and widths of one
        part = part if start < stop else without_samples(part)
        others = self.stop - self.start - (stop - start)
        return replace(part, others=others) if isinstance(part, Lookups) and others else part

    def _take(self, start: int, stop: int) -> Part:
        within = self.order.within(start, stop)
        rows = self.origin + self.order.rows(start, stop)
        return self.cursor.take(rows, range(self.origin + within.start, self.origin + within.stop))


def without_samples(part: Part) -> Part:
    none = SampleCut(slice(0), {})
    if not isinstance(part, Lookups):
        return part.within(none)
    lookups = Lookups(size=0, ids=part.ids[:0], weights=None if part.weights is None else part.weights[:0])
    return Batch.of(lookups, part.within(none)) if isinstance(part, Batch) else lookups


def split_spans(job: Job, rows: DataSetRows, evaluation: DataSetRows | None) -> dict[Kind, range]:
    """Returns the rows of training and evaluation. Raises DataError if their dense features differ."""
    if evaluation is None:
        train, held_out = split_rows(rows.num_rows, job.data.eval_fraction)
        return {"train": train, "eval": held_out}
    if evaluation.dense_names != rows.dense_names:
        raise DataError(
            f"data.eval_path has the dense columns {instead(evaluation.dense_names, rows.dense_names)} of data.path; "
            "give both the same"
        )
    return {"train": range(rows.num_rows), "eval": range(evaluation.num_rows)}


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

    @property
    def bounds(self) -> Ids:
        return self.files.bounds

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
