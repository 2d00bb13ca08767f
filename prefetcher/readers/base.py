"""What every reader promises, and the one place that knows which format is read by which file."""

from collections.abc import Iterator
from importlib import import_module
from typing import Protocol, cast

from protocol.batch import Batch, Kind
from protocol.job import Job

FORMATS = {  # data.format -> a module with open_reader(job); imported only when used
    "criteo-tsv": "prefetcher.readers.criteo_tsv",
    "criteo-npy": "prefetcher.readers.criteo_npy",
    "parquet": "prefetcher.readers.parquet",
    "synthetic": "prefetcher.readers.synthetic",
}
CUSTOM = "prefetcher.readers.custom"  # data.format = "package.module:factory"


class Reader(Protocol):
    """A data set, cut into batches in training order. Used by one thread of one process; opening it reads no rows beyond a count.

    Two readers of one job yield bit-equal batches: batches are a function of job file and data, never of time.
    """

    @property
    def num_dense(self) -> int:
        """Dense features of every sample."""

    @property
    def invalid_ids(self) -> int:
        """Ids replaced so far under data.on_invalid_id, counted as rows are decoded (up to a shuffle window ahead of the batches)."""

    @property
    def file_sizes(self) -> list[int]:
        """Bytes of the data files, in the order in which they are read; empty where there are none."""

    def num_samples(self, split: Kind) -> int | None:
        """Samples of one epoch, or None where only reading to the end would tell."""

    def batches(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches `start`, `start` + 1, ... of one epoch: data.batch_size samples each, the last one what is left.

        Ids and dense values are checked. Raises DataError with file, line or row, column and value.
        """


def open_reader(job: Job) -> Reader:
    """The reader of `job.data`. Raises ConfigError where the job does not fit the data, DataError where the data is broken."""
    module = import_module(FORMATS.get(job.data.format, CUSTOM))
    return cast(Reader, module.open_reader(job))
