"""Scans a log: reads the distinct rows of every step of a run once, for simulations with every setting.

It takes 8 bytes per distinct row of each batch, and nothing for the tables. All of it is needed at once, because the
bound (`belady`) knows the whole future.

Computes every rank's work in a step at once.

    batch --> look-ups of each of N ranks --> rows that it wants --> rows by owner --> the planner of each owner

Each rank does the work of its prefetcher (`prefetcher/planner/exchange.py`), and nothing is done twice.

Samples a job's data: draws batches, spread evenly over one epoch.

    epoch, in training order    0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 13 14 15 16 17    3 strata of as many batches
    drawn                         1                   10      12                   one at a random place in each

The first batches of a log are only its first hours; a batch of each stratum covers all of it, and all batches are
equally likely.

Batches between two drawn ones are not decoded if the format can seek to a row cheaply.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise

import numpy as np

from rowcast.analysis.show import Tick
from rowcast.job.formats import format_of
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, batch_features
from rowcast.prefetcher.planner.exchange import ExchangedRows, OwnRows, ShareOfBatch, shared_rows, some_first
from rowcast.prefetcher.planner.first_batches import Touched, touched_by
from rowcast.prefetcher.planner.grouping import Grouper, Grouping, JointGrouper
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.prefetcher.readers.reader import Reader, can_share, open_reader
from rowcast.protocol.batch import Batch, Kind, Lookups, ScheduledBatch
from rowcast.protocol.parts import Rank, Shards, parts_of
from rowcast.runtime.arrays import I64

EMPTY = Batch(dense=np.zeros((0, 0), np.float32), labels=np.zeros(0, np.float32), ids=np.zeros(0, np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """A group's rows in a step: all that the planner needs to move rows. Implements `horizon.NeededRows`."""

    keys: I64  # distinct, ascending
    num_lookups: int
    nbytes: int  # of the look-ups by row, which an "auto" horizon counts

    @classmethod
    def of(cls, grouping: Grouping) -> "StepRows":
        return cls(keys=grouping.keys, num_lookups=grouping.num_lookups, nbytes=grouping.nbytes)

    @property
    def num_unique(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannedStep:
    scheduled: ScheduledBatch  # without the batch's arrays
    num_lookups: int
    rows: tuple[StepRows, ...]  # of each group

    @property
    def trains(self) -> bool:
        return self.scheduled.kind == "train"


class Scan:
    """The steps of a run, in order without gaps. Positions count from 0 in the scan."""

    def __init__(self, groups: tuple[GroupSpec, ...], steps: Sequence[ScannedStep]) -> None:
        self.groups = groups
        self.steps = steps

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def num_lookups(self) -> int:
        return sum(step.num_lookups for step in self.steps)

    @property
    def unique_rows(self) -> int:
        """Distinct rows of each step, summed."""
        return sum(rows.num_unique for step in self.steps for rows in step.rows)

    def keys(self, group: int) -> list[I64]:
        """Of each step."""
        return [step.rows[group].keys for step in self.steps]


def scan(groups: tuple[GroupSpec, ...], batches: Iterable[ScheduledBatch], tick: Tick) -> Scan:
    groupers = groupers_of(groups)
    steps = []
    for scheduled in batches:
        rows = tuple(StepRows.of(grouper.group(grouper.lookups(scheduled.batch))) for grouper in groupers)
        num_lookups = len(scheduled.batch.ids)
        steps.append(ScannedStep(scheduled=without_arrays(scheduled), num_lookups=num_lookups, rows=rows))
        tick()
    return Scan(groups, steps)


def without_arrays(scheduled: ScheduledBatch) -> ScheduledBatch:
    return scheduled.holding(EMPTY)


NO_KEYS = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupShares:
    """One group of a step: N ranks and M parts."""

    owned: tuple[StepRows, ...]  # by rank
    part_rows: I64  # [M] distinct rows of each part
    exchanged: I64  # [N, N] distinct rows that rank i looks up and rank j owns; gradients go the other way
    late: I64  # [N] of those that rank i receives from others: used by some rank in the step before

    @property
    def owner_rows(self) -> I64:
        """[N] distinct rows of the whole batch in each shard."""
        return np.array([len(rows.keys) for rows in self.owned])


class Sharing:
    """Divides the rows of all groups among `count` ranks of `parts` parts. Remembers the rows of the step before."""

    def __init__(self, groups: tuple[GroupSpec, ...], count: int, parts: int) -> None:
        self._count, self._parts, self._whole = count, parts, batch_features(groups)
        grouper, ranks = JointGrouper(groups), [Rank(number=n, count=count, parts=parts) for n in range(count)]
        self._shares = [ShareOfBatch(groups, grouper, rank) for rank in ranks]
        self._before = [[NO_KEYS] * count for _ in groups]

    def of(self, batch: Lookups) -> list[GroupShares]:
        """Returns each group's. Call once for each step, in order."""
        parts, k = parts_of(batch, self._parts, self._whole), self._parts // self._count
        wanted = [share.want(share.sources(parts[k * n : k * (n + 1)], batch)) for n, share in enumerate(self._shares)]
        return [self._group(g, rows) for g, rows in enumerate(zip(*wanted, strict=True))]

    def _group(self, group: int, of_ranks: Sequence[OwnRows]) -> GroupShares:
        # as `ShareOfBatch.complete`, of all ranks at once
        asked = zip(*(rows.wanted for rows in of_ranks), strict=True)
        shards = list(map(shared_rows, of_ranks, asked, range(self._count)))
        late = np.zeros(self._count, np.int64)
        for rank, (rows, before) in enumerate(zip(shards, self._before[group], strict=True)):
            order = some_first(rank, 1, self._count)
            ranks = np.repeat(order, [rows.send_counts[other] for other in order])
            is_late = np.isin(rows.keys, before, assume_unique=True)[rows.send] & (ranks != rank)
            late += np.bincount(ranks[is_late], minlength=self._count)
        self._before[group] = [rows.keys for rows in shards]
        return GroupShares(
            owned=tuple(
                StepRows(
                    keys=rows.keys,
                    num_lookups=rows.num_lookups,
                    nbytes=rows.own.parts[0].nbytes if self._parts == 1 else rows.nbytes,
                )
                for rows in shards
            ),
            part_rows=self._part_rows(shards),
            exchanged=np.array([rows.send_counts for rows in shards]).T,
            late=late,
        )

    def _part_rows(self, shards: Sequence[ExchangedRows]) -> I64:
        """An owner of whole tables looks up their rows for all parts."""
        rows, k = np.zeros(self._parts, np.int64), self._parts // self._count
        for rank, shard in enumerate(shards):
            numbers = some_first(k * rank, k, self._parts)[: len(shard.own.sources)]
            rows[numbers] += [len(source.keys) for source in shard.own.sources]
        return rows


def measured_keys(groupers: Sequence[Grouper], batches: Sequence[ScheduledBatch]) -> list[list[I64]]:
    """Returns of each group the distinct rows of each batch."""
    return [[grouper.group(grouper.lookups(scheduled.batch)).keys for scheduled in batches] for grouper in groupers]


def owners_touched(
    groups: tuple[GroupSpec, ...],
    keys_of_batches: Sequence[Sequence[I64]],
    batches: Sequence[ScheduledBatch],
    count: int,
) -> list[Touched]:
    """Returns the rows that the measured batches touch in the shard of each of `count` ranks."""
    of_ranks: list[list[list[I64]]] = [[[] for _ in groups] for _ in range(count)]
    for index, (group, keys) in enumerate(zip(groups, keys_of_batches, strict=True)):
        shards = Shards(group.tables, count)
        for keys_of_batch in keys:
            owners = shards.owners(keys_of_batch).astype(np.uint16)
            ends = np.cumsum(np.bincount(owners, minlength=count))
            for rank, shard in enumerate(np.split(keys_of_batch[np.argsort(owners, kind="stable")], ends[:-1])):
                of_ranks[rank][index].append(shard)
    return [touched_by(groups, of_rank, batches, count) for of_rank in of_ranks]


DECODED_ROWS = 32768  # rows per block when a Parquet file is decoded
FULL_SHUFFLE_SHARE = 32  # shuffling n rows takes about as long as reading n / 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """How much of an epoch to read: a share, and a minimum of batches."""

    share: float  # above 0, at most 1
    least_batches: int = 0


def draw_batches(job: Job, reader: Reader, amount: Amount, split: Kind) -> Iterator[int]:
    """Yields the numbers of batches, ascending; a function of job.seed and the arguments.

    Never ends if only reading shows the length of an epoch, as for data.format = "package.module:factory";
    `read_drawn` ends."""
    num_samples = reader.num_samples(split)
    share = amount.share if num_samples is None else share_of(job, amount, num_samples)
    if num_samples is None or not can_share(job):  # a factory's batches have any size
        stratum = max(1, round(1 / share))
        return drawn(((i * stratum, (i + 1) * stratum) for i in count()), job.job.seed)
    num_batches = -(-num_samples // job.data.batch_size)
    num_strata = min(max(1, round(share * num_batches)), num_batches)
    bounds = [i * num_batches // num_strata for i in range(num_strata + 1)] if num_strata else []
    return drawn(pairwise(bounds), job.job.seed)


def share_of(job: Job, amount: Amount, num_samples: int) -> float:
    wanted = max(amount.share * num_samples, amount.least_batches * job.data.batch_size)
    return min(1.0, wanted / max(num_samples, 1))


def drawn(strata: Iterator[tuple[int, int]], seed: int) -> Iterator[int]:
    random = np.random.default_rng(seed)
    for first, end in strata:
        yield first + int(random.choice(end - first, size=1, replace=False)[0])


def read_drawn(job: Job, reader: Reader, wanted: Iterator[int], split: Kind) -> Iterator[Batch]:
    """Yields the batches, until they or the epoch end. Raises what `Reader.batches` raises."""
    skipped_batches = rows_worth_skipping(job, reader, split) / job.data.batch_size
    batches, at = reader.batches(split, 0, 0), 0
    for index in wanted:
        if index - at > skipped_batches:
            batches, at = reader.batches(split, 0, index), index
        batch = next(islice(batches, index - at, None), None)
        if batch is None:
            return
        yield batch
        at = index + 1


def rows_worth_skipping(job: Job, reader: Reader, split: Kind) -> float:
    window = job.data.shuffle_window if split == "train" else None
    if not can_share(job):
        return float("inf")
    if window == 0:
        return (reader.num_samples(split) or 0) / FULL_SHUFFLE_SHARE
    return 0 if format_of(job.data.format).random_access else max(DECODED_ROWS, window or 0)


def reader_for_another_pass(job: Job, reader: Reader) -> Reader:
    """A factory may have returned an iterator, which is exhausted after one pass; files can be read again."""
    return reader if can_share(job) else open_reader(job)
