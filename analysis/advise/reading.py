"""What `prefetcher advise` reads: all batches of a run, or one stretch of an epoch. Of the rows only the followed ones are kept.

    run       | train ........ | eval | train ........ | eval |     every batch, in the order of training: nothing is guessed
    stretch         | settle | count |                              `--samples`: the middle of an epoch, of which the second half counts

Ids are read without the rest where the format allows it, and batches that come again in the same order (another epoch without a shuffle,
another evaluation) are decoded once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from rowcast.analysis.advise.following import group_shares, thinned
from rowcast.analysis.advise.observed import Observed, SeenStep
from rowcast.analysis.progress import Tick
from rowcast.analysis.simulate.recording import EMPTY, RecordedStep, without_arrays
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES, Touched, measure
from rowcast.prefetcher.planner.horizon import KnownBatch
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.prefetcher.readers.batch_parts import DenseBatch, IdsBatch, Part, join_parts
from rowcast.prefetcher.readers.reader import Pending, Reader, can_share
from rowcast.prefetcher.readers.schedule import Place, Turn, places
from rowcast.protocol.batch import Batch, Kind, ScheduledBatch
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.position import Position


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """share: of the rows, to be followed. samples: training samples to read, or None for every batch of the run."""

    share: float
    samples: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"--sample {self.share}: give a share above 0, at most 1")
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"--samples {self.samples}: give at least 1")


def observe(
    job: Job, reader: Reader, sample: Sample, max_steps: int | None, memory_bytes: float, tick: Tick
) -> Observed:
    """Reads; `tick` is called for each step. Raises ConfigError where there is no step or no room, and what reading raises."""
    observer = Observer(job, sample.share, memory_bytes)
    for place, decode in (
        places(job, reader, max_steps) if sample.samples is None else stretch(job, reader, sample.samples)
    ):
        observer.add(place, decode)
        tick()
    return observer.observed(reader.num_samples("train"), is_whole_run=sample.samples is None)


def stretch(job: Job, reader: Reader, num_samples: int) -> Iterator[Turn]:
    """Consecutive training batches from the middle of the first epoch; from its beginning where nobody knows how long it is."""
    num_batches = -(-num_samples // job.data.batch_size)
    epoch = reader.num_samples("train")
    known = epoch is not None and can_share(job)  # a factory's batches have any size
    start = max(0, -(-(epoch or 0) // job.data.batch_size) - num_batches) // 2 if known else 0
    at = Position()
    for decode in islice(reader.pending("train", 0, start), num_batches):
        yield Place(kind="train", position=at, following=at.after_train()), decode
        at = at.after_train()


class Observer:
    """Takes the batches of a run in order. The first ones are kept whole: they say how many rows there are to follow."""

    def __init__(self, job: Job, share: float, memory_bytes: float) -> None:
        self._job, self._share, self._memory_bytes = job, share, memory_bytes
        self._groups = group_specs(job)
        self._groupers = groupers_of(self._groups)
        self._first: list[tuple[Place, ScheduledBatch]] = []
        self._touched: Touched | None = None
        self._shares: tuple[float, ...] = ()
        self._steps: list[SeenStep] = []
        self._kept_bytes = 0
        self._again: dict[tuple[Kind, int], SeenStep] = {}  # by split and batch, where its order is always the same

    def add(self, place: Place, decode: Pending) -> None:
        known = self._again.get(batch_of_split(place))
        if known is not None:
            self._steps.append(replace(known, recorded=replace(known.recorded, scheduled=scheduled(place, EMPTY))))
        elif self._touched is not None:
            self._see(place, scheduled(place, whole(decode())))
        else:
            self._first.append((place, scheduled(place, whole(decode()))))
            if len(self._first) == MEASURED_BATCHES:
                self._measure()

    def observed(self, epoch_samples: int | None, *, is_whole_run: bool) -> Observed:
        touched = self._touched or self._measure()
        return Observed(
            groups=self._groups,
            shares=self._shares,
            measured=[batch for _, batch in self._first],
            touched=touched,
            steps=self._steps,
            num_counted=len(self._steps) if is_whole_run else -(-len(self._steps) // 2),
            epoch_samples=epoch_samples,
        )

    def _measure(self) -> Touched:
        if not self._first:
            raise ConfigError("the run has no batch; give data, and a --max-steps above 0")
        self._touched = measure(self._groups, [batch for _, batch in self._first])
        self._shares = group_shares(self._share, self._touched.distinct_rows)
        for place, batch in self._first:
            self._see(place, batch)
        return self._touched

    def _see(self, place: Place, batch: ScheduledBatch) -> None:
        groupings = tuple(grouper.group(grouper.lookups(batch.batch)) for grouper in self._groupers)
        kept = tuple(thinned(grouping, share) for grouping, share in zip(groupings, self._shares, strict=True))
        seen = SeenStep(
            recorded=RecordedStep(scheduled=without_arrays(batch), num_lookups=len(batch.batch.ids), groupings=kept),
            unique_rows=tuple(grouping.num_unique for grouping in groupings),
            num_samples=batch.batch.size,
            id_bytes=KnownBatch(scheduled=batch, groups=groupings, slots_needed=()).id_bytes,
        )
        self._steps.append(seen)
        self._kept_bytes += seen.keys_bytes
        if self._kept_bytes > self._memory_bytes:
            raise ConfigError(
                f"--sample {self._share:g}: the followed rows of the first {len(self._steps)} batches take {self._kept_bytes} bytes, more "
                f"than the {int(self._memory_bytes)} that may be used; give a smaller --sample, or the run's first steps with --max-steps"
            )
        if can_share(self._job) and (place.kind == "eval" or self._job.data.shuffle == "none"):
            self._again[batch_of_split(place)] = seen


def batch_of_split(place: Place) -> tuple[Kind, int]:
    """Which batch of its split it is, counted within the epoch."""
    at = place.position
    return place.kind, at.train_batch if place.kind == "train" else at.eval_batch or 0


def scheduled(place: Place, batch: Batch) -> ScheduledBatch:
    at = place.position
    return ScheduledBatch(step=at.step, kind=place.kind, train_step=at.train_step, epoch=at.epoch, batch=batch)


def whole(part: Part) -> Batch:
    """A batch with its ids, and nothing else where nothing else was read."""
    if isinstance(part, Batch):
        return part
    assert isinstance(part, IdsBatch), "a reader for ids gave the rest"
    return join_parts(
        part, DenseBatch(dense=np.zeros((part.size, 0), np.float32), labels=np.zeros(part.size, np.float32))
    )
