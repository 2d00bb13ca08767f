"""Plans a group's exchange between ranks in a step: owners send rows to the ranks that look them up, and get gradients
back.

A rank finds in its own samples which rows it wants of every owner (`want`). With what all ranks want of its shard it
has its side of the exchange (`complete`), so both sides agree on every size and order:

    rows         an owner sends each rank the distinct rows that its parts look up, by ascending key
    received     this rank's own, then from owner 0, owner 1, ...      place: a row's position among those
    gradients    each part has one per distinct row; a rank adds its parts (`home`) and sends them back in that order
    returned     this rank's own, then from rank 0, rank 1, ...        the owner adds them (`sums`) and trains its rows

A rank's own rows and gradients are first, so that what travels is one piece of memory.

Both sums are branches of one tree over all parts of the batch, `((0 + 1) + (2 + 3)) + ...`: level by level, neighbours
are added, and a value without a neighbour passes unchanged. A part that does not look up a row is not in its tree: its
zero would not change the sum, which starts from 0 and is never -0.0.

A rank that owns whole tables of the group also looks these up for the parts of others (`protocol/parts.py`): its
*sources* are its own parts, then those. No other rank looks up their rows, so all of these stay.

`ShareOfBatch` makes a rank's plan from both: the look-ups of its sources, and the rows of its shard for all ranks.

Plans the sum of each row's gradients from several sources, as a tree over the sources.

    sources        1 4 | 4 7 | 1 4        ascending; a position counts through all of them: 0 to 5
    sorted         1  1  4  4  4  7       by key, and by source within a row
    order          0  4  1  2  5  3       their positions
    level 1                1<-2           sources 0 and 1 are neighbours; source 2 has none
    level 2        0<-4    1<-5           of nodes 0 and 1
    roots          0       1      3       the first position of each row: additions go to the left

A source s is in node s >> level of a level. Two neighbours of a row are added at the first level at which their sources
share a node, and each goes to the first position of its own node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from rowcast.job.tables import GroupSpec, batch_features
from rowcast.prefetcher.planner.group_planner import GroupMoves, plan_fields
from rowcast.prefetcher.planner.grouping import Grouping, JointGrouper, sort_pairs
from rowcast.protocol.batch import Lookups
from rowcast.protocol.parts import Rank, Shards, ids_of_features, owner_of, samples_of_part
from rowcast.protocol.plan import GroupPlan, GroupShare
from rowcast.protocol.plan_layout import ShareHeader
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled, compiled_loop


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


def ordered_sum(sources: Sequence[I64], first: int = 0, count: int = 1) -> tuple[OrderedSum, I32]:
    """`sources`: one or more; the distinct rows with a gradient from each, by ascending key. Their gradients lie as
    `some_first` orders them: `count` sources from `first` on, then the others.

    Returns also the places in `keys` of the rows of every source, as they lie."""
    keys, ends = np.concatenate(sources), np.array(list(accumulate(map(len, sources))))
    order, source_of, levels = np.empty((3, len(keys)), np.int32)
    at, firsts = np.zeros((2, 1 + (len(sources) - 1).bit_length()), np.int64)
    sort_sources(keys, ends, first, count, order, source_of, levels, at)
    level_ends = tuple(at[1:].tolist())
    num_joins = level_ends[-1] if level_ends else 0
    unique, places = np.empty(len(keys) - num_joins, np.int64), np.empty(len(keys), np.int32)
    roots, to, of = np.empty(len(unique), np.int32), *np.empty((2, num_joins), np.int32)
    plan_additions(keys, order, levels, at, firsts, unique, places, roots, to, of)
    return OrderedSum(keys=unique, to=to, of=of, level_ends=level_ends, roots=roots), places


def some_first(first: int, count: int, end: int) -> list[int]:
    """Returns `count` numbers from `first` on, and then the others below `end`, both ascending."""
    return [*range(first, first + count), *range(first), *range(first + count, end)]


@compiled
def sort_sources(
    keys: I64, ends: I64, first: int, count: int, order: I32, source_of: I32, levels: I32, at: I64
) -> None:
    """Sorts `keys`. Fills `order` with where they lie, `source_of` with the source of each that lies there, `levels`
    with the level of each addition, and `at` [1 + levels] with the end of the additions of each level."""
    before = ends[first - 1] if first else 0
    moved, start = ends[first + count - 1] - before, 0
    for source in range(len(ends)):
        lies = moved if source < first else -before if source < first + count else 0
        for i in range(start, ends[source]):
            order[i] = i + lies
            source_of[i + lies] = source
        start = ends[source]
    if len(ends) > 1:
        sort_pairs(keys, order)
    joins = 0
    for i in range(1, len(keys)):
        if keys[i] == keys[i - 1]:
            different, level = source_of[order[i]] ^ source_of[order[i - 1]], 0
            while different:
                different >>= 1
                level += 1
            levels[joins] = level
            at[level] += 1
            joins += 1
    for level in range(1, len(at)):
        at[level] += at[level - 1]


@compiled_loop
def plan_additions(
    keys: I64, order: I32, levels: I32, at: I64, firsts: I64, unique: I64, places: I32, roots: I32, to: I32, of: I32
) -> None:
    """`levels`: of each addition, by row. `at` [1 + levels]: where the additions of the next level begin. `firsts`
    [1 + levels]: of each level, the first position of the row's last node."""
    num_common = joined = -1
    for i in range(len(keys)):
        position = order[i]
        if i == 0 or keys[i] != keys[i - 1]:
            num_common += 1
            unique[num_common], roots[num_common] = keys[i], position
            level = len(firsts)
        else:
            joined += 1
            level = levels[joined]
            to[at[level - 1]], of[at[level - 1]] = firsts[level - 1], position
            at[level - 1] += 1
        for below in range(level):
            firsts[below] = position
        places[position] = num_common


NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRows:
    """What a rank knows from its own look-ups alone about a group's rows in a batch."""

    parts: tuple[Grouping, ...]  # of this rank
    others: tuple[Grouping, ...]  # of all other parts, if this rank owns whole tables: their look-ups
    places: tuple[I32, ...]  # for each of both: positions of its distinct rows, ascending, among those received
    home: OrderedSum  # over both, concatenated; its keys are the received rows, this rank's first
    wanted: tuple[I64, ...]  # for each owner: the rows received from it, by ascending key; views of home.keys

    @property
    def nbytes(self) -> int:
        return self.home.nbytes + sum(own.nbytes for own in self.places) + sum(array.nbytes for array in self.sources)

    @property
    def sources(self) -> tuple[Grouping, ...]:
        return self.parts + self.others


def own_rows(parts: Sequence[Grouping], others: Sequence[Grouping], shards: Shards, number: int) -> OwnRows:
    """`parts`: of rank `number`. Every rank has as many shards. `others`: as in `OwnRows`, ascending."""
    before, after = others[: number * len(parts)], others[number * len(parts) :]
    home, indices = ordered_sum([part.keys for part in (*before, *parts, *after)], len(before), len(parts))
    places = shards.owners(home.keys)
    ends, keys, roots = np.zeros(1 + shards.count, np.int64), np.empty_like(home.keys), np.empty_like(home.roots)
    receive(home.keys, home.roots, places, indices, number, ends, keys, roots)
    order = some_first(number, 1, shards.count)
    wanted = zip(order, pairwise([0, *ends[1:][order].tolist()]), strict=True)
    return OwnRows(
        parts=tuple(parts),
        others=tuple(others),
        places=tuple(np.split(indices, np.cumsum([len(part.keys) for part in (*parts, *others)])[:-1])),
        home=replace(home, keys=keys, roots=roots),
        wanted=tuple(keys[start:end] for _, (start, end) in sorted(wanted)),
    )


