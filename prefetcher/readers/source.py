"""Where the planner's batches come from: the interface that the decoding process and the in-process driver share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from prefetcher.readers.base import Reader, open_reader
from prefetcher.readers.schedule import PlacedBatch, Position, expected_train_steps, schedule
from protocol.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceInfo:
    """What is known before the first batch."""

    num_dense: int
    expected_train_steps: int | None  # expected over the whole run; None where the reader does not know its samples
    num_train: int | None  # samples of an epoch
    num_eval: int | None
    file_sizes: list[int]  # bytes, of the data files in the order read


@dataclass(kw_only=True, slots=True)
class SourceCounters:
    batches: int = 0  # delivered by poll
    invalid_ids: int = 0  # replaced under data.on_invalid_id, in what was delivered and read ahead with it
    decoder_blocked_s: float = 0.0  # the decoder waited for room
    planner_blocked_s: float = 0.0  # poll had nothing to give, from the first such answer to the next batch
    queue_depth: int = 0  # batches decoded and waiting, after the last poll


class Source(Protocol):
    """The batches of a run, in order. Called from one thread."""

    counters: SourceCounters

    def start(self) -> None:
        """Begins decoding. Called once, before anything else."""

    def info(self) -> SourceInfo:
        """What is known before the first batch, waiting for it. Raises as `poll` where the data cannot be opened."""

    def poll(self) -> PlacedBatch | None:
        """Without waiting: the next batch, or None where none has arrived (or, see `ended`, none will).

        Raises the reader's ConfigError or DataError, after every batch before it, and RowcastError where the decoder is gone.
        """

    @property
    def ended(self) -> bool:
        """Every batch of the run has been delivered; set by the poll that finds nothing more."""

    def close(self) -> None:
        """Stops decoding and drops what was not delivered. May be called at any time, and again."""


class InlineSource:
    """A `Source` that decodes in the calling thread, one batch a poll."""

    def __init__(self, job: Job, max_steps: int | None = None, start: Position | None = None) -> None:
        self.counters = SourceCounters()
        self._job, self._max_steps, self._position = job, max_steps, start
        self._open: tuple[Reader, SourceInfo, Iterator[PlacedBatch]] | None = None
        self._ended = self._closed = False

    def start(self) -> None:
        """Nothing begins before the first poll."""

    def info(self) -> SourceInfo:
        return self._opened()[1]

    def poll(self) -> PlacedBatch | None:
        if self._closed:
            return None
        reader, _, batches = self._opened()
        batch = next(batches, None)
        self._ended = batch is None
        self.counters.batches += batch is not None
        self.counters.invalid_ids = reader.invalid_ids
        return batch

    @property
    def ended(self) -> bool:
        return self._ended

    def close(self) -> None:
        self._closed, self._open = True, None

    def _opened(self) -> tuple[Reader, SourceInfo, Iterator[PlacedBatch]]:
        if self._open is None:
            reader = open_reader(self._job)
            batches = schedule(self._job, reader, self._max_steps, self._position)
            self._open = reader, source_info(self._job, reader, self._max_steps), batches
        return self._open


def source_info(job: Job, reader: Reader, max_steps: int | None) -> SourceInfo:
    return SourceInfo(
        num_dense=reader.num_dense,
        expected_train_steps=expected_train_steps(job, reader, max_steps),
        num_train=reader.num_samples("train"),
        num_eval=reader.num_samples("eval"),
        file_sizes=reader.file_sizes,
    )
