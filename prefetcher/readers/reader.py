"""Defines the interface of a reader, and opens a job's reader."""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol, cast, runtime_checkable

from rowcast.job.formats import FORMATS, format_of
from rowcast.job.schema import Job
from rowcast.protocol.batch import Batch, Kind, Lookups, Samples
from rowcast.protocol.parts import UNDIVIDED, Rank
from rowcast.runtime.checkpoint_manifest import IdType

Columns = Literal["all", "ids", "dense"]  # what a reader decodes: whole batches, or one half of each
Part = Lookups | Samples
Pending = Callable[[Rank], Part]  # decodes and checks the samples of a batch that a rank has, when called


class Reader(Protocol):
    """A data set, cut into batches in training order. Used by one thread of one process. Opening it may count rows,
    without decoding them.

    Two readers of one job yield bit-equal batches: a batch depends on job file and data, never on time or on which
    other batches were decoded. So several readers can divide the batches of a run.
    """

    @property
    def dense_names(self) -> list[str]:
        """The dense features of every sample, in their order; int_0, int_1, ... if they have no names."""

    @property
    def invalid_ids(self) -> int:
        """Ids replaced under data.on_invalid_id in the batches decoded so far."""

    @property
    def paths(self) -> list[Path]:
        """The data files in reading order; empty if there are none."""

    def num_samples(self, split: Kind) -> int | None:
        """Returns the samples of one epoch; None if only reading to the end would show it."""

    def batches(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yields batches `start`, `start` + 1, ... of one epoch, of data.batch_size samples; the last may be smaller.

        Ids, dense values and labels are checked. Raises DataError with file, line or row, column and value. Only for
        readers of all columns.
        """

    def pending(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Pending]:
        """Yields the same batches undecoded. Calling one decodes it: before the next is taken, or never. A batch that
        is not called is skipped at little or no cost. The call returns the columns that the reader was opened for, of
        the rank's samples alone: see `RankSource`. A reader that cannot tell them gives every rank the whole batch.
        """


@runtime_checkable
class CutElsewhere(Protocol):
    """A reader of batches that foreign code cuts, so that only that code knows their number."""

    @property
    def pairing(self) -> str:
        """Each feature with its column, if ids come by position; "" if they come by name."""

    def num_batches(self, split: Kind) -> int | None:
        """Returns the batches of an epoch; None if unknown."""


def id_types(reader: Reader) -> dict[str, IdType]:
    """Returns what the ids of the features are that a reader of typed columns hashes by their bytes."""
    found: dict[str, IdType] = getattr(reader, "id_types", {})
    return found


def num_batches(job: Job, reader: Reader, split: Kind) -> int | None:
    known = reader.num_batches(split) if isinstance(reader, CutElsewhere) else None
    samples = reader.num_samples(split) if known is None else None
    return known if samples is None else -(-samples // job.data.batch_size)


def decoded(pending: Iterable[Pending]) -> Iterator[Batch]:
    return map(whole_batch, pending)


def whole_batch(decode: Pending) -> Batch:
    batch = decode(UNDIVIDED)
    assert isinstance(batch, Batch), f"a reader of all columns gave {type(batch).__name__}"
    return batch


def can_share(job: Job) -> bool:
    """Returns whether several readers can divide the batches: not if foreign code makes them one by one."""
    return job.data.format in FORMATS


def stream_columns(job: Job) -> tuple[Columns, ...]:
    """Returns the columns that each stream of the data reads; the first stream has the ids."""
    return ("ids", "dense") if format_of(job.data.format).in_columns else ("all",)


def open_reader(job: Job, columns: Columns = "all") -> Reader:
    """Opens the reader of `job.data`. Raises ConfigError if the job does not fit the data, DataError if the data is
    broken."""
    assert columns == "all" or columns in stream_columns(job), f"{job.data.format} is not read in columns"
    if job.data.negatives:
        return cast(Reader, import_module("rowcast.prefetcher.readers.negatives").open_reader(job, columns))
    return open_format(job, columns)


def open_format(job: Job, columns: Columns) -> Reader:
    module = import_module(format_of(job.data.format).module)
    return cast(Reader, module.open_reader(job) if columns == "all" else module.open_reader(job, columns))


def decode_part(columns: Columns, samples: Callable[[], Samples], lookups: Callable[[], Lookups]) -> Part:
    """Decodes the requested columns. Decodes samples first, so their errors precede those of the look-ups."""
    if columns == "ids":
        return lookups()
    decoded = samples()
    return decoded if columns == "dense" else Batch.of(lookups(), decoded)
