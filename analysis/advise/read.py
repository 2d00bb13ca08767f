"""Reads the data for `rowcast advise`: all batches of a run. Keeps only followed rows.

For a job of several ranks, observes the rows of rank 0's shard, and how many rows of the other shards a batch
touches. If the format allows it, only ids are read. Batches that repeat in the same order (an epoch without a
shuffle, an evaluation) are decoded once.

If not all rows can be followed, those are followed whose hashed key is in the first part of the hash's range.

    hash of a key    0 ............ share * 2^64 ................................. 2^64
                     | followed     | not followed                                 |

A row is followed everywhere or nowhere, so the distances between its uses are kept, and a cache scaled by the same
share moves that share of the rows: spatial sampling, as in Waldspurger et al., Efficient MRC Construction with
SHARDS (FAST 2015). Batches remain batches, each with its followed rows only.

A cache holds whole batches, and by chance a sample has more or less of them than its share. So its slots are the share
of the real ones plus that difference, which leaves the same room besides the batch. (SHARDS adds the difference of the
reference counts where hits are certain.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from rowcast.analysis.scan import EMPTY, Scan, ScannedStep, Sharing, StepRows, without_arrays
from rowcast.analysis.show import Tick
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.planner.first_batches import MEASURED_BATCHES, Touched, measure
from rowcast.prefetcher.planner.horizon import OCCURRENCE_BYTES, id_bytes
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.prefetcher.readers.reader import Part, Pending, Reader, can_share, places
from rowcast.protocol.batch import Batch, Kind, Lookups, Samples, Scheduled, ScheduledBatch
from rowcast.protocol.parts import UNDIVIDED, Rank, rank_of
from rowcast.runtime.arrays import GOLDEN, I64, U64, mix
from rowcast.runtime.errors import ConfigError

LEAST_ROWS = 5000  # followed rows of a group that has this many, judging by its first batches
NUM_PARTS = 64  # the followed rows are split into this many parts by hash, to estimate how much the parts differ


def hashes(keys: I64) -> U64:
    return mix(keys.astype(np.uint64) + GOLDEN)


def followed(keys: I64, share: float) -> I64:
    return keys if share >= 1 else keys[hashes(keys) < np.uint64(share * 2.0**64)]


def part_counts(keys: I64) -> I64:
    """Counts the keys of each part, [NUM_PARTS]. The hash's low bits choose a key's part, its high bits whether it is
    followed."""
    return np.bincount((hashes(keys) & np.uint64(NUM_PARTS - 1)).astype(np.int64), minlength=NUM_PARTS)


def group_shares(share: float, distinct_rows: Sequence[int]) -> tuple[float, ...]:
    """Returns the share of each group's rows to follow. `distinct_rows`: of each group, in the first batches."""
    return tuple(min(1.0, max(share, LEAST_ROWS / rows)) for rows in distinct_rows)


