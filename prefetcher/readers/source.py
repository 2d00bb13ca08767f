"""Delivers the planner's batches, decoded in child processes (`workers.py`), and of these the samples of one rank.

    stream of ids  ---- far ahead ------------------------> poll_ids
    stream of dense --- as far as poll_dense has asked ---> poll_dense

Ids are needed for the whole horizon, dense features and labels only when their batch is planned. A format with separate
columns is read as two streams, so that hundreds of batches hold only ids. Any other format is one stream of whole
batches; their dense features are kept here until requested.

    batch 0 to 31     decoded whole by every rank    Source: to measure and to compare    RankSource: the rank's samples
    later ones        decoded by each rank: its own samples, or whole where a reader cannot tell these; a rank that owns
                      placed tables decodes the ids of all samples, and all columns of a format that is one stream
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from rowcast.job.schema import Job
from rowcast.job.tables import TableSpec
from rowcast.prefetcher.readers.reader import CutElsewhere, Part, Reader, expected_train_steps, id_types, num_batches
from rowcast.protocol.batch import (
    Batch,
    Lookups,
    SampleCut,
    Samples,
    Scheduled,
    ScheduledBatch,
    dense_checksum,
    ids_checksum,
    needed_offsets,
)
from rowcast.protocol.messages import Ids
from rowcast.protocol.parts import Belonging, Rank, arrays_of_samples, ids_of_samples, samples_of
from rowcast.runtime.arrays import I64
from rowcast.runtime.checkpoint_manifest import IdType, Position
from rowcast.runtime.errors import DataError, RemoteProtocolError


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceInfo:
    """Facts known before the first batch."""

    dense_names: list[str]
    expected_train_steps: int | None  # over the whole run; None if the reader does not know its samples
    num_train: int | None  # samples of an epoch
    num_eval: int | None
    paths: list[Path]  # of the data files, in reading order
    # train and evaluation batches of an epoch, if known
    epoch_batches: tuple[int | None, int | None] = (None, None)
    pairing: str = ""  # each feature with its column, if ids come by position
    id_types: dict[str, IdType] = field(default_factory=dict)  # as `reader.id_types`


@dataclass(kw_only=True, slots=True)
class SourceCounters:
    """Counters of the stream with the ids."""

    batches: int = 0  # delivered
    invalid_ids: int = 0  # replaced under data.on_invalid_id, in the batches delivered
    queue_depth: int = 0  # batches decoded and waiting
    awaits_file: bool = False  # the decoder of the next batch waits for one (data.follow)
    files: int = 0  # a checksum of the files of the batch delivered last (data.follow)


class BatchStream(Protocol):
    """The batches of a run in order, whole or half of each. Called from one thread."""

    counters: SourceCounters

    def start(self) -> None: ...

    def info(self) -> SourceInfo: ...

    def take(self) -> Scheduled[Part] | None:
        """Returns the next one without waiting; None if none has arrived or, see `ended`, none will. Raises as
        `Source.poll_ids`, the same error at every later call.
        """

    @property
    def ended(self) -> bool: ...

    def close(self) -> None: ...


class Source:
    """The batches of a run, in order. Called from one thread.

    `poll_ids` looks ahead, and `poll_dense` follows it batch by batch. `poll` does both, for callers that do not look
    ahead.
    """

    def __init__(self, ids: BatchStream, dense: BatchStream | None) -> None:
        """`dense` None: `ids` delivers whole batches."""
        self.counters = ids.counters
        self._ids, self._dense = ids, dense
        self._back: deque[ScheduledBatch] = deque()  # batches that were put back, and whose ids were not returned again
        self._kept: deque[Samples] = deque()  # samples that arrived and were not returned
        # batches whose ids were returned, whose samples have arrived, whose samples were returned
        self._num_ids = self._num_arrived = self._num_whole = 0
        self._broken: DataError | None = None  # why the ids of the next batch cannot be returned
        self._polled: Scheduled[Lookups] | None = None  # by `poll`, while their samples have not arrived

    def start(self) -> None:
        """Starts decoding. Called once, before anything else."""
        for stream in self._streams:
            stream.start()

    def info(self) -> SourceInfo:
        """Waits for the facts known before the first batch. Raises as `poll_ids` if the data cannot be opened."""
        return self._ids.info()

    def poll_ids(self) -> Scheduled[Lookups] | None:
        """Returns the next batch's ids without waiting, or None if none have arrived (or, see `ended`, none will).

        Raises the reader's ConfigError or DataError after every batch before it, RowcastError if a decoder is gone.
        """
        if self._back:
            whole = self._back.popleft()
            self._num_ids += 1
            return whole.holding(whole.batch.lookups)
        polled, self._polled = self._polled, None
        return polled or self._next_ids()

    def poll_dense(self) -> Samples | None:
        """Returns the samples of the oldest batch that lacks them, without waiting, or None if they have not arrived.
        Raises as `poll_ids`.

        Must be called only for batches that `poll_ids` has returned.
        """
        assert self._num_whole < self._num_ids, (
            f"the dense part of batch {self._num_whole} was requested, but ids of {self._num_ids} batches were given"
        )
        if not self._kept and not self._take_dense():
            return None
        self._num_whole += 1
        return self._kept.popleft()

    def poll(self) -> ScheduledBatch | None:
        self._polled = self.poll_ids()
        assert self._polled is None or self._num_whole + 1 == self._num_ids, (
            f"{self._num_ids - self._num_whole} batches lack their dense part"
        )
        samples = None if self._polled is None else self.poll_dense()
        if self._polled is None or samples is None:
            return None
        ids, self._polled = self._polled, None
        return ids.holding(Batch.of(ids.batch, samples))

    def put_back(self, batches: Sequence[ScheduledBatch]) -> None:
        """Every batch that `poll` has returned will be returned again."""
        assert len(batches) == self._num_whole, f"{len(batches)} of {self._num_whole} batches are put back"
        self._num_ids, self._num_whole = self._num_ids - len(batches), 0
        self._back.extend(batches)
        self._kept.extendleft(own.batch.samples for own in reversed(batches))

    @property
    def ended(self) -> bool:
        """Whether the ids of every batch have been returned; set by the poll that finds no more."""
        return not self._back and self._ids.ended

    def close(self) -> None:
        """Stops decoding and drops what was not returned. May be called at any time and repeatedly."""
        for stream in self._streams:
            stream.close()
        self._back.clear()
        self._kept.clear()
        self._polled = None

    @property
    def _streams(self) -> list[BatchStream]:
        return [self._ids] if self._dense is None else [self._ids, self._dense]

    def _go_on_with(self, ids: BatchStream, dense: BatchStream | None) -> None:
        """Goes on with streams that start after all returned batches, which have been put back."""
        ids.counters = self.counters
        self._ids, self._dense, self._broken, self._polled = ids, dense, None, None
        self._num_ids, self._num_arrived = 0, len(self._kept)

    def _next_ids(self) -> Scheduled[Lookups] | None:
        arrived = self._take_ids()
        if arrived is None:
            return None
        part = arrived.batch
        if isinstance(part, Batch):
            self._keep(part.samples)
            part = part.lookups
        assert not isinstance(part, Samples), "a stream of ids must give ids"
        self._num_ids += 1
        return arrived.holding(part)

    def _take_ids(self) -> Scheduled[Part] | None:
        """Returns the next ids. Raises the data's first error, also one in a dense part, as if whole batches were
        decoded in order."""
        if self._broken is None:
            try:
                return self._ids.take()
            except DataError as error:
                self._broken = error
        if not self._dense_has_caught_up():
            return None
        raise self._broken

    def _dense_has_caught_up(self) -> bool:
        """Whether the samples of the batch with broken ids, and all before it, have arrived. Raises if they are
        broken."""
        while self._dense is not None and self._num_arrived <= self._num_ids:
            if not self._take_dense():
                return False
        return True

    def _take_dense(self) -> bool:
        arrived = None if self._dense is None else self._dense.take()
        if arrived is None:
            return False
        assert isinstance(arrived.batch, Samples), "a stream of samples must give those"
        self._keep(arrived.batch)
        return True

    def _keep(self, samples: Samples) -> None:
        self._kept.append(samples)
        self._num_arrived += 1


class RankSource:
    """The samples that a rank has of each batch, in order. Called as `Source`.

    Look-ups of the batch are in the first bag of every rank that has samples. Offsets are left away if every bag here
    holds one id, whatever other ranks have.
    """

    def __init__(self, source: Source, rank: Rank, of: Belonging) -> None:
        # covers the newest polled batch: its files (data.follow), or all its samples if it came whole; 0 if neither
        self.checksum = 0
        self.whole: Lookups  # as the ids that were polled last came: of all samples, if this rank reads these
        self.belonging = of
        self._source, self._rank = source, rank
        # of the batches whose ids were returned and whose samples were not: how samples that come whole are cut
        self._cuts: deque[tuple[int, SampleCut] | None] = deque()

    def poll_ids(self) -> Scheduled[Lookups] | None:
        """Returns the rank's look-ups of the next batch. Waits and raises as `Source.poll_ids`."""
        ids = self._source.poll_ids()
        if ids is None:
            return None
        batch = self.whole = ids.batch
        files = self._source.counters.files
        if batch.others or self._rank.count == 1:
            self.checksum = files
            self._cuts.append(None)
            return ids
        self.checksum = files or int(ids_checksum(batch), 16)
        samples = samples_of(batch.size, self._rank)
        self._cuts.append((batch.size, arrays_of_samples(batch, samples, self.belonging)))
        own = ids_of_samples(batch, samples, self.belonging.batch_positions)
        offsets = needed_offsets(own.ids, own.offsets)
        return ids.holding(replace(own, offsets=offsets, others=batch.size - own.size))

    def poll_dense(self) -> Samples | None:
        """Returns the rank's samples of the oldest batch that lacks them. Waits and raises as `Source.poll_dense`."""
        samples = self._source.poll_dense()
        cut = None if samples is None else self._cuts.popleft()
        if samples is None or cut is None or len(samples.labels) != cut[0]:
            self.checksum = 0
            return samples
        self.checksum = int(dense_checksum(samples), 16)
        return samples.within(cut[1])

    @property
    def ended(self) -> bool:
        return self._source.ended

    @property
    def awaits_file(self) -> bool:
        return self._source.counters.awaits_file