@compiled_loop
def receive(
    keys: I64, roots: I32, places: I32, indices: I32, first: int, ends: I64, received: I64, received_roots: I32
) -> None:
    """Sorts the rows by owner, those of owner `first` before all others. `places`: the rows' owners, which become their
    places; `indices`: of rows, which become places too. `ends` [1 + owners] becomes 0 and the end of each owner's
    rows."""
    for owner in places:
        ends[owner + 1] += 1
    start, ends[first + 1] = ends[first + 1], 0
    for owner in range(1, len(ends)):
        if owner != first + 1:
            start, ends[owner] = start + ends[owner], start
    for u in range(len(keys)):
        place = ends[places[u] + 1]
        ends[places[u] + 1] += 1
        places[u], received[place], received_roots[place] = place, keys[u], roots[u]
    for i in range(len(indices)):
        indices[i] = places[indices[i]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangedRows:
    """A group's rows of a batch: those of this shard for every rank, and the look-ups of this rank's parts."""

    own: OwnRows
    send_counts: tuple[int, ...]  # rows sent to each rank
    send: I32  # [sent] which of this shard's rows, for this rank, then for rank 0, rank 1, ...
    sums: OrderedSum  # over returned gradients, laid out as the sent rows; its keys are the shard's rows of the batch

    @property
    def keys(self) -> I64:
        return self.sums.keys

    @property
    def num_unique(self) -> int:
        return len(self.keys)

    @property
    def num_lookups(self) -> int:
        return sum(source.num_lookups for source in self.own.sources)

    @property
    def nbytes(self) -> int:
        return self.own.nbytes + self.send.nbytes + self.sums.nbytes


def shared_rows(own: OwnRows, asked: Sequence[I64], number: int) -> ExchangedRows:
    """Returns what rank `number` exchanges. `asked`: of each rank, this one included, the distinct rows of this shard
    that it looks up, by ascending key."""
    sums, send = ordered_sum(asked, number)
    return ExchangedRows(own=own, send_counts=tuple(map(len, asked)), send=send, sums=sums)


class ShareOfBatch:
    """Implements `planner.Arranger` for a rank of several, or a batch in several parts."""

    def __init__(self, groups: Sequence[GroupSpec], grouper: JointGrouper, rank: Rank) -> None:
        """`grouper`: of all groups and features."""
        self._rank, self._each, self._batch_features = rank, grouper.each, batch_features(groups)
        self._shards = [Shards(group.tables, rank.count) for group in groups]
        owners = {table.index: owner_of(table, rank.count) for group in groups for table in group.tables}
        divided, self._own, self._owned = (
            grouper.of({index for index, owner in owners.items() if owner in looked_up})
            for looked_up in ({None}, {None, rank.number}, {rank.number})
        )
        self._divided, self._pools = divided, [table_shards.num_tables > 0 for table_shards in self._owned.each]
        others = rank.other_parts if any(self._pools) else []
        self._sources = [(part, self._own) for part in rank.own_parts] + [(part, self._owned) for part in others]

    def group(self, parts: Sequence[Lookups]) -> tuple[ExchangedRows, ...]:
        """Like `want` and `complete`, from the parts of all ranks."""
        k, number = self._rank.parts_per_rank, self._rank.number
        needed = self.want([grouper.only(parts[part]) for part, grouper in self._sources])
        asked = [self.wanted(needed, number)] * self._rank.count
        for other in set(range(self._rank.count)) - {number}:
            divided = [self._divided.group(self._divided.only(part)) for part in parts[other * k : (other + 1) * k]]
            asked[other] = self.wanted(self._rows(divided, []), number)
        return self.complete(needed, asked)

    def sources(self, parts: Sequence[Lookups], whole: Lookups) -> Sequence[Lookups]:
        """Returns the look-ups of each source, of its features alone. `parts`: of this rank's samples, of all features.
        `whole`: the batch, if this rank owns whole tables."""
        if not any(self._pools):
            return list(map(self._own.only, parts))
        assert whole.others == 0, f"{whole.others} samples are missing, whose look-ups this rank pools"
        of_part = partial(samples_of_part, whole.size, self._rank.parts)
        return [
            ids_of_features(whole, of_part(part), self._batch_features, grouper.features)
            for part, grouper in self._sources
        ]

    def want(self, sources: Sequence[Lookups]) -> tuple[OwnRows, ...]:
        """Returns each group's. `sources`: as `sources` returns them; without placed tables the parts of this rank."""
        groupings = [grouper.group(lookups) for (_, grouper), lookups in zip(self._sources, sources, strict=True)]
        k = self._rank.parts_per_rank
        return self._rows(groupings[:k], groupings[k:])

    def _rows(
        self, parts: Sequence[tuple[Grouping, ...]], others: Sequence[tuple[Grouping, ...]]
    ) -> tuple[OwnRows, ...]:
        return tuple(
            own_rows(
                [own[g] for own in parts],
                [grouping[g] for grouping in others if self._pools[g]],
                shards,
                self._rank.number,
            )
            for g, shards in enumerate(self._shards)
        )

    def wanted(self, needed: Sequence[OwnRows], rank: int) -> list[I64]:
        return [rows.wanted[rank] for rows in needed]

    def complete(self, needed: Sequence[OwnRows], asked: Sequence[Sequence[I64]]) -> tuple[ExchangedRows, ...]:
        """`needed`: as `want` returned them. `asked`: as in `shared_rows`, of each rank and group."""
        of_groups = zip(needed, zip(*asked, strict=True), strict=True)
        return tuple(shared_rows(*one, self._rank.number) for one in of_groups)

    def plan(self, group: int, rows: ExchangedRows, moves: Sequence[GroupMoves], train: bool) -> GroupPlan:
        """Look-ups, distinct rows and bags follow each other by source. A slot is an index among received rows."""
        sources, places = rows.own.sources, rows.own.places
        arranged = list(map(self._each[group].arrange, sources, places))
        orders = [order for _, order in arranged]
        bags = [source.bag_order(order) for source, order in zip(sources, orders, strict=True)]
        lookups = starts([source.num_lookups for source in sources])
        return GroupPlan(
            slots=one_after_another([slots for slots, _ in arranged]),
            unique_slots=one_after_another(places),
            segment_offsets=joined_offsets([source.segment_offsets for source in sources]),
            bag_order=one_after_another(bags, starts([source.num_bags for source in sources])),
            lookup_order=None if sources[0].weights is None else one_after_another(orders, lookups),
            offsets=joined_offsets([source.offsets for source in sources if source.offsets is not None])
            if sources[0].offsets is not None
            else None,
            weights=None
            if sources[0].weights is None
            else np.concatenate([source.weights for source in sources if source.weights is not None]),
            sequence_offsets=sequences_of(rows.own.parts),
            share=share_of(rows, moves[0], train),
            **plan_fields(moves),
        )


def share_of(rows: ExchangedRows, moves: GroupMoves, train: bool) -> GroupShare:
    """Returns what the rank sends and adds in the step. An evaluation sends no gradients."""
    home, sums = rows.own.home, rows.sums
    return GroupShare(
        send_slots=moves.unique_slots[rows.send],
        home_to=home.to if train else NONE,
        home_of=home.of if train else NONE,
        home_roots=home.roots if train else NONE,
        to=sums.to if train else NONE,
        of=sums.of if train else NONE,
        roots=sums.roots if train else NONE,
        own_slots=moves.unique_slots if train else NONE,
        header=ShareHeader(
            num_own=len(sums.keys),
            send_counts=rows.send_counts,
            receive_counts=tuple(map(len, rows.own.wanted)),
            home_levels=home.level_ends if train else (),
            levels=sums.level_ends if train else (),
            sequence_lookups=tuple(
                () if part.sequence_offsets is None else tuple(part.sequence_offsets[:, -1].tolist())
                for part in rows.own.parts
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
    bases = starts([int(ends[-1]) for ends in offsets])
    return np.concatenate(
        [offsets[0][:1], *(ends[1:] + np.int32(base) for ends, base in zip(offsets, bases, strict=True))]
    )


def sequences_of(parts: Sequence[Grouping]) -> I32 | None:
    """Returns [S, B + 1] over the samples of all parts; None if all features are pooled."""
    of_parts = [part.sequence_offsets for part in parts if part.sequence_offsets is not None]
    if not of_parts:
        return None
    return np.stack([joined_offsets([part[feature] for part in of_parts]) for feature in range(len(of_parts[0]))])
