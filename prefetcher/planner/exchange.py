"""Plans a group's exchange between ranks in a step: owners send rows to the ranks that look them up, and get gradients
back.

Every rank knows the ids of the whole batch and computes its side from them, so both sides agree on every size and
order:

    rows         an owner sends each rank the distinct rows that its parts look up, by ascending key
    received     from owner 0, owner 1, ...                            place: a row's position among those
    gradients    each part has one per distinct row; a rank adds its parts (`home`) and sends them back in that order
    returned     from rank 0, rank 1, ...                              the owner adds them (`sums`) and trains its rows

Both sums are branches of one tree over all parts of the batch, `((0 + 1) + (2 + 3)) + ...`: level by level, neighbours
are added, and a value without a neighbour passes unchanged. A part that does not look up a row is not in its tree: its
zero would not change the sum, which starts from 0 and is never -0.0.

`ShareOfBatch` makes a rank's plan from it: the look-ups of its parts, and the rows of its shard for all ranks' parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.group_planner import GroupMoves, plan_fields
from rowcast.prefetcher.planner.grouping import Grouping, JointGrouper, distinct
from rowcast.protocol.batch import Lookups
from rowcast.protocol.messages import ShareHeader
from rowcast.protocol.parts import Rank
from rowcast.protocol.plan import GroupPlan, GroupShare
from rowcast.protocol.shards import Shards
from rowcast.runtime.arrays import I32, I64

NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedSum:
    """The additions, in place, of rows' gradients from several sources, concatenated."""

    keys: I64  # [U] ascending: every row of any source
    to: I32  # [A] values[to] += values[of], level by level; within a level all positions differ
    of: I32  # [A]
    level_ends: tuple[int, ...]  # additions up to the end of each level
    roots: I32  # [U] position of each row's sum after the last level

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.to.nbytes + self.of.nbytes + self.roots.nbytes


def ordered_sum(sources: Sequence[I64]) -> OrderedSum:
    """`sources`: the distinct rows with a gradient from each source, by ascending key."""
    keys = np.concatenate([np.zeros(0, np.int64), *sources])
    nodes = np.repeat(np.arange(len(sources)), [len(own) for own in sources])
    places = np.argsort(keys, kind="stable")  # by row, and by source within a row
    keys, nodes = keys[places], nodes[places]
    additions = [np.zeros((2, 0), np.int64)]
    level_ends: list[int] = []
    for _ in range((len(sources) - 1).bit_length()):
        nodes >>= 1
        joins = np.flatnonzero((keys[1:] == keys[:-1]) & (nodes[1:] == nodes[:-1]))
        additions.append(np.stack([places[joins], places[joins + 1]]))
        level_ends.append(len(joins) + (level_ends[-1] if level_ends else 0))
        keys, nodes, places = (np.delete(array, joins + 1) for array in (keys, nodes, places))
    to, of = np.concatenate(additions, axis=1).astype(np.int32)
    return OrderedSum(keys=keys, to=to, of=of, level_ends=tuple(level_ends), roots=places.astype(np.int32))


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupExchange:
    """One rank's side of a step's exchange, before the rows have slots."""

    send_counts: tuple[int, ...]  # rows sent to each rank
    send: I32  # [sent] which of this rank's rows, for rank 0, then rank 1, ...
    sums: OrderedSum  # over returned gradients, laid out as the sent rows; its keys are the shard's rows of the batch
    receive_counts: tuple[int, ...]  # rows received from each owner
    places: tuple[I32, ...]  # for each part here: positions of its distinct rows, ascending, among those received
    home: OrderedSum  # over the parts here, concatenated; its roots follow the received rows

    @property
    def nbytes(self) -> int:
        return self.send.nbytes + self.sums.nbytes + self.home.nbytes + sum(own.nbytes for own in self.places)


def exchange_of(keys_of_parts: Sequence[I64], shards: Shards, rank: Rank) -> GroupExchange:
    """`keys_of_parts`: the distinct rows of a group that each part of the batch looks up, by ascending key."""
    k = rank.parts_per_rank
    wanted = [distinct(keys_of_parts[first : first + k]) for first in range(0, rank.parts, k)]  # by each rank
    asked_here = [shards.rows_of(rank.number, keys) for keys in wanted]
    sums = ordered_sum(asked_here)
    home = ordered_sum(own_parts := keys_of_parts[rank.number * k : (rank.number + 1) * k])
    owners = shards.owners(home.keys)
    order = np.argsort(owners, kind="stable")  # of the received rows
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return GroupExchange(
        send_counts=tuple(map(len, asked_here)),
        send=np.searchsorted(sums.keys, np.concatenate(asked_here)).astype(np.int32),
        sums=sums,
        receive_counts=tuple(np.bincount(owners, minlength=rank.count).tolist()),
        places=tuple(place[np.searchsorted(home.keys, keys)] for keys in own_parts),
        home=OrderedSum(
            keys=home.keys[order], to=home.to, of=home.of, level_ends=home.level_ends, roots=home.roots[order]
        ),
    )


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

    def __init__(self, groups: Sequence[GroupSpec], grouper: JointGrouper, rank: Rank) -> None:
        self._grouper = grouper
        self._rank = rank
        self._shards = [Shards(group.tables, rank.count) for group in groups]

    def group(self, parts: Sequence[Lookups]) -> tuple[SharedRows, ...]:
        return tuple(map(self._shared, self._shards, zip(*map(self._grouper.group, parts), strict=True)))

    def _shared(self, shards: Shards, parts: Sequence[Grouping]) -> SharedRows:
        exchange = exchange_of([part.keys for part in parts], shards, self._rank)
        return SharedRows(parts=tuple(parts[own] for own in self._rank.own_parts), exchange=exchange)

    def plan(self, group: int, rows: SharedRows, moves: Sequence[GroupMoves], train: bool) -> GroupPlan:
        """Look-ups, distinct rows and bags follow each other part by part. A slot is an index among received rows."""
        parts, exchange = rows.parts, rows.exchange
        arranged = list(map(self._grouper.each[group].arrange, parts, exchange.places))
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
        header=ShareHeader(
            num_own=len(sums.keys),
            send_counts=exchange.send_counts,
            receive_counts=exchange.receive_counts,
            home_levels=home.level_ends if train else (),
            levels=sums.level_ends if train else (),
            sequence_lookups=tuple(
                () if part.sequence_offsets is None else tuple(part.sequence_offsets[:, -1].tolist()) for part in parts
            ),
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
