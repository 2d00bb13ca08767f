"""Plans with placed tables against brute force: every look-up once, on its rank, and every gradient in the tree."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.tables import GroupSpec, make_keys
from rowcast.prefetcher.planner.exchange import ExchangedRows, ShareOfBatch
from rowcast.prefetcher.planner.group_planner import GroupMoves
from rowcast.prefetcher.planner.grouping import JointGrouper
from rowcast.protocol.batch import Lookups, needed_offsets
from rowcast.protocol.parts import (
    Rank,
    bags_of_sources,
    ids_of_samples,
    own_parts,
    owner_of,
    part_bounds,
    part_sizes,
    parts_of,
    samples_of,
    source_sizes,
    sources_of,
)
from rowcast.protocol.plan import GroupPlan, GroupShare
from rowcast.runtime.arrays import I32, I64
from tests.support.exchange_oracle import assert_same
from tests.support.planner_runs import group, num_rows_by_feature, placed, random_batch, table, without_pooling

PARTS = 8
GROUPS = (  # whose features alternate in a batch; t0 and t4 are small, so that most parts look up the same rows
    group(0, (table(0, 90, 4, "a", "b"), table(2, 300, 4, "d")), (0, 1, 3)),
    group(1, (table(1, 5_000, 8, "c"), table(3, 40, 8, "e")), (2, 4)),
    group(2, (replace(table(4, 50, 12, "f"), pooling="mean"),), (5,)),
)
FEATURES = range(6)
Bag = tuple[tuple[int, float], ...]  # the keys and weights of its look-ups
places = st.dictionaries(st.integers(0, 4), st.sampled_from((0, 2**29, 2**31, 3 * 2**30, 2**32 - 1)), max_size=5)


@dataclass
class Side:
    """One rank's plans of a step, by group."""

    rank: Rank
    rows: tuple[ExchangedRows, ...]
    plans: list[GroupPlan]

    def share(self, g: int) -> GroupShare:
        share = self.plans[g].share
        assert share is not None
        return share


def sides_of(groups: tuple[GroupSpec, ...], batch: Lookups, count: int, seed: int = 0) -> list[Side]:
    """Plans the step on each rank, which tells the others the rows that it wants."""
    ranks = [Rank(number=number, count=count, parts=PARTS) for number in range(count)]
    shares = [ShareOfBatch(groups, JointGrouper(groups), rank) for rank in ranks]
    wanted = []
    for share, rank in zip(shares, ranks, strict=True):
        samples = ids_of_samples(batch, samples_of(batch.size, rank), ())
        offsets = needed_offsets(samples.ids, samples.offsets)  # as `RankSource`
        own = replace(samples, offsets=offsets, others=batch.size - samples.size)
        pools = any(owner_of(table, count) == rank.number for group in groups for table in group.tables)
        wanted.append(share.want(share.sources(own_parts(own, rank, ()), batch if pools else own)))
    sides = []
    for share, rank, mine in zip(shares, ranks, wanted, strict=True):
        rows = share.complete(mine, [share.wanted(theirs, rank.number) for theirs in wanted])
        for alike, found in zip(share.group(parts_of(batch, PARTS, ())), rows, strict=True):
            assert_same(exchange_of(alike), exchange_of(found), f"{rank}")
        moves = [moves_of(own.keys, np.random.default_rng(seed)) for own in rows]
        sides.append(Side(rank, rows, [share.plan(g, rows[g], [moves[g]], True) for g in range(len(groups))]))
    return sides


def exchange_of(rows: ExchangedRows) -> tuple[Any, ...]:
    """All but look-ups, which have needless offsets where they were not cut by rank."""
    return rows.own.home, rows.own.wanted, rows.own.places, rows.send, rows.send_counts, rows.sums


def moves_of(keys: I64, rng: np.random.Generator) -> GroupMoves:
    """Each of the shard's rows in some slot."""
    none = np.zeros(0, np.int32)
    return GroupMoves(
        unique_slots=rng.permutation(len(keys)).astype(np.int32),
        fetch_slots=none,
        fetch_keys=np.zeros(0, np.int64),
        evict_keys=np.zeros(0, np.int64),
        num_dirty=0,
        fill_after=None,
        last_evicted=None,
    )


