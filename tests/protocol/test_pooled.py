"""What a rank looks up for which parts, and how slots follow from an order."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.grouping import Grouper
from rowcast.protocol.parts import (
    LookupSource,
    Rank,
    bags_of_sources,
    owner_of,
    part_bounds,
    part_sizes,
    source_sizes,
    sources_of,
    vectors_from,
    vectors_to,
)
from rowcast.protocol.plan import MOST_ORDERED, first_not_permuted, table_starts
from rowcast.protocol.plan_layout import LookupArrays
from rowcast.trainer.kernels import arrange_in_torch
from rowcast.trainer.kernels.choose import arranged, lookup_arrays
from tests.support.planner_runs import group, one_group, placed, random_batch, table, two_groups, without_pooling

GROUP = group(0, (table(0, 70, 4, "a", "b"), table(1, 50, 4, "c"), table(2, 30, 4, "d")), (0, 1, 2, 3))
places = st.dictionaries(st.integers(0, 2), st.sampled_from((0, 2**30, 2**31, 2**32 - 1)))
numbers_of_ranks = st.sampled_from((1, 2, 4, 8))


def ranks_of(count: int, parts: int) -> list[Rank]:
    return [Rank(number=number, count=count, parts=parts) for number in range(count)]


def with_places(points: dict[int, int], unpooled: frozenset[int]) -> GroupSpec:
    [own] = placed(without_pooling((GROUP,), *unpooled), points)
    return own


@given(places, numbers_of_ranks)
def test_every_feature_of_every_part_is_looked_up_once_by_the_owner_of_its_table_or_by_the_parts_rank(
    points: dict[int, int], count: int
) -> None:
    own, found = with_places(points, frozenset()), list[tuple[int, int, int]]()
    for rank in ranks_of(count, 8):
        found += [(source.part, f, rank.number) for source in sources_of(own, rank) for f in source.features]
    owners = [owner_of(table, count) for table in own.feature_tables()]
    expected = [
        (part, f, part // (8 // count) if owner is None else owner)
        for part in range(8)
        for f, owner in enumerate(owners)
    ]
    assert sorted(found) == expected


@given(places, numbers_of_ranks, st.integers(1, 40), st.frozensets(st.integers(0, 2)))
def test_what_a_rank_pools_for_others_is_what_they_receive_and_the_last_of_its_bags(
    points: dict[int, int], count: int, size: int, unpooled: frozenset[int]
) -> None:
    own, ranks = with_places(points, unpooled), ranks_of(count, 8)
    sent = [vectors_to(own, rank, size) for rank in ranks]
    assert [list(column) for column in zip(*sent, strict=True)] == [vectors_from(own, rank, size) for rank in ranks]
    for rank, to_others in zip(ranks, sent, strict=True):
        lookups = [[3 + part] * len(own.unpooled_features) for part in rank.own_parts]
        bags = bags_of_sources(own, rank, size, lookups)
        assert sum(map(sum, bags[rank.parts_per_rank :])) == sum(to_others)
        arrived = sum(vectors_from(own, rank, size))
        pooled = [f for f in range(own.num_features) if f not in own.unpooled_features]
        here = [sum(counts) for counts in bags[: rank.parts_per_rank]]
        assert sum(here) + arrived == len(pooled) * sum(part_sizes(size, rank)) + sum(map(sum, lookups))
        bounds = part_bounds(size, 8)
        sizes = [bounds[source.part + 1] - bounds[source.part] for source in sources_of(own, rank)]
        assert source_sizes(own, rank, size) == sizes


def test_without_placed_tables_sources_are_the_own_parts_with_all_features() -> None:
    assert sources_of(GROUP, Rank(number=1, count=2, parts=4)) == (
        LookupSource(2, (0, 1, 2, 3)),
        LookupSource(3, (0, 1, 2, 3)),
    )


def test_own_parts_come_first_and_other_parts_have_owned_features_alone() -> None:
    own = with_places({0: 2**31, 2: 0}, frozenset())  # of ranks 1 and 0
    assert sources_of(own, Rank(number=1, count=2, parts=4)) == (
        LookupSource(2, (0, 1, 2)),
        LookupSource(3, (0, 1, 2)),
        LookupSource(0, (0, 1)),
        LookupSource(1, (0, 1)),
    )


Arrays = LookupArrays[npt.NDArray[Any]]


@pytest.mark.parametrize("seed", range(4))
def test_slots_and_bags_are_those_of_a_stable_sort(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = two_groups() if seed % 2 else one_group(3, 100_000, 40)
    group = groups[0]
    batch = random_batch(rng, groups, int(rng.integers(1, 300)), jagged=False, weighted=False)
    grouper = Grouper(group, len(batch.ids) // batch.size)
    looked_up = grouper.lookups(batch)
    grouping = grouper.group(looked_up)
    unique_slots = rng.permutation(grouping.num_unique).astype(np.int32)
    plan: Arrays = LookupArrays(
        order=grouping.order, unique_slots=unique_slots, segment_offsets=grouping.segment_offsets
    )
    tables = np.repeat(np.arange(len(group.tables)), np.diff(looked_up.table_starts))
    _, rows = np.unique(tables << 32 | looked_up.ids, return_inverse=True)
    expected = lookup_arrays(rows, unique_slots[rows])
    assert equal(arranged(plan, group), expected)
    assert equal(in_torch(plan, group), expected)


def in_torch(plan: Arrays, group: GroupSpec) -> Arrays:
    assert plan.order is not None
    slots, bag_order = torch.zeros(2, len(plan.order), dtype=torch.int32)
    order, segments, unique = map(torch.from_numpy, (plan.order, plan.segment_offsets, plan.unique_slots))
    arrange_in_torch(group, order, segments, unique, slots, bag_order)
    return replace(plan, order=None, **{"slots": slots.numpy(), "bag_order": bag_order.numpy()})


def equal(ours: Arrays, theirs: Arrays) -> bool:
    return ours.named().keys() == theirs.named().keys() and all(
        np.array_equal(array, theirs.named()[name]) for name, array in ours.named().items()
    )


def test_a_table_of_65536_look_ups_is_ordered_and_a_larger_one_is_refused() -> None:
    marks = np.full(MOST_ORDERED, 7, np.uint8)
    order = np.random.default_rng(0).permutation(MOST_ORDERED).astype(np.uint16)
    starts = table_starts(one_group(1, 1)[0], MOST_ORDERED)
    assert first_not_permuted(np.concatenate([order, order]), starts, marks) == -1
    assert first_not_permuted(np.concatenate([order, order[:-1], order[:1]]), starts, marks) == 1
    assert first_not_permuted(np.concatenate([order, order, order]), np.array([0, 3 * MOST_ORDERED]), marks) == 0
