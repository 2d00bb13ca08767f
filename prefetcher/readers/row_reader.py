"""Turns rows into batches: does the split, the shuffle and the batch boundaries for all file formats.

A format implements `DataSetRows`: the number of rows, and a `Cursor` that reads any row.

    data.batch_size, data.shuffle, data.order -> rows of batch k -> Cursor.take -> Batch
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import Ids
from rowcast.prefetcher.readers.data_files import eval_path, files_of, split_rows
from rowcast.prefetcher.readers.hot_samples import HotBlocks, HotSamples, hot_samples
from rowcast.prefetcher.readers.id_check import IdCheck
from rowcast.prefetcher.readers.reader import Part, Pending, decoded
from rowcast.prefetcher.readers.schedule import RowOrder
from rowcast.protocol.batch import Batch, Kind
from rowcast.runtime.errors import DataError, instead


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


def open_files(job: Job, ids: IdCheck, rows_of: Callable[[list[Path]], DataSetRows]) -> "RowReader":
    """Opens the files of data.path, and of data.eval_path if the job has it, with `rows_of`. Raises what it raises, and
    ConfigError if there is no file.
    """
    held_out, rows = eval_path(job), rows_of(files_of(job, "path"))
    if held_out is None or held_out == job.data.path:  # of the same files, one index of their rows is enough
        return RowReader(job, ids, rows, None if held_out is None else rows)
    return RowReader(job, ids, rows, rows_of(files_of(job, "eval_path")))


class RowReader:
    """A `Reader` of both splits. `evaluation` None: data.eval_fraction reserves the last rows for evaluation."""

    def __init__(self, job: Job, ids: IdCheck, rows: DataSetRows, evaluation: DataSetRows | None = None) -> None:
        self._job, self._ids = job, ids
        self._rows = {"train": rows, "eval": evaluation or rows}
        self._spans = split_spans(job, rows, evaluation)
        self._hot: HotSamples | None = None
        self.dense_names = rows.dense_names
        self.paths = [*rows.paths, *(evaluation.paths if evaluation else [])]

    @property
    def invalid_ids(self) -> int:
        return self._ids.num_invalid

    def num_samples(self, split: Kind) -> int | None:
        return len(self._spans[split])

    def batches(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Batch]:
        return decoded(self.pending(split, epoch, start))

    def pending(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Pending]:
        size, span = self._job.data.batch_size, self._spans[split]
        order = self._order(split, epoch)
        with self._rows[split].cursor() as cursor:
            for first in range(start * size, len(span), size):
                yield PendingRows(
                    cursor=cursor, order=order, origin=span.start, start=first, stop=min(first + size, len(span))
                )

    @property
    def hot_samples(self) -> HotSamples:
        """Returns the hot samples of the training rows. The first call may read all their ids. Raises as
        `hot_samples`."""
        if self._hot is None:
            self._hot = hot_samples(self._job, len(self._spans["train"]))
        return self._hot

    def _order(self, split: Kind, epoch: int) -> RowOrder | HotBlocks:
        data, num_rows, train = self._job.data, len(self._spans[split]), split == "train"
        window = data.shuffle_window if train else None
        order = RowOrder(seed=self._job.job.seed, epoch=epoch, num_rows=num_rows, window=window)
        if data.num_hot_blocks is None or not train or not num_rows:
            return order
        return HotBlocks(order, self.hot_samples, data.num_hot_blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingRows:
    """The batch at positions start to stop of a split that begins at row `origin`."""

    cursor: Cursor
    order: RowOrder | HotBlocks
    origin: int
    start: int
    stop: int

    def __call__(self) -> Part:
        within = self.order.within(self.start, self.stop)
        rows = self.origin + self.order.rows(self.start, self.stop)
        return self.cursor.take(rows, range(self.origin + within.start, self.origin + within.stop))


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
