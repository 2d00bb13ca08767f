"""Exchange plans against brute force: every look-up finds its row, and every row's gradients are added as one tree."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.prefetcher.planner.exchange import ExchangedRows, OrderedSum, ShareOfBatch, ordered_sum
from rowcast.prefetcher.planner.grouping import JointGrouper
from rowcast.protocol.batch import Lookups
from rowcast.protocol.parts import Rank, Shards, parts_of
from rowcast.runtime.arrays import I64
from tests.support.exchange_oracle import assert_same, shared_rows_of
from tests.support.planner_runs import group, one_group, random_batch, table, without_pooling
from tests.support.repeats import count

GROUP = one_group(2**30)
GROUPS = (  # whose features alternate in a batch
    group(0, (table(0, 50_000, 4, "a", "b"), table(2, 300, 4, "d")), (0, 1, 3)),
    group(1, (table(1, 5_000, 8, "c"), table(3, 40, 8, "e")), (2, 4)),
)
Terms = dict[int, str]  # what each source that has a row gives


def tree(terms: Terms, first: int, end: int) -> str:
    """The sum of the sources `first` to `end` - 1, by recursion; "" if none of them has the row."""
    if end - first == 1:
        return terms.get(first, "")
    half = 1
    while 2 * half < end - first:
        half *= 2
    left, right = tree(terms, first, first + half), tree(terms, first + half, end)
    return f"({left}+{right})" if left and right else left or right


def added(plan: OrderedSum, values: list[str]) -> list[str]:
    """The sum of each row, in the order of `roots`. Within a level, all additions could happen at once."""
    values, start = list(values), 0
    for end in plan.level_ends:
        pairs = list(zip(plan.to[start:end].tolist(), plan.of[start:end].tolist(), strict=True))
        places = [place for pair in pairs for place in pair]
        assert len(set(places)) == len(places)
        for to, of in pairs:
            values[to] = f"({values[to]}+{values[of]})"
        start = end
    assert start == len(plan.to) == len(plan.of)
    return [values[root] for root in plan.roots.tolist()]


sources = st.lists(st.sets(st.integers(0, 20)), min_size=1, max_size=13)


def ascending(keys: set[int]) -> I64:
    return np.array(sorted(keys), np.int64)


@given(sources, st.integers(0, 12))
def test_every_row_is_the_tree_over_the_sources_that_have_it(rows: list[set[int]], first: int) -> None:
    first %= len(rows)
    plan, indices = ordered_sum([ascending(own) for own in rows], first)
    order = [first, *(source for source in range(len(rows)) if source != first)]
    assert plan.keys[indices].tolist() == [key for source in order for key in sorted(rows[source])]
    given_values = [f"{source}" for source in order for _ in rows[source]]
    assert plan.keys.tolist() == sorted(set().union(*rows))
    assert added(plan, given_values) == [
        tree({source: f"{source}" for source, own in enumerate(rows) if key in own}, 0, len(rows))
        for key in plan.keys.tolist()
    ]


@dataclass
class Side:
    """A rank of the brute force: dictionaries instead of slots."""

    plan: ExchangedRows
    rank: Rank
    received: list[int]  # keys
    returned: list[str]  # gradients


def exchanged(parts: list[set[int]], ranks: int) -> list[Side]:
    """Runs a step of all ranks: each value sent lands where the receiver's sizes say that it comes from the sender."""
    keys = [ascending(own) for own in parts]
    sides = []
    for number in range(ranks):
        rank = Rank(number=number, count=ranks, parts=len(parts))
        alone = ShareOfBatch(GROUP, JointGrouper(GROUP), rank)
        [rows] = alone.group([Lookups(size=len(own), ids=own) for own in keys])
        sides.append(Side(plan=rows, rank=rank, received=[], returned=[]))
    for a in sides:
        for b in sides:
            assert a.plan.send_counts[b.rank.number] == len(b.plan.own.wanted[a.rank.number])
    for receiver in sides:
        for sender in own_first(receiver, sides):
            sent = pieces(sender, sides, sender.plan.send_counts, sender.plan.send.tolist())[receiver.rank.number]
            receiver.received += [int(sender.plan.sums.keys[row]) for row in sent]
    back: list[list[str]] = []
    for side in sides:
        values = [f"g{part}" for part, own in zip(side.rank.own_parts, side.plan.own.places, strict=True) for _ in own]
        back.append(added(side.plan.own.home, values))
    for owner in sides:
        for sender in own_first(owner, sides):
            counts = [len(own) for own in sender.plan.own.wanted]
            owner.returned += pieces(sender, sides, counts, back[sender.rank.number])[owner.rank.number]
    return sides


def own_first(side: Side, sides: list[Side]) -> list[Side]:
    return [side, *(other for other in sides if other is not side)]


def pieces(side: Side, sides: list[Side], counts: Sequence[int], values: list[Any]) -> dict[int, list[Any]]:
    """What it has for each rank, its own first."""
    found, start = {}, 0
    for other in own_first(side, sides):
        found[other.rank.number] = values[start : start + counts[other.rank.number]]
        start += counts[other.rank.number]
    return found


