"""From rows to batches: the split, the shuffle and the batch boundaries that all file formats share.

A format that can go to any row implements `IndexedRows`, one that can only be read forward `StreamedRows`; both get the rest from here.
"""

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from prefetcher.readers.files import Span, split_rows
from prefetcher.readers.ids import IdCheck
from prefetcher.readers.rows import Ids, compact, cut, take_rows
from prefetcher.readers.shuffle import RowOrder
from protocol.batch import Batch, Kind
from protocol.errors import DataError
from protocol.job import Job


class Rows(Protocol):
    """The rows of one or more files, counted through from 0."""

    @property
    def num_dense(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def file_sizes(self) -> list[int]: ...  # bytes


class IndexedRows(Rows, Protocol):
    def take(self, rows: Ids) -> Batch:
        """The given rows in the given order, checked."""


class StreamedRows(Rows, Protocol):
    def blocks(self, span: Span) -> Iterator[Batch]:
        """The rows of `span` in order, checked, in blocks of any size."""


AnyRows = TypeVar("AnyRows", bound=Rows)


class SplitRows(Generic[AnyRows]):
    """What the two readers share: rows of both splits. `evaluation` None: the last rows, by data.eval_fraction."""

    def __init__(self, job: Job, ids: IdCheck, rows: AnyRows, evaluation: AnyRows | None = None) -> None:
        self._job, self._ids = job, ids
        self._rows = {"train": rows, "eval": evaluation or rows}
        self._spans = split_spans(job, rows, evaluation)
        self.num_dense = rows.num_dense
        self.file_sizes = [*rows.file_sizes, *(evaluation.file_sizes if evaluation else [])]

    @property
    def invalid_ids(self) -> int:
        return self._ids.num_invalid

    def num_samples(self, split: Kind) -> int | None:
        return self._spans[split].num_rows


class IndexedReader(SplitRows[IndexedRows]):
    """A `Reader` over rows that can be taken in any order."""

    def batches(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Batch]:
        size, span = self._job.data.batch_size, self._spans[split]
        window = self._job.data.shuffle_window if split == "train" else None
        order = RowOrder(seed=self._job.job.seed, epoch=epoch, num_rows=span.num_rows, window=window)
        for at in range(start * size, span.num_rows, size):
            rows = order.rows(at, min(at + size, span.num_rows))
            yield compact(self._rows[split].take(span.start + rows))


class StreamedReader(SplitRows[StreamedRows]):
    """A `Reader` over rows that are read forward; a window shuffle holds one block of data.shuffle's rows."""

    def batches(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Batch]:
        size = self._job.data.batch_size
        shuffled = split == "train" and self._job.data.shuffle_window is not None
        blocks = self._shuffled(epoch, start * size) if shuffled else self._blocks(split, start * size)
        return map(compact, cut(blocks, size))

    def _blocks(self, split: Kind, first: int) -> Iterator[Batch]:
        span = self._spans[split]
        return self._rows[split].blocks(Span(start=span.start + first, stop=span.stop))

    def _shuffled(self, epoch: int, first: int) -> Iterator[Batch]:
        """Training rows in the epoch's order, from its position `first` on."""
        data, num_rows = self._job.data, self._spans["train"].num_rows
        order = RowOrder(seed=self._job.job.seed, epoch=epoch, num_rows=num_rows, window=data.shuffle_window)
        assert order.window, "a stream is shuffled by window; the job file refuses full"
        block, skip = divmod(first, order.window)
        for rows in cut(self._blocks("train", block * order.window), order.window):
            yield take_rows(rows, order.permutation(block)[skip:])
            block, skip = block + 1, 0


def split_spans(job: Job, rows: Rows, evaluation: Rows | None) -> dict[Kind, Span]:
    """Which rows are for training and which for evaluation. Raises DataError where the two differ in dense features."""
    if evaluation is None:
        train, held_out = split_rows(rows.num_rows, job.data.eval_fraction)
        return {"train": train, "eval": held_out}
    if evaluation.num_dense != rows.num_dense:
        raise DataError(f"data.eval_path has {evaluation.num_dense} dense features, data.path {rows.num_dense}; give both the same")
    return {"train": Span(start=0, stop=rows.num_rows), "eval": Span(start=0, stop=evaluation.num_rows)}
