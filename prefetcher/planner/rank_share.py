"""Plans what one rank does with a batch: the look-ups of its parts, and the rows of its shard for all ranks' parts.

Every rank groups all parts of every batch, so the plans of all ranks agree without a message.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.exchange import GroupExchange, exchange_of
from rowcast.prefetcher.planner.group_planner import GroupMoves, plan_fields
from rowcast.prefetcher.planner.grouping import Grouper, Grouping
from rowcast.protocol.batch import Batch, IdsBatch
from rowcast.protocol.parts import Rank
from rowcast.protocol.plan import GroupPlan, GroupShare
from rowcast.protocol.shards import Shards
from rowcast.runtime.arrays import I32, I64

NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRows:
    """A group's rows of a batch: those of this shard for every rank, and the look-ups of this rank's parts."""

    parts: tuple[Grouping, ...]  # of this rank
    exchange: GroupExchange

    @property
    def keys(self) -> I64:
        return self.exchange.sums.keys

    @property
    def num_unique(self) -> int:
        return len(self.keys)

    @property
    def num_lookups(self) -> int:
        return sum(part.num_lookups for part in self.parts)

    @property
    def nbytes(self) -> int:
        return self.exchange.nbytes + sum(part.nbytes for part in self.parts)


class ShareOfBatch:
    """Implements `planner.Arranger` for a rank of several, or a batch in several parts."""

    def __init__(self, group: GroupSpec, grouper: Grouper, rank: Rank) -> None:
        self._grouper = grouper
        self._rank = rank
        self._shards = Shards(group.tables, rank.count)

    def group(self, parts: Sequence[Batch | IdsBatch]) -> SharedRows:
        groupings = [self._grouper.group(self._grouper.lookups(part)) for part in parts]
        exchange = exchange_of([grouping.keys for grouping in groupings], self._shards, self._rank)
        return SharedRows(parts=tuple(groupings[own] for own in self._rank.own_parts), exchange=exchange)

    def plan(self, rows: SharedRows, moves: Sequence[GroupMoves], train: bool) -> GroupPlan:
        """Look-ups, distinct rows and bags follow each other part by part. A slot is an index among received rows."""
        parts, exchange = rows.parts, rows.exchange
        arranged = [self._grouper.arrange(part, own) for part, own in zip(parts, exchange.places, strict=True)]
        orders = [order for _, order in arranged]
        bags = [part.bag_order(order) for part, order in zip(parts, orders, strict=True)]
        num_bags = [len(part.order) if part.offsets is None else len(part.offsets) - 1 for part in parts]
        lookups = starts([part.num_lookups for part in parts])
        return GroupPlan(
            slots=one_after_another([slots for slots, _ in arranged]),
            unique_slots=one_after_another(exchange.places),
            segment_offsets=joined_offsets([part.segment_offsets for part in parts]),
            bag_order=one_after_another(bags, starts(num_bags)),
            lookup_order=None if parts[0].weights is None else one_after_another(orders, lookups),
            offsets=joined_offsets([part.offsets for part in parts if part.offsets is not None])
            if parts[0].offsets is not None
            else None,
            weights=None
            if parts[0].weights is None
            else np.concatenate([part.weights for part in parts if part.weights is not None]),
            sequence_offsets=sequences_of(parts),
            share=share_of(exchange, parts, moves[0], train),
            **plan_fields(moves),
        )


def share_of(exchange: GroupExchange, parts: Sequence[Grouping], moves: GroupMoves, train: bool) -> GroupShare:
    """Returns what the rank sends and adds in the step. An evaluation sends no gradients."""
    home, sums = exchange.home, exchange.sums
    return GroupShare(
        send_slots=moves.unique_slots[exchange.send],
        home_to=home.to if train else NONE,
        home_of=home.of if train else NONE,
        home_roots=home.roots if train else NONE,
        to=sums.to if train else NONE,
        of=sums.of if train else NONE,
        roots=sums.roots if train else NONE,
        own_slots=moves.unique_slots if train else NONE,
        num_own=len(sums.keys),
        send_counts=exchange.send_counts,
        receive_counts=exchange.receive_counts,
        home_levels=home.level_ends if train else (),
        levels=sums.level_ends if train else (),
        sequence_lookups=tuple(
            () if part.sequence_offsets is None else tuple(part.sequence_offsets[:, -1].tolist()) for part in parts
        ),
    )


def starts(counts: Sequence[int]) -> list[int]:
    """Returns where each part starts in the concatenation of all parts."""
    return [sum(counts[:part]) for part in range(len(counts))]


def one_after_another(arrays: Sequence[I32], bases: Sequence[int] | None = None) -> I32:
    bases = [0] * len(arrays) if bases is None else bases
    return np.concatenate([array + np.int32(base) for array, base in zip(arrays, bases, strict=True)])


def joined_offsets(offsets: Sequence[I32]) -> I32:
    """Returns the offsets of the concatenated parts. The offsets of each part start from 0."""
    bases = starts([int(own[-1]) for own in offsets])
    return np.concatenate(
        [offsets[0][:1], *(own[1:] + np.int32(base) for own, base in zip(offsets, bases, strict=True))]
    )


def sequences_of(parts: Sequence[Grouping]) -> I32 | None:
    """Returns [S, B + 1] over the samples of all parts; None if all features are pooled."""
    of_parts = [part.sequence_offsets for part in parts if part.sequence_offsets is not None]
    if not of_parts:
        return None
    return np.stack([joined_offsets([own[feature] for own in of_parts]) for feature in range(len(of_parts[0]))])
