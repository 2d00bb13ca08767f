"""Exchange plans against brute force: every look-up finds its row, and every row's gradients are added as one tree."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.tables import TableSpec
from rowcast.prefetcher.planner.exchange import GroupExchange, OrderedSum, exchange_of, ordered_sum
from rowcast.protocol.parts import Rank
from rowcast.protocol.shards import Shards
from rowcast.runtime.arrays import I64

TABLE = TableSpec(
    index=0, name="t", num_embeddings=2**30, embedding_dim=4, features=("t",), pooling="sum", init="uniform"
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


@given(sources)
def test_every_row_is_the_tree_over_the_sources_that_have_it(rows: list[set[int]]) -> None:
    plan = ordered_sum([ascending(own) for own in rows])
    given_values = [f"{source}" for source, own in enumerate(rows) for _ in own]
    assert plan.keys.tolist() == sorted(set().union(*rows))
    assert added(plan, given_values) == [
        tree({source: f"{source}" for source, own in enumerate(rows) if key in own}, 0, len(rows))
        for key in plan.keys.tolist()
    ]


@dataclass
class Side:
    """A rank of the brute force: dictionaries instead of slots."""

    plan: GroupExchange
    rank: Rank
    received: list[int]  # keys
    returned: list[str]  # gradients


def exchanged(parts: list[set[int]], ranks: int) -> list[Side]:
    """Runs a step of all ranks: each value sent lands where the receiver's sizes say that it comes from the sender."""
    shards = Shards([TABLE], ranks)
    keys = [ascending(own) for own in parts]
    sides = []
    for number in range(ranks):
        rank = Rank(number=number, count=ranks, parts=len(parts))
        sides.append(Side(plan=exchange_of(keys, shards, rank), rank=rank, received=[], returned=[]))
    for a in sides:
        for b in sides:
            assert a.plan.send_counts[b.rank.number] == b.plan.receive_counts[a.rank.number]
    for receiver in sides:
        for sender in sides:
            start = sum(sender.plan.send_counts[: receiver.rank.number])
            end = start + sender.plan.send_counts[receiver.rank.number]
            receiver.received += sender.plan.sums.keys[sender.plan.send[start:end]].tolist()
    back: list[list[str]] = []
    for side in sides:
        values = [f"g{part}" for part, own in zip(side.rank.own_parts, side.plan.places, strict=True) for _ in own]
        back.append(added(side.plan.home, values))
    for owner in sides:
        for sender, values in zip(sides, back, strict=True):
            start = sum(sender.plan.receive_counts[: owner.rank.number])
            owner.returned += values[start : start + sender.plan.receive_counts[owner.rank.number]]
    return sides


rows_of_parts = st.integers(1, 9).flatmap(
    lambda ranks: st.sampled_from((1, 2, 4)).flatmap(
        lambda k: st.tuples(
            st.just(ranks),
            st.lists(st.sets(st.integers(0, 999)), min_size=ranks * k, max_size=ranks * k),
        )
    )
)


@settings(max_examples=150)
@given(rows_of_parts)
def test_every_part_finds_its_rows_and_each_has_one_owner_who_adds_the_gradients_of_all_parts(
    drawn: tuple[int, list[set[int]]],
) -> None:
    ranks, parts = drawn
    sides = exchanged(
        [{64 * row for row in own} for own in parts], ranks
    )  # blocks of their own, so all owners have some
    for side in sides:
        for part, places in zip(side.rank.own_parts, side.plan.places, strict=True):
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
    assert first.plan.receive_counts[1] == second.plan.send_counts[0] == len(second.returned)


def is_accepted(count: int, parts: int) -> bool:
    try:
        Rank(number=0, count=count, parts=parts)
    except ValueError:
        return False
    return True


def test_exactly_those_numbers_of_ranks_are_accepted_whose_sums_make_the_tree_over_the_parts() -> None:
    for parts in range(1, 33):
        terms = {part: f"{part}" for part in range(parts)}
        for count in range(1, parts + 1):
            k = parts // count
            of_ranks = {number: tree(terms, number * k, (number + 1) * k) for number in range(count)}
            gives_the_tree = parts % count == 0 and tree(of_ranks, 0, count) == tree(terms, 0, parts)
            assert is_accepted(count, parts) == gives_the_tree, f"{count} ranks, {parts} parts"


@pytest.mark.parametrize(("count", "parts"), [(2, 3), (4, 12), (8, 4), (2, 0)])
def test_parts_that_are_no_branches_of_the_tree_are_refused(count: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"{parts} parts cannot be shared by {count} ranks"):
        Rank(number=0, count=count, parts=parts)