def bags_of_batch(groups: tuple[GroupSpec, ...], batch: Lookups) -> dict[tuple[int, int], Bag]:
    """By feature and sample."""
    tables = {p: t for g in groups for p, t in zip(g.feature_positions, g.feature_tables(), strict=True)}
    offsets = np.arange(len(batch.ids) + 1) if batch.offsets is None else batch.offsets
    weights = np.ones(len(batch.ids), np.float32) if batch.weights is None else batch.weights
    found = {}
    for f in FEATURES:
        for sample in range(batch.size):
            own = slice(*offsets[f * batch.size + sample : f * batch.size + sample + 2])
            keys = make_keys(tables[f].index, batch.ids[own])
            found[f, sample] = tuple(zip(keys.tolist(), weights[own].tolist(), strict=True))
    return found


def received_rows(sides: Sequence[Side], g: int) -> list[list[int]]:
    """What each rank receives of a group, if each owner sends what its plan says: keys instead of rows."""
    received = []
    for side in sides:
        keys = []
        for owner in [side, *(other for other in sides if other is not side)]:
            share, slots = owner.share(g), owner.plans[g].share
            assert slots is not None
            by_slot = dict(zip(share.own_slots.tolist(), owner.rows[g].keys.tolist(), strict=True))
            assert (
                share.header.send_counts[side.rank.number] == (side.share(g).header.receive_counts[owner.rank.number])
            )
            order = [owner.rank.number, *(n for n in range(len(sides)) if n != owner.rank.number)]
            counts = [share.header.send_counts[n] for n in order]
            start = sum(counts[: order.index(side.rank.number)])
            end = start + share.header.send_counts[side.rank.number]
            keys += [by_slot[slot] for slot in share.send_slots[start:end].tolist()]
        received.append(keys)
    return received


def bags_of_plan(plan: GroupPlan, received: list[int]) -> list[Bag]:
    assert plan.slots is not None
    assert plan.bag_order is not None
    keys = [received[slot] for slot in plan.slots.tolist()]
    weights = [1.0] * len(keys) if plan.weights is None else plan.weights.tolist()
    offsets = range(len(keys) + 1) if plan.offsets is None else plan.offsets.tolist()
    bags = [tuple(zip(keys[a:b], weights[a:b], strict=True)) for a, b in pairwise(offsets)]
    by_row = []
    for u, slot in enumerate(plan.unique_slots.tolist()):
        segment = plan.bag_order[plan.segment_offsets[u] : plan.segment_offsets[u + 1]].tolist()
        assert segment == sorted(segment)
        assert segment
        by_row += [(bag, received[slot]) for bag in segment]
    assert sorted(by_row) == sorted((bag, key) for bag, own in enumerate(bags) for key, _ in own)
    return bags


def looked_up(sides: Sequence[Side], group: GroupSpec, g: int, size: int) -> dict[tuple[int, int], tuple[int, Bag]]:
    """By feature and sample: the rank that looks the bag up, and its content. Fails if two ranks do."""
    found: dict[tuple[int, int], tuple[int, Bag]] = {}
    bounds = part_bounds(size, PARTS)
    for side, received in zip(sides, received_rows(sides, g), strict=True):
        plan, header = side.plans[g], side.share(g).header
        bags = iter(bags_of_plan(plan, received))
        counts = bags_of_sources(group, side.rank, size, header.sequence_lookups)
        samples = 0  # of the sources before
        for source, num_bags in zip(sources_of(group, side.rank), counts, strict=True):
            first, end = bounds[source.part : source.part + 2]
            for f, count in zip(source.features, num_bags, strict=True):
                own = [next(bags) for _ in range(count)]
                if f in group.unpooled_features:
                    assert plan.sequence_offsets is not None
                    starts = plan.sequence_offsets[group.unpooled_features.index(f)]
                    ends = (starts[samples : samples + end - first + 1] - starts[samples]).tolist()
                    assert ends[-1] == count
                    own = [sum(own[a:b], ()) for a, b in pairwise(ends)]
                for sample, bag in zip(range(first, end), own, strict=True):
                    key = group.feature_positions[f], sample
                    assert key not in found, f"feature {key[0]} of sample {sample} is looked up twice"
                    found[key] = side.rank.number, bag
            samples += end - first
        assert next(bags, None) is None
    return found


def added(values: list[str], to: I32, of: I32, level_ends: Sequence[int]) -> list[str]:
    start = 0
    for end in level_ends:
        pairs = list(zip(to[start:end].tolist(), of[start:end].tolist(), strict=True))
        assert len({place for pair in pairs for place in pair}) == 2 * len(pairs)
        for target, source in pairs:
            values[target] = f"({values[target]}+{values[source]})"
        start = end
    assert start == len(to) == len(of)
    return values


