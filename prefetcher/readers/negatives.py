"""Adds the features of data.negatives to what a file has: their ids are drawn, in no file, and a function of the place.

    decoded       history  positive               a reader of the job without the drawn features
    drawn                            negative     `draws(job.seed, split, epoch, batch)`, feature by feature
    delivered     history  positive  negative     ids, and beside them the arrays negative.id and negative.log_q

Two streams of one batch, of ids and of dense features, draw for themselves and draw the same. So do ranks: each decodes
its own samples, unless a feature is drawn for look-ups, whose draws follow those of the samples before.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from rowcast.job.formats import BATCH, Negatives
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import Column, bag_offsets, join_columns
from rowcast.prefetcher.readers.draws import Drawn, Draws, cumulative, draws
from rowcast.prefetcher.readers.reader import Columns, Part, Pending, Reader, decoded, id_types, open_format
from rowcast.protocol.batch import Batch, Kind, Lookups, Samples
from rowcast.protocol.parts import UNDIVIDED, Rank
from rowcast.runtime.arrays import I64
from rowcast.runtime.checkpoint_manifest import IdType
from rowcast.runtime.errors import ConfigError

NOTHING = np.zeros(0, np.int64)


def job_of_files(job: Job) -> Job:
    """Returns the job without the drawn features; the ids of a feature that is drawn for are among its arrays."""
    drawn = {own.feature for own in job.data.negatives}
    inner = [replace(table, features=[name for name in table.features if name not in drawn]) for table in job.tables]
    columns, others = job.data.columns, [own.per for own in job.data.negatives if own.per != BATCH]
    inputs = list(dict.fromkeys([*columns.inputs, *others]))
    return replace(
        job,
        tables=[table for table in inner if table.features],
        data=replace(job.data, negatives=[], columns=replace(columns, inputs=inputs)),
    )


def open_reader(job: Job, columns: Columns) -> "DrawingReader":
    return DrawingReader(job, open_format(job_of_files(job), columns))


class DrawingReader:
    """A `Reader` of `files`, which was opened for `job_of_files(job)`. Raises ConfigError for unusable counts."""

    def __init__(self, job: Job, files: Reader) -> None:
        self._job, self._files = job, files
        self._file_features = job_of_files(job).features
        self._weighted = bool(job.data.columns.weights)
        rows = {feature: table.num_embeddings for table in job.tables for feature in table.features}
        self._features = [DrawnFeature(own, rows[own.feature]) for own in job.data.negatives]
        self._by_batch = all(own.per == BATCH for own in job.data.negatives)
        self.dense_names = files.dense_names
        self.paths = [*files.paths, *(path for own in self._features for path in own.paths)]

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
            drawn = [own.draw(stream, part.size, columns.get(own.per, NO_LOOKUPS).ids) for own in self._features]
            return self._with_ids(part, columns, drawn)
        drawn = [own.draw(stream, len(part.labels), self._ids_of(own, part.inputs)) for own in self._features]
        dense = self._with_arrays(part, drawn)
        if not isinstance(part, Batch):
            return dense
        return Batch.of(self._with_ids(part, self._columns(part), drawn), dense)

    def _ids_of(self, own: "DrawnFeature", inputs: dict[str, Any]) -> I64:
        ids: I64 = inputs.get(f"{own.per}.id", NOTHING)
        return ids

    def _with_arrays(self, dense: Samples, drawn: list[Drawn]) -> Samples:
        names = [own.feature for own in self._features]
        ids = {f"{name}.id": own.ids for name, own in zip(names, drawn, strict=True)}
        log_q = {f"{name}.log_q": own.log_q for name, own in zip(names, drawn, strict=True)}
        return Samples(dense=dense.dense, labels=dense.labels, inputs={**dense.inputs, **ids, **log_q})

    def _columns(self, ids: Lookups) -> dict[str, Column]:
        """Returns the features of the files."""
        offsets, size, columns = bag_offsets(ids.ids, ids.offsets), ids.size, {}
        for f, name in enumerate(self._file_features):
            bags = offsets[f * size : (f + 1) * size + 1]
            own = slice(int(bags[0]), int(bags[-1]))
            weights = None if ids.weights is None else ids.weights[own]
            columns[name] = Column(ids=ids.ids[own], lengths=np.diff(bags), weights=weights)
        return columns

    def _with_ids(self, ids: Lookups, columns: dict[str, Column], drawn: list[Drawn]) -> Lookups:
        for own, found in zip(self._features, drawn, strict=True):
            columns[own.feature] = Column(ids=found.ids, lengths=own.lengths(columns.get(own.per), ids.size))
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
