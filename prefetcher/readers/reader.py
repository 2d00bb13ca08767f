"""Defines the interface of a reader, and opens a job's reader.

Orders the rows of an epoch, shuffled reproducibly, and the batches of a whole run: training batches epoch by epoch,
with evaluations between them.

places      Scheduled[Pending]     every batch, undecoded; the caller decodes the ones it needs
schedule    ScheduledBatch         the same, decoded

Adds the features of data.negatives to what a file has: their ids are drawn, in no file, and a function of the place.

    decoded       history  positive               a reader of the job without the drawn features
    drawn                            negative     `draws(job.seed, split, epoch, batch)`, feature by feature
    delivered     history  positive  negative     ids, and beside them the arrays negative.id and negative.log_q

Two streams of one batch, of ids and of dense features, each draw for themselves, with equal results. So do ranks: each
decodes its own samples, unless a feature is drawn for look-ups, whose draws follow those of earlier samples.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol, cast, runtime_checkable

import numpy as np
from msgspec.structs import replace

from rowcast.job.formats import BATCH, FORMATS, Negatives, format_of
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import Column, Ids, bag_offsets, join_columns
from rowcast.prefetcher.readers.draws import Drawn, Draws, cumulative, draws
from rowcast.protocol.batch import Batch, Kind, Lookups, Samples, Scheduled, ScheduledBatch, after
from rowcast.protocol.parts import UNDIVIDED, Rank
from rowcast.runtime.arrays import I64
from rowcast.runtime.checkpoint_manifest import IdType, Position
from rowcast.runtime.errors import ConfigError

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


class ReadsFiles(Reader, Protocol):
    def untrained(self, batch: int) -> Iterator[Pending]:
        """Yields the rows of the files of which training batch `batch` is the first, each file in its own batches."""


def id_types(reader: Reader) -> dict[str, IdType]:
    """Returns what the ids of the features are that a reader of typed columns hashes by their bytes."""
    types: dict[str, IdType] = getattr(reader, "id_types", {})
    return types


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
    """Returns whether several readers can divide the batches: they cannot if foreign code makes batches one by one."""
    return job.data.format in FORMATS


def stream_columns(job: Job) -> tuple[Columns, ...]:
    """Returns the columns that each stream of the data reads; the first stream has the ids."""
    return ("ids", "dense") if format_of(job.data.format).in_columns else ("all",)


def open_reader(job: Job, columns: Columns = "all") -> Reader:
    """Opens the reader of `job.data`. Raises ConfigError if the job does not fit the data, DataError if the data is
    broken."""
    assert columns == "all" or columns in stream_columns(job), f"{job.data.format} is not read in columns"
    if job.data.negatives:
        return DrawingReader(job, open_format(job_of_files(job), columns))
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


def schedule(
    job: Job, reader: Reader, max_steps: int | None = None, start: Position | None = None
) -> Iterator[ScheduledBatch]:
    for place in places(job, reader, max_steps, start):
        yield place.holding(whole_batch(place.batch))


def places(
    job: Job, reader: Reader, max_steps: int | None = None, start: Position | None = None
) -> Iterator[Scheduled[Pending]]:
    """Yields every batch of a run from `start` on, in order, with steps counted over the whole run.

    An evaluation follows each job.eval.every train steps and each epoch's training, once if the two coincide. Ends
    after `max_steps` train steps, counted from the run's first, and the epoch's evaluation; yields nothing for 0.
    """
    kind = EachFileFirst if job.eval.next == "file" else Schedule
    return kind(job, reader, max_steps).batches(start or Position())


def expected_train_steps(
    job: Job, reader: Reader, max_steps: int | None = None, start: Position | None = None
) -> int | None:
    """Counts the train steps of the whole run, also before `start`; None if the reader does not know its batches."""
    batches = num_batches(job, reader, "train")
    if batches is None:
        return None
    at = start or Position()
    steps = at.train_step + max(0, (job.data.epochs - at.epoch) * batches - at.train_batch)
    return steps if max_steps is None else min(steps, max_steps)


class Schedule:
    def __init__(self, job: Job, reader: Reader, max_steps: int | None) -> None:
        self._num_epochs, self._eval_every = job.data.epochs, job.eval.every
        self._reader, self._max_steps = reader, max_steps

    def batches(self, at: Position) -> Iterator[Scheduled[Pending]]:
        while at.epoch < self._num_epochs and not self._is_spent(at):
            at = yield from self._epoch(at)

    def _is_spent(self, at: Position) -> bool:
        """Returns whether the run ends here. No epoch starts without a train step left; a started epoch is still
        evaluated."""
        return at.train_batch == 0 and at.eval_batch is None and self._steps_left(at) == 0

    def _epoch(self, at: Position) -> Generator[Scheduled[Pending], None, Position]:
        evaluated = at.eval_batch is not None or self._eval_is_due(at)
        at = yield from self._evaluation(at)
        for decode in islice(self._reader.pending("train", at.epoch, at.train_batch), self._steps_left(at)):
            following = after("train", at)
            evaluated = self._eval_is_due(following)
            if evaluated:
                following = replace(following, eval_batch=0)
            yield Scheduled(kind="train", position=at, following=following, batch=decode)
            at = yield from self._evaluation(following)
        if not evaluated:
            at = yield from self._evaluation(replace(at, eval_batch=0))
        return Position(step=at.step, train_step=at.train_step, epoch=at.epoch + 1)

    def _evaluation(self, at: Position) -> Generator[Scheduled[Pending], None, Position]:
        if at.eval_batch is None:
            return at
        for decode in self._evaluated(at, at.eval_batch):
            following = after("eval", at)
            yield Scheduled(kind="eval", position=at, following=following, batch=decode)
            at = following
        return replace(at, eval_batch=None)

    def _evaluated(self, at: Position, start: int) -> Iterator[Pending]:
        return self._reader.pending("eval", at.epoch, start)

    def _eval_is_due(self, at: Position) -> bool:
        """Returns whether job.eval.every falls on the last train step. Outside an evaluation, that one was made."""
        return self._eval_every > 0 and at.train_batch > 0 and at.train_step % self._eval_every == 0

    def _steps_left(self, at: Position) -> int | None:
        return None if self._max_steps is None else max(self._max_steps - at.train_step, 0)


class EachFileFirst(Schedule):
    """Evaluates each file before it is trained. When a training batch is read, what follows may not be known. So a
    position outside an evaluation is before that of its next batch, and one at the end of an evaluation behind it."""

    def _epoch(self, at: Position) -> Generator[Scheduled[Pending], None, Position]:
        for decode in islice(self._reader.pending("train", at.epoch, at.train_batch), self._steps_left(at)):
            at = yield from self._evaluation(replace(at, eval_batch=at.eval_batch or 0))
            following = after("train", at)
            yield Scheduled(kind="train", position=at, following=following, batch=decode)
            at = following
        return Position(step=at.step, train_step=at.train_step, epoch=at.epoch + 1)

    def _evaluated(self, at: Position, start: int) -> Iterator[Pending]:
        return islice(cast(ReadsFiles, self._reader).untrained(at.train_batch), start, None)


def block_permutation(seed: int, epoch: int, block: int, num_rows: int) -> Ids:
    """Returns i64 [num_rows]: row i of the shuffled block is row permutation[i] of the block. Philox is keyed by
    seed, epoch and block."""
    key = np.array([seed, epoch * 2**32 + block], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(num_rows).astype(np.int64, copy=False)


class RowOrder:
    """The order of one epoch's rows; each block of `window` rows is permuted by itself."""

    def __init__(self, *, seed: int, epoch: int, num_rows: int, window: int | None) -> None:
        """`window` None keeps the order; 0 makes one block of all rows."""
        self._seed, self._epoch = seed, epoch
        self._num_rows = num_rows
        self._window = max(num_rows, 1) if window == 0 else window
        self._last: tuple[int, Ids] | None = None

    def rows(self, start: int, stop: int) -> Ids:
        if self._window is None:
            return np.arange(start, stop, dtype=np.int64)
        parts = []
        for block in self._blocks(start, stop):
            first = block * self._window
            parts.append(first + self._permutation(block)[max(start - first, 0) : stop - first])
        return np.concatenate(parts)

    def within(self, start: int, stop: int) -> range:
        """Returns the span of these rows, or of the whole blocks that they come from."""
        if self._window is None:
            return range(start, stop)
        blocks = self._blocks(start, stop)
        return range(blocks[0] * self._window, min(blocks[-1] * self._window + self._window, self._num_rows))

    def _blocks(self, start: int, stop: int) -> range:
        assert self._window is not None, "only an order with a window has blocks"
        return range(start // self._window, (stop - 1) // self._window + 1)

    def _permutation(self, block: int) -> Ids:
        # the last block is kept, because consecutive batches share it
        if self._last is None or self._last[0] != block:
            assert self._window is not None, "only an order with a window has blocks"
            num_rows = min(self._window, self._num_rows - block * self._window)
            self._last = block, block_permutation(self._seed, self._epoch, block, num_rows)
        return self._last[1]


NOTHING = np.zeros(0, np.int64)


def job_of_files(job: Job) -> Job:
    """Returns the job without the drawn features; the ids of a feature that is drawn for are among its arrays."""
    drawn = {negatives.feature for negatives in job.data.negatives}
    inner = [replace(table, features=[name for name in table.features if name not in drawn]) for table in job.tables]
    columns, others = job.data.columns, [negatives.per for negatives in job.data.negatives if negatives.per != BATCH]
    inputs = list(dict.fromkeys([*columns.inputs, *others]))
    return replace(
        job,
        tables=[table for table in inner if table.features],
        data=replace(job.data, negatives=[], columns=replace(columns, inputs=inputs)),
    )


class DrawingReader:
    """A `Reader` of `files`, which was opened for `job_of_files(job)`. Raises ConfigError for unusable counts."""

    def __init__(self, job: Job, files: Reader) -> None:
        self._job, self._files = job, files
        self._file_features = job_of_files(job).features
        self._weighted = bool(job.data.columns.weights)
        rows = {feature: table.num_embeddings for table in job.tables for feature in table.features}
        self._features = [DrawnFeature(negatives, rows[negatives.feature]) for negatives in job.data.negatives]
        self._by_batch = all(negatives.per == BATCH for negatives in job.data.negatives)
        self.dense_names = files.dense_names
        self.paths = [*files.paths, *(path for feature in self._features for path in feature.paths)]

    @property
    def invalid_ids(self) -> int:
        return self._files.invalid_ids

    @property
    def id_types(self) -> dict[str, IdType]:
        return id_types(self._files)

    def num_samples(self, split: Kind) -> int | None:
        return self._files.num_samples(split)

    def batches(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Batch]:
        return decoded(self.pending(split, epoch, start))

    def pending(self, split: Kind, epoch: int, start: int = 0) -> Iterator[Pending]:
        for batch, decode in enumerate(self._files.pending(split, epoch, start), start):
            yield partial(self._complete, decode, split, epoch, batch)

    def _complete(self, decode: Pending, split: Kind, epoch: int, batch: int, rank: Rank) -> Part:
        part = decode(rank if self._by_batch else UNDIVIDED)
        stream = draws(self._job.job.seed, split, epoch, batch)
        if not isinstance(part, Samples):
            columns = self._columns(part)
            drawn = [
                feature.draw(stream, part.size, columns.get(feature.per, NO_LOOKUPS).ids) for feature in self._features
            ]
            return self._with_ids(part, columns, drawn)
        drawn = [
            feature.draw(stream, len(part.labels), part.inputs.get(f"{feature.per}.id", NOTHING))
            for feature in self._features
        ]
        names = [feature.feature for feature in self._features]
        ids = {f"{name}.id": draw.ids for name, draw in zip(names, drawn, strict=True)}
        log_q = {f"{name}.log_q": draw.log_q for name, draw in zip(names, drawn, strict=True)}
        dense = Samples(dense=part.dense, labels=part.labels, inputs={**part.inputs, **ids, **log_q})
        if not isinstance(part, Batch):
            return dense
        return Batch.of(self._with_ids(part, self._columns(part), drawn), dense)

    def _columns(self, ids: Lookups) -> dict[str, Column]:
        """Returns the features of the files."""
        offsets, size, columns = bag_offsets(ids.ids, ids.offsets), ids.size, {}
        for f, name in enumerate(self._file_features):
            bags = offsets[f * size : (f + 1) * size + 1]
            bag = slice(int(bags[0]), int(bags[-1]))
            weights = None if ids.weights is None else ids.weights[bag]
            columns[name] = Column(ids=ids.ids[bag], lengths=np.diff(bags), weights=weights)
        return columns

    def _with_ids(self, ids: Lookups, columns: dict[str, Column], drawn: list[Drawn]) -> Lookups:
        for feature, draw in zip(self._features, drawn, strict=True):
            columns[feature.feature] = Column(ids=draw.ids, lengths=feature.lengths(columns.get(feature.per), ids.size))
        joined = join_columns([columns[name] for name in self._job.features], ids.size, self._weighted)
        return dataclasses.replace(joined, others=ids.others)


NO_LOOKUPS = Column(ids=NOTHING)


class DrawnFeature:
    """One feature of data.negatives, of a table of `num_rows` rows."""

    def __init__(self, settings: Negatives, num_rows: int) -> None:
        self.feature, self.per = settings.feature, settings.per
        self._number, self._by, self._avoids = settings.number, settings.by, settings.avoid is not None
        self._num_rows = num_rows
        self.paths = [Path(settings.by)] if settings.by.endswith(".npy") else []
        self._totals = [cumulative_of(path, self.feature, num_rows) for path in self.paths]

    def draw(self, stream: Draws, size: int, looked_up: I64) -> Drawn:
        """Draws for `size` samples. `looked_up`: i64 [n], the rows that are drawn for, in their order; none for a
        feature of the batch."""
        count = self._number * (min(size, 1) if self.per == BATCH else len(looked_up))
        if self._avoids:
            others = stream.below(self._num_rows - 1, count)
            ids = (np.repeat(looked_up, self._number) + 1 + others.ids) % self._num_rows
            return Drawn(ids, others.log_q)
        for totals in self._totals:
            return stream.by_cumulative(totals, count)
        draw = stream.log_uniform if self._by == "log-uniform" else stream.below
        return draw(self._num_rows, count)

    def lengths(self, per: Column | None, size: int) -> I64:
        """Returns the look-ups of each of `size` samples; those of the batch are in the first."""
        if per is None:
            return np.where(np.arange(size) == 0, self._number, 0)
        return self._number * (np.ones(size, np.int64) if per.lengths is None else per.lengths)


def cumulative_of(path: Path, feature: str, num_rows: int) -> I64:
    key = f"data.negatives: {feature}.by = {path}"
    try:
        counts = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} cannot be read as .npy ({error}); give a file of one count for each row") from None
    if counts.shape != (num_rows,) or counts.dtype.kind not in "iu":
        raise ConfigError(
            f"{key} has {counts.dtype} of shape {list(counts.shape)}; give one integer for each of the {num_rows} rows"
        )
    try:
        return cumulative(counts.astype(np.int64))
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
