"""Grouping against numpy's stable argsort."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetcher.planner.grouping import Grouper, Grouping, bags_of, consecutive_runs, order_by_row, sort_pairs
from protocol.batch import Batch
from protocol.tables import KEY_SHIFT, GroupSpec
from tests.planner.traces import group, i32, i64, lookups_of, num_rows_by_feature, one_group, random_batch, table, two_groups

bounded = settings(derandomize=True, deadline=None, max_examples=60)


def grouping_of(spec: GroupSpec, batch: Batch, num_features: int) -> tuple[Grouping, list[int]]:
    grouper = Grouper(spec, num_features)
    return grouper.group(grouper.lookups(batch)), [key for key, _, _ in lookups_of(spec, batch)]


def assert_groups(grouping: Grouping, keys: list[int]) -> None:
    unique, inverse, counts = np.unique(i64(keys), return_inverse=True, return_counts=True)
    np.testing.assert_array_equal(grouping.keys, unique)
    np.testing.assert_array_equal(grouping.inverse, inverse)
    np.testing.assert_array_equal(grouping.segment_offsets, np.concatenate([[0], np.cumsum(counts)]))
    slots, order = np.empty(len(keys), np.int32), np.empty(len(keys), np.int32)
    order_by_row(grouping.inverse, grouping.segment_offsets, np.arange(len(unique), dtype=np.int32), slots, order)
    np.testing.assert_array_equal(order, np.argsort(i64(keys), kind="stable"))
    np.testing.assert_array_equal(slots, inverse)


@bounded
@given(st.integers(0, 2**32), st.integers(0, 30), st.booleans(), st.booleans())
def test_grouping_equals_a_stable_argsort(seed: int, size: int, jagged: bool, weighted: bool) -> None:
    groups = two_groups()
    batch = random_batch(np.random.default_rng(seed), groups, size, jagged, weighted)
    for spec in groups:
        assert_groups(*grouping_of(spec, batch, len(num_rows_by_feature(groups))))


@pytest.mark.parametrize("num_embeddings", [1, 2, 1000, 10**6, 2**48])
def test_grouping_equals_a_stable_argsort_for_few_and_for_very_many_rows(num_embeddings: int) -> None:
    groups = (group(0, (table(2**15 - 1, num_embeddings, 4, "a"),), (0,)),)
    for spread in (1, 2):
        batch = random_batch(np.random.default_rng(spread), groups, 5000, jagged=spread == 2, weighted=False)
        assert_groups(*grouping_of(groups[0], batch, 1))


def test_rows_that_differ_in_high_bits_only_are_told_apart() -> None:
    groups = one_group(2**48)
    ids = i64([value << 40 for value in range(200)] * 2)
    batch = Batch(dense=np.zeros((400, 1), np.float32), labels=np.zeros(400, np.float32), ids=ids)
    assert_groups(*grouping_of(groups[0], batch, 1))


def test_look_ups_of_a_group_are_its_features_in_order_with_their_bags_and_weights() -> None:
    groups = two_groups()
    offsets = i64([0, 2, 2, 3, 4, 4, 5, 5, 6, 8, 8])  # features a, b, c, d, e of two samples
    batch = Batch(
        dense=np.zeros((2, 1), np.float32),
        labels=np.zeros(2, np.float32),
        ids=i64([6, 1, 1, 6, 4, 10, 3, 3]),
        offsets=offsets,
        weights=np.arange(8, dtype=np.float32),
    )
    first, second = (Grouper(spec, 5).lookups(batch) for spec in groups)
    assert (first.ids.tolist(), second.ids.tolist()) == ([6, 1, 1, 6, 10], [4, 3, 3])
    assert first.offsets is not None
    assert second.offsets is not None
    assert (first.offsets.tolist(), second.offsets.tolist()) == ([0, 2, 2, 3, 4, 4, 5], [0, 0, 1, 3, 3])
    assert first.weights is not None
    assert second.weights is not None
    assert (first.weights.tolist(), second.weights.tolist()) == ([0, 1, 2, 3, 5], [4, 6, 7])
    assert (first.table_starts.tolist(), second.table_starts.tolist()) == ([0, 4, 5], [0, 1, 3])


def test_a_table_with_two_features_groups_their_look_ups_together() -> None:
    batch = Batch(dense=np.zeros((2, 1), np.float32), labels=np.zeros(2, np.float32), ids=i64([6, 1, 1, 6, 4, 4, 10, 0, 3, 3]))
    grouping, keys = grouping_of(two_groups()[0], batch, 5)
    assert grouping.keys.tolist() == [1, 6, 2 << KEY_SHIFT, 2 << KEY_SHIFT | 10]
    assert grouping.inverse.tolist() == [1, 0, 0, 1, 3, 2]
    assert_groups(grouping, keys)


def test_bags_skip_empty_ones() -> None:
    bags = np.empty(4, np.int32)
    bags_of(i32([3, 0, 1, 2]), i32([0, 0, 2, 2, 3, 4, 4]), bags)
    assert bags.tolist() == [4, 1, 1, 3]


@bounded
@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**63 - 1)), max_size=300))
def test_sorting_pairs_is_stable_and_moves_values_along(keys: list[int]) -> None:
    ours, values = i64(keys), np.arange(len(keys), dtype=np.int32)
    sort_pairs(ours, values)
    np.testing.assert_array_equal(values, np.argsort(i64(keys), kind="stable"))
    np.testing.assert_array_equal(ours, np.sort(i64(keys)))


def test_read_only_ids_are_grouped() -> None:
    ids = np.frombuffer(i64([3, 1, 3]).tobytes(), np.int64)
    batch = Batch(dense=np.zeros((3, 1), np.float32), labels=np.zeros(3, np.float32), ids=ids)
    assert_groups(*grouping_of(one_group(5)[0], batch, 1))


def test_neighbouring_features_are_cut_as_one_run() -> None:
    assert consecutive_runs((0, 1, 4, 5, 7)) == [(0, 2), (4, 6), (7, 8)]


@pytest.mark.parametrize(
    ("ids", "offsets", "problem"),
    [
        ([0, 9], None, "ids 9 to 9 of table 1 with 5 rows"),
        ([0, -1], None, "ids -1 to -1 of table 1"),
        ([0], None, "1 look-ups for 2 single-hot bags"),
        ([0, 1], [0, 2], "2 offsets for 2 bags"),
        ([0, 1], [0, 1, 3], "offsets from 0 to 3 for 2 look-ups"),
        ([0, 1], [0, 3, 2], "a bag of -1 look-ups"),
    ],
)
def test_what_a_reader_must_not_let_through_is_caught_before_compiled_loops(
    ids: list[int], offsets: list[int] | None, problem: str
) -> None:
    batch = Batch(
        dense=np.zeros((1, 1), np.float32),
        labels=np.zeros(1, np.float32),
        ids=i64(ids),
        offsets=None if offsets is None else i64(offsets),
    )
    grouper = Grouper(one_group(5, 5)[0], 2)
    with pytest.raises(AssertionError, match=problem):
        grouper.group(grouper.lookups(batch))
