"""Computes every rank's work in a step at once: groups every part once, and finds every row's owner once.

    batch --> groupings of M parts --> rows that each of N ranks wants --> rows by owner --> the planner of each owner
                    once a number of parts                 once a number of ranks

A rank's prefetcher (`prefetcher/planner/exchange.py`) computes only its side, additions of gradients included. Here
only sizes count, so nothing is done N times.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowcast.analysis.scan.steps import StepRows
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.capacity import Touched, touched_by
from rowcast.prefetcher.planner.grouping import Grouper, Grouping, distinct
from rowcast.protocol.batch import Lookups, ScheduledBatch
from rowcast.protocol.shards import Shards
from rowcast.runtime.arrays import I32, I64

NO_KEYS = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupShares:
    """One group of a step: N ranks, M parts, T tables."""

    owned: tuple[StepRows, ...]  # by rank
    part_rows: I64  # [M] distinct rows of each part
    exchanged: I64  # [N, N] distinct rows that rank i looks up and rank j owns; gradients go the other way
    late: I64  # [N] of those that rank i receives from others: used by some rank in the step before
    vectors: I64  # [T] pooled rows of each table; look-ups where they are not pooled

    @property
    def owner_rows(self) -> I64:
        """[N] distinct rows of the whole batch in each shard."""
        return np.array([len(own.keys) for own in self.owned])


def part_groupings(groupers: Sequence[Grouper], parts: Sequence[Lookups]) -> list[tuple[Grouping, ...]]:
    """Returns each group's look-ups in each part of a batch."""
    return [tuple(grouper.group(grouper.lookups(part)) for part in parts) for grouper in groupers]


class Sharing:
    """Divides one group's rows among `count` ranks of `parts` parts. Remembers the rows of the step before."""

    def __init__(self, group: GroupSpec, count: int, parts: int) -> None:
        self._group, self._count, self._parts = group, count, parts
        self._shards = Shards(group.tables, count)
        self._before = NO_KEYS

    def of(self, groupings: Sequence[Grouping], batch_size: int) -> GroupShares:
        """`groupings`: of each part. Call once for each step, in order."""
        count, k = self._count, self._parts // self._count
        wanted = [distinct([own.keys for own in groupings[first : first + k]]) for first in range(0, self._parts, k)]
        keys = np.concatenate(wanted)
        ranks = np.repeat(np.arange(count), [len(own) for own in wanted])
        owners = self._shards.owners(keys)
        exchanged = np.bincount(ranks * count + owners, minlength=count**2).reshape(count, count)
        travels = owners != ranks
        late = ranks[travels][is_in(keys[travels], self._before)]
        every = distinct(wanted)
        self._before = every
        return GroupShares(
            owned=self._owned(groupings, exchanged, every),
            part_rows=np.array([len(own.keys) for own in groupings]),
            exchanged=exchanged,
            late=np.bincount(late, minlength=count),
            vectors=self._vectors(groupings, batch_size),
        )

    def _owned(self, groupings: Sequence[Grouping], exchanged: I64, every: I64) -> tuple[StepRows, ...]:
        k = self._parts // self._count
        own_parts = [groupings[first : first + k] for first in range(0, self._parts, k)]
        shards = by_owner(every, self._shards.owners(every), self._count)
        returned, received = exchanged.sum(axis=0).tolist(), exchanged.sum(axis=1).tolist()
        return tuple(
            StepRows(
                keys=keys,
                num_lookups=sum(part.num_lookups for part in parts),
                nbytes=sum(part.nbytes for part in parts)
                + (0 if self._parts == 1 else exchange_bytes(parts, len(keys), returned[rank], received[rank])),
            )
            for rank, (keys, parts) in enumerate(zip(shards, own_parts, strict=True))
        )

    def _vectors(self, groupings: Sequence[Grouping], batch_size: int) -> I64:
        lookups = sum(np.diff(own.table_starts) for own in groupings)
        pooled = np.array([len(table.features) * batch_size for table in self._group.tables])
        unpooled = np.array([table.pooling == "none" for table in self._group.tables])
        return np.where(unpooled, lookups, pooled)


def exchange_bytes(own_parts: Sequence[Grouping], num_owned: int, returned: int, received: int) -> int:
    """Returns `GroupExchange.nbytes` of a rank that owns `num_owned` rows of the batch, sends `returned` rows and
    receives `received`, those to and from itself included."""
    i32, i64 = 4, 8
    of_parts = sum(part.num_unique for part in own_parts)
    sums = (i64 + i32) * num_owned + 2 * i32 * (returned - num_owned)
    home = (i64 + i32) * received + 2 * i32 * (of_parts - received)
    return i32 * returned + sums + home + i32 * of_parts


def by_owner(keys: I64, owners: I32, count: int) -> list[I64]:
    """Returns the keys of each owner, in their order."""
    order = np.argsort(owners.astype(np.uint16), kind="stable")
    return np.split(keys[order], np.cumsum(np.bincount(owners, minlength=count))[:-1])


def is_in(keys: I64, ascending: I64) -> npt.NDArray[np.bool_]:
    if not len(ascending):
        return np.zeros(len(keys), np.bool_)
    places = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
    found: npt.NDArray[np.bool_] = ascending[places] == keys
    return found


def measured_keys(groupers: Sequence[Grouper], batches: Sequence[ScheduledBatch]) -> list[list[I64]]:
    """Returns of each group the distinct rows of each batch."""
    return [[grouper.group(grouper.lookups(own.batch)).keys for own in batches] for grouper in groupers]


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
        for own in keys:
            for rank, shard in enumerate(by_owner(own, shards.owners(own), count)):
                of_ranks[rank][index].append(shard)
    return [touched_by(groups, own, batches, count) for own in of_ranks]
