"""Computes every rank's work in a step at once.

    batch --> look-ups of each of N ranks --> rows that it wants --> rows by owner --> the planner of each owner

Each rank does what its prefetcher does (`prefetcher/planner/exchange.py`), and nothing is done twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rowcast.analysis.scan.steps import StepRows
from rowcast.job.tables import GroupSpec, batch_features
from rowcast.prefetcher.planner.capacity import Touched, touched_by
from rowcast.prefetcher.planner.exchange import OwnRows, SharedRows, ShareOfBatch, shared_rows
from rowcast.prefetcher.planner.grouping import Grouper, JointGrouper
from rowcast.prefetcher.planner.ordered_sum import some_first
from rowcast.protocol.batch import Lookups, ScheduledBatch
from rowcast.protocol.parts import Rank, parts_of
from rowcast.protocol.shards import Shards
from rowcast.runtime.arrays import I64

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
        return np.array([len(own.keys) for own in self.owned])


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
        own = [share.want(share.sources(parts[k * n : k * (n + 1)], batch)) for n, share in enumerate(self._shares)]
        return [self._group(g, rows) for g, rows in enumerate(zip(*own, strict=True))]

    def _group(self, group: int, own: Sequence[OwnRows]) -> GroupShares:
        asked = zip(*(rows.wanted for rows in own), strict=True)  # as `ShareOfBatch.complete`, of all ranks at once
        shards = list(map(shared_rows, own, asked, range(self._count)))
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

    def _part_rows(self, shards: Sequence[SharedRows]) -> I64:
        """An owner of whole tables looks up their rows for all parts."""
        rows, k = np.zeros(self._parts, np.int64), self._parts // self._count
        for rank, shard in enumerate(shards):
            numbers = some_first(k * rank, k, self._parts)[: len(shard.own.sources)]
            rows[numbers] += [len(source.keys) for source in shard.own.sources]
        return rows


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
            owners = shards.owners(own).astype(np.uint16)
            ends = np.cumsum(np.bincount(owners, minlength=count))
            for rank, shard in enumerate(np.split(own[np.argsort(owners, kind="stable")], ends[:-1])):
                of_ranks[rank][index].append(shard)
    return [touched_by(groups, own, batches, count) for own in of_ranks]