rows_of_parts = st.integers(1, 9).flatmap(
    lambda ranks: st.sampled_from((1, 2, 4)).flatmap(
        lambda k: st.tuples(
            st.just(ranks),
            st.lists(st.sets(st.integers(0, 999)), min_size=ranks * k, max_size=ranks * k),
        )
    )
)


@settings(max_examples=count(test=60, soak=1000))
@given(rows_of_parts)
def test_every_part_finds_its_rows_and_each_has_one_owner_who_adds_the_gradients_of_all_parts(
    drawn: tuple[int, list[set[int]]],
) -> None:
    ranks, parts = drawn
    sides = exchanged(
        [{64 * row for row in own} for own in parts], ranks
    )  # blocks of their own, so all owners have some
    for side in sides:
        for part, places in zip(side.rank.own_parts, side.plan.own.places, strict=True):
            assert [side.received[place] for place in places.tolist()] == [64 * row for row in sorted(parts[part])]
    owned = [key for side in sides for key in side.plan.sums.keys.tolist()]
    assert sorted(owned) == sorted({64 * row for own in parts for row in own})
    for side in sides:
        sums = dict(zip(side.plan.sums.keys.tolist(), added(side.plan.sums, side.returned), strict=True))
        for key, found in sums.items():
            terms = {part: f"g{part}" for part, own in enumerate(parts) if key // 64 in own}
            assert found == tree(terms, 0, len(parts))


def test_a_rank_without_parts_of_its_own_still_owns_rows() -> None:
    first, second = exchanged([{0, 64, 128, 192, 256, 320}, set()], 2)
    assert second.received == []
    assert second.plan.send_counts[0] > 0
    assert len(first.plan.own.wanted[1]) == second.plan.send_counts[0] == len(second.returned)


def of_batch(batch: Lookups, features: frozenset[int]) -> Lookups:
    """The batch with all look-ups of some features in its first sample's bag."""
    if batch.offsets is None:
        return batch
    offsets = batch.offsets.copy()
    for feature in features:
        first, end = feature * batch.size, (feature + 1) * batch.size
        offsets[first + 1 : end] = offsets[end]
    return replace(batch, offsets=offsets)


@settings(max_examples=count(test=60, soak=1000))
@given(
    st.integers(1, 9),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 7, 30, 200)),
    st.tuples(st.booleans(), st.booleans()),
    st.frozensets(st.integers(0, 3)),
    st.frozensets(st.integers(0, 4)),
    st.integers(0, 2**32),
)
def test_ranks_that_tell_each_other_their_rows_have_the_exchange_that_each_would_find_in_the_whole_batch(
    count: int,
    k: int,
    size: int,
    kind: tuple[bool, bool],
    unpooled: frozenset[int],
    whole: frozenset[int],
    seed: int,
) -> None:
    groups = without_pooling(GROUPS, *unpooled)
    batch = of_batch(random_batch(np.random.default_rng(seed), groups, size, *kind).lookups, whole)
    cut, grouper = parts_of(batch, count * k, whole if kind[0] else ()), JointGrouper(groups)
    ranks = [Rank(number=number, count=count, parts=count * k) for number in range(count)]
    shares = [ShareOfBatch(groups, grouper, rank) for rank in ranks]
    wanted = [own.want([cut[part] for part in rank.own_parts]) for own, rank in zip(shares, ranks, strict=True)]
    by_part = [grouper.group(part) for part in cut]
    for share, rank, own in zip(shares, ranks, wanted, strict=True):
        asked = [[rows.wanted[rank.number] for rows in of_rank] for of_rank in wanted]
        found, together = share.complete(own, asked), share.group(cut)
        for g, (rows, alike) in enumerate(zip(found, together, strict=True)):
            parts = [groupings[g] for groupings in by_part]
            expected = shared_rows_of(parts, Shards(groups[g].tables, count), rank)
            assert_same(rows, expected, f"group {g}")
            assert_same(alike, expected, f"group {g}")


def is_accepted(count: int, parts: int) -> bool:
    try:
        Rank(number=0, count=count, parts=parts)
    except ValueError:
        return False
    return True


def test_exactly_those_numbers_of_ranks_are_accepted_whose_sums_make_the_tree_over_the_parts() -> None:
    for parts in range(1, 33):
        terms = {part: f"{part}" for part in range(parts)}
        for ranks in range(1, parts + 1):
            k = parts // ranks
            of_ranks = {number: tree(terms, number * k, (number + 1) * k) for number in range(ranks)}
            gives_the_tree = parts % ranks == 0 and tree(of_ranks, 0, ranks) == tree(terms, 0, parts)
            assert is_accepted(ranks, parts) == gives_the_tree, f"{ranks} ranks, {parts} parts"


@pytest.mark.parametrize(("count", "parts"), [(2, 3), (4, 12), (8, 4), (2, 0)])
def test_parts_that_are_no_branches_of_the_tree_are_refused(count: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"{parts} parts cannot be shared by {count} ranks"):
        Rank(number=0, count=count, parts=parts)