def source_info(job: Job, reader: Reader, max_steps: int | None, start: Position | None) -> SourceInfo:
    return SourceInfo(
        dense_names=reader.dense_names,
        expected_train_steps=expected_train_steps(job, reader, max_steps, start),
        num_train=reader.num_samples("train"),
        num_eval=reader.num_samples("eval"),
        paths=reader.paths,
        epoch_batches=(num_batches(job, reader, "train"), num_batches(job, reader, "eval")),
        pairing=reader.pairing if isinstance(reader, CutElsewhere) else "",
        id_types=id_types(reader),
    )


NO_SAMPLES = Samples(dense=np.zeros((1, 0), np.float32), labels=np.zeros(1, np.float32))


class ScriptIds:
    """The batches of a training script: the rows that it will look up, step by step, as it announces them. A batch is
    one sample, and each table a feature with a bag of distinct rows. Samples stay in the script.

    Implements `BatchStream`. The mail's thread calls `accept`, the planning's the others."""

    ended = False  # the script may always look up more

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self.counters = SourceCounters()
        self._sizes = [table.num_embeddings for table in tables]
        self._step = self._train_step = 0  # of the next batch
        self._parts: list[bytes] = []  # of its rows
        self._arrived: deque[Scheduled[Batch]] = deque()

    def accept(self, message: Ids) -> None:
        """Raises RemoteProtocolError if rows are missing, repeated or in no table."""
        self._parts.append(message.rows)
        rows = np.frombuffer(b"".join(self._parts), np.int64)
        if message.step != self._step or len(message.counts) != len(self._sizes) or len(rows) > sum(message.counts):
            raise RemoteProtocolError(f"rows of step {message.step} do not follow those before, of step {self._step}")
        if len(rows) < sum(message.counts):
            return
        offsets: I64 = np.cumsum([0, *message.counts])
        for table, (size, (first, end)) in enumerate(zip(self._sizes, pairwise(offsets), strict=True)):
            if not ascend_below(size, rows[first:end]):
                raise RemoteProtocolError(f"rows of step {message.step} do not ascend within table {table}")
        self._arrived.append(
            Scheduled.at(
                step=self._step,
                kind="train" if message.trains else "eval",
                train_step=self._train_step,
                epoch=0,
                batch=Batch.of(Lookups(size=1, ids=rows, offsets=offsets), NO_SAMPLES),
            )
        )
        self._step, self._train_step, self._parts = self._step + 1, self._train_step + message.trains, []

    def start(self) -> None:
        """Does nothing: the script sends by itself."""

    def info(self) -> SourceInfo:
        return SourceInfo(dense_names=[], expected_train_steps=None, num_train=None, num_eval=None, paths=[])

    def take(self) -> Scheduled[Batch] | None:
        if not self._arrived:
            return None
        self.counters.batches += 1
        return self._arrived.popleft()

    def close(self) -> None:
        self._arrived.clear()


def ascend_below(size: int, rows: I64) -> bool:
    return not len(rows) or bool(rows[0] >= 0 and rows[-1] < size and (np.diff(rows) > 0).all())