def tree(terms: dict[int, str]) -> str:
    """The sum of what parts give: level by level, neighbours are added."""
    for _ in range(3):  # 8 parts
        nodes: dict[int, str] = {}
        for node, value in sorted(terms.items()):
            nodes[node // 2] = f"({nodes[node // 2]}+{value})" if node // 2 in nodes else value
        terms = nodes
    return terms[0]


def gradients(sides: Sequence[Side], group: GroupSpec, g: int) -> dict[int, str]:
    """The sum of each row's gradients at its owner, where every part that looks it up gives `g` and its number."""
    back = []
    for side in sides:
        share, own = side.share(g), side.rows[g].own
        counts = [len(places) for places in own.places]
        parts = [source.part for source in sources_of(group, side.rank)]
        values = [f"g{part}" for part, count in zip(parts, counts, strict=True) for _ in range(count)]
        values = added(values, share.home_to, share.home_of, share.header.home_levels)
        back.append([values[root] for root in share.home_roots.tolist()])
    found: dict[int, str] = {}
    for side in sides:
        share, returned = side.share(g), list[str]()
        for sender in [side, *(other for other in sides if other is not side)]:
            given = sender.share(g).header.receive_counts
            order = [sender.rank.number, *(n for n in range(len(sides)) if n != sender.rank.number)]
            start = sum(given[n] for n in order[: order.index(side.rank.number)])
            returned += back[sender.rank.number][start : start + given[side.rank.number]]
        values = added(returned, share.to, share.of, share.header.levels)
        sums = [values[root] for root in share.roots.tolist()]
        found |= dict(zip(side.rows[g].keys.tolist(), sums, strict=True))
    return found


@settings(max_examples=120)
@given(
    places,
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 3, 8, 40)),
    st.tuples(st.booleans(), st.booleans()),
    st.frozensets(st.integers(0, 3)),
    st.integers(0, 2**32),
)
def test_every_look_up_is_planned_once_on_its_rank_and_every_rows_gradient_is_the_tree_over_the_parts(
    points: dict[int, int], count: int, size: int, kind: tuple[bool, bool], unpooled: frozenset[int], seed: int
) -> None:
    groups = placed(without_pooling(GROUPS, *unpooled), points)
    batch = random_batch(np.random.default_rng(seed), groups, size, *kind).lookups
    check_step(groups, batch, count, seed)


def check_step(groups: tuple[GroupSpec, ...], batch: Lookups, count: int, seed: int) -> None:
    sides, expected = sides_of(groups, batch, count, seed), bags_of_batch(groups, batch)
    bounds = part_bounds(batch.size, PARTS)
    part_of_sample = np.repeat(np.arange(PARTS), np.diff(bounds)).tolist()
    for g, own in enumerate(groups):
        found = looked_up(sides, own, g, batch.size)
        terms: dict[int, dict[int, str]] = {}
        for f, of in zip(own.feature_positions, own.feature_tables(), strict=True):
            owner = owner_of(of, count)
            for sample in range(batch.size):
                part = part_of_sample[sample]
                rank = part // (PARTS // count) if owner is None else owner
                assert found.pop((f, sample)) == (rank, expected[f, sample])
                for key, _ in expected[f, sample]:
                    terms.setdefault(key, {})[part] = f"g{part}"
        assert not found
        assert gradients(sides, own, g) == {key: tree(parts) for key, parts in terms.items()}
        for side in sides:
            assert sum(source_sizes(own, side.rank, batch.size)[: PARTS // count]) == sum(
                part_sizes(batch.size, side.rank)
            )


def test_bags_of_one_elsewhere_do_not_hide_longer_bags_in_other_parts() -> None:
    """The own samples of rank 0 have a look-up each, those of rank 1 have three of a table that rank 0 owns."""
    rows, per_bag = num_rows_by_feature(GROUPS), np.ones((6, 16), np.int64)
    per_bag[0, 8:] = 3
    ids = np.arange(per_bag.sum()) % min(rows)
    offsets = np.concatenate([[0], np.cumsum(per_bag)])
    batch = Lookups(size=16, ids=ids, offsets=offsets)
    check_step(placed(GROUPS, {0: 0}), batch, 2, 0)


def test_a_rank_may_look_up_nothing_at_all() -> None:
    """All tables are owned by rank 0."""
    groups = placed(GROUPS, dict.fromkeys(range(5), 0))
    batch = random_batch(np.random.default_rng(3), groups, 9, True, True).lookups
    check_step(groups, batch, 2, 0)
    _, second = sides_of(groups, batch, 2)
    assert [len(rows.keys) for rows in second.rows] == [0, 0, 0]
