"""What every reader promises, and how the reader of a job is opened."""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Protocol, cast, runtime_checkable

from rowcast.job.formats import FORMATS, format_of
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.batch_parts import Columns, Part
from rowcast.protocol.batch import Batch, Kind

Pending = Callable[[], Part]  # a batch that is decoded and checked when it is called


class Reader(Protocol):
    """A data set, cut into batches in training order. Used by one thread of one process; opening it reads no rows beyond a count.

    Two readers of one job yield bit-equal batches: batches are a function of job file and data, never of time, and none depends on
    whether others were decoded. So several readers can share the batches of a run.
    """

    @property
    def num_dense(self) -> int:
        """Dense features of every sample."""

    @property
    def invalid_ids(self) -> int:
        """Ids replaced under data.on_invalid_id in the batches decoded so far."""

    @property
    def file_sizes(self) -> list[int]:
        """Bytes of the data files, in the order in which they are read; empty where there are none."""

    def num_samples(self, split: Kind) -> int | None:
        """Samples of one epoch, or None where only reading to the end would tell."""

    def batches(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches `start`, `start` + 1, ... of one epoch: data.batch_size samples each, the last one what is left.

        Ids, dense values and labels are checked. Raises DataError with file, line or row, column and value. For readers of all columns.
        """

    def pending(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Pending]:
        """The same batches, each decoded when it is called: before the next one is taken, or never. One that is never called is skipped,
        and costs little or nothing. The call gives the columns that the reader was opened for.
        """


@runtime_checkable
class CutElsewhere(Protocol):
    """A reader whose batches foreign code has cut: nothing but that code knows their number."""

    @property
    def pairing(self) -> str:
        """Which column was taken for which feature, where ids come by position; "" where they come by name."""

    def num_batches(self, split: Kind) -> int | None:
        """Of an epoch; None where nothing tells."""


def num_batches(job: Job, reader: Reader, split: Kind) -> int | None:
    """Batches of an epoch, where the reader knows its samples or its batches."""
    known = reader.num_batches(split) if isinstance(reader, CutElsewhere) else None
    samples = reader.num_samples(split) if known is None else None
    return known if samples is None else -(-samples // job.data.batch_size)


def decoded(pending: Iterable[Pending]) -> Iterator[Batch]:
    """`Reader.batches`, for those that implement `Reader.pending`."""
    return map(whole_batch, pending)


def whole_batch(decode: Pending) -> Batch:
    batch = decode()
    assert isinstance(batch, Batch), f"a reader of all columns gave {type(batch).__name__}"
    return batch


def can_share(job: Job) -> bool:
    """Whether several readers can share the batches, each decoding only its own: not where foreign code makes them one by one."""
    return job.data.format in FORMATS


def stream_columns(job: Job) -> tuple[Columns, ...]:
    """How many streams the data is read as, and which columns of it each one reads; the ids are in the first."""
    return ("ids", "dense") if format_of(job.data.format).in_columns else ("all",)


def open_reader(job: Job, columns: Columns = "all") -> Reader:
    """The reader of `job.data`. Raises ConfigError where the job does not fit the data, DataError where the data is broken."""
    assert columns == "all" or columns in stream_columns(job), f"{job.data.format} is not read in columns"
    module = import_module(format_of(job.data.format).module)
    return cast(Reader, module.open_reader(job) if columns == "all" else module.open_reader(job, columns))