def thinned(rows: StepRows, share: float) -> StepRows:
    """Keeps the followed rows. The counted bytes stay the same, so an automatic horizon grows as in a run."""
    keys = followed(rows.keys, share)
    return replace(rows, keys=keys, nbytes=rows.nbytes + (rows.num_unique - len(keys)) * OCCURRENCE_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenStep:
    scanned: ScannedStep  # followed rows only
    unique_rows: tuple[int, ...]  # per group, followed or not
    most_rows: tuple[int, ...]  # the same of the rank that owns most of them
    num_samples: int
    id_bytes: int  # ids of all its rows while the batch is in the horizon


@dataclass(frozen=True, kw_only=True)
class Observed:
    """P steps of G groups, as one rank sees them."""

    rank: Rank = UNDIVIDED
    groups: tuple[GroupSpec, ...]
    shares: tuple[float, ...]  # the followed share of each group's rows
    measured: Sequence[ScheduledBatch]  # the first batches, whole
    touched: Touched  # by them
    steps: Sequence[SeenStep]  # at least one

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def num_lookups(self) -> int:
        return sum(step.scanned.num_lookups for step in self.steps)

    @property
    def id_bytes(self) -> float:
        """Per batch in the horizon, on average."""
        return sum(step.id_bytes for step in self.steps) / len(self)

    @cached_property
    def scan(self) -> Scan:
        return Scan(self.groups, [step.scanned for step in self.steps])

    @cached_property
    def unique_rows(self) -> I64:
        """[P, G] distinct rows."""
        return np.array([step.unique_rows for step in self.steps], np.int64)

    @cached_property
    def followed_rows(self) -> I64:
        """[P, G] distinct rows that are followed."""
        return np.array([[rows.num_unique for rows in step.scanned.rows] for step in self.steps], np.int64)

    @cached_property
    def first_touches(self) -> I64:
        """[P, G] followed rows that no earlier step touches."""
        return np.stack([first_touches(self.scan.keys(g)) for g in range(len(self.groups))], axis=1)

    @property
    def distinct_rows(self) -> list[float]:
        """Per group, touched by all steps; at most the rows of its tables."""
        followed = self.first_touches.sum(axis=0).tolist()
        return [
            min(rows / share, group.num_rows)
            for rows, share, group in zip(followed, self.shares, self.groups, strict=True)
        ]

    @property
    def largest_batch_rows(self) -> list[int]:
        """On any rank."""
        return list(np.array([step.most_rows for step in self.steps]).max(axis=0).tolist())

    @property
    def record_bytes(self) -> I64:
        """[G]"""
        return np.array([group.record_bytes for group in self.groups], np.int64)


def first_touches(keys: list[I64]) -> I64:
    """[P] how many of each step's rows occur in no earlier step."""
    _, firsts = np.unique(np.concatenate(keys), return_index=True)
    ends = np.cumsum([len(some) for some in keys])
    return np.bincount(np.searchsorted(ends, firsts, side="right"), minlength=len(keys))


def observe(job: Job, reader: Reader, share: float, max_steps: int | None, memory_bytes: float, tick: Tick) -> Observed:
    """Follows this share of the rows. Calls `tick` for each step. Raises ConfigError if there is no step or no room,
    and the errors of reading."""
    observer = Observer(job, share, memory_bytes)
    for place in places(job, reader, max_steps):
        observer.add(place)
        tick()
    return observer.observed()


class Observer:
    """Takes the batches of a run in order. Keeps the first ones whole: they decide how many rows are followed."""

    def __init__(self, job: Job, share: float, memory_bytes: float) -> None:
        self._job, self._share, self._memory_bytes = job, share, memory_bytes
        self._groups = group_specs(job)
        self._groupers = groupers_of(self._groups)
        ranks = job.ranks
        self._rank = rank_of(ranks, 0)
        self._sharing = Sharing(self._groups, ranks.count, ranks.num_parts)
        self._first: list[ScheduledBatch] = []
        self._touched: Touched | None = None
        self._shares: tuple[float, ...] = ()
        self._steps: list[SeenStep] = []
        self._kept_bytes = 0
        self._again: dict[tuple[Kind, int], SeenStep] = {}  # by split and batch, if the order never changes

    def add(self, place: Scheduled[Pending]) -> None:
        known = self._again.get(batch_of_split(place))
        if known is not None:
            self._steps.append(replace(known, scanned=replace(known.scanned, scheduled=place.holding(EMPTY))))
        elif self._touched is not None:
            self._see(place.holding(whole(place.batch(UNDIVIDED))))
        else:
            self._first.append(place.holding(whole(place.batch(UNDIVIDED))))
            if len(self._first) == MEASURED_BATCHES:
                self._measure()

    def observed(self) -> Observed:
        touched = self._touched or self._measure()
        return Observed(
            rank=self._rank,
            groups=self._groups,
            shares=self._shares,
            measured=self._first,
            touched=touched,
            steps=self._steps,
        )

    def _measure(self) -> Touched:
        if not self._first:
            raise ConfigError("the run has no batch; give data, and a --max-steps above 0")
        self._touched = measure(self._groups, self._first, self._rank)
        self._shares = group_shares(self._share, self._touched.distinct_rows)
        for batch in self._first:
            self._see(batch)
        return self._touched

    def _see(self, batch: ScheduledBatch) -> None:
        rows, most_rows = self._rows(batch.batch)
        kept = tuple(map(thinned, rows, self._shares))
        seen = SeenStep(
            scanned=ScannedStep(scheduled=without_arrays(batch), num_lookups=len(batch.batch.ids), rows=kept),
            unique_rows=tuple(of_group.num_unique for of_group in rows),
            most_rows=most_rows,
            num_samples=batch.batch.size,
            id_bytes=id_bytes(rows, num_levels=1),
        )
        self._steps.append(seen)
        self._kept_bytes += sum(of_group.keys.nbytes for of_group in kept)
        if self._kept_bytes > self._memory_bytes:
            raise ConfigError(
                f"--sample {self._share:g}: the followed rows of the first {len(self._steps)} batches take "
                f"{self._kept_bytes} bytes, more than the {int(self._memory_bytes)} that may be used; give a smaller "
                "--sample, or the run's first steps with --max-steps"
            )
        if (
            can_share(self._job)
            and self._job.eval.next == "none"
            and (batch.kind == "eval" or self._job.data.shuffle == "none")
        ):
            self._again[batch_of_split(batch)] = seen

    def _rows(self, batch: Batch) -> tuple[tuple[StepRows, ...], tuple[int, ...]]:
        """Returns the batch's rows of each group on this rank, and their number on the rank that owns most of them."""
        if not self._rank.is_divided:
            rows = tuple(StepRows.of(grouper.group(grouper.lookups(batch))) for grouper in self._groupers)
            return rows, tuple(of_group.num_unique for of_group in rows)
        shares = self._sharing.of(batch)
        return tuple(own.owned[0] for own in shares), tuple(int(share.owner_rows.max()) for share in shares)


def batch_of_split(place: Scheduled[Any]) -> tuple[Kind, int]:
    """The batch's split and its number within the epoch."""
    at = place.position
    return place.kind, at.train_batch if place.kind == "train" else at.eval_batch or 0


def whole(part: Part) -> Batch:
    """A batch with its ids; dense features and labels are empty if only ids were read."""
    if isinstance(part, Batch):
        return part
    assert isinstance(part, Lookups), "a reader for ids returned dense features"
    return Batch.of(part, Samples(dense=np.zeros((part.size, 0), np.float32), labels=np.zeros(part.size, np.float32)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadData:
    steps: int  # training steps
    eval_steps: int
    samples: int  # of training and evaluation
    lookups: int
    followed_share: dict[str, float]  # of each group's rows
    followed_rows: int


def what_was_read(observed: Observed) -> ReadData:
    num_train = sum(step.scanned.trains for step in observed.steps)
    return ReadData(
        steps=num_train,
        eval_steps=len(observed) - num_train,
        samples=sum(step.num_samples for step in observed.steps),
        lookups=observed.num_lookups,
        followed_share={group.name: share for group, share in zip(observed.groups, observed.shares, strict=True)},
        followed_rows=int(observed.first_touches.sum()),
    )
