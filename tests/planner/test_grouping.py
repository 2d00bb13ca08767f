"""Grouping against numpy's stable argsort; the directory's hash and the occurrences against dicts and lists."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.directory import (
    EMPTY,
    LOW,
    Directory,
    exchange,
    forget,
    locate,
    new_directory,
    with_room,
)
from rowcast.prefetcher.planner.grouping import (
    FEW_ROWS,
    SORTED_AT_ONCE,
    Grouper,
    Grouping,
    bags_of,
    consecutive_runs,
    sort_distinct,
    sort_pairs,
)
from rowcast.prefetcher.planner.horizon import Occurrences, make_room, new_occurrences, with_steps
from rowcast.protocol.batch import Batch
from rowcast.runtime.stages import ThreadPool
from tests.support.planner_integrity import check_directory
from tests.support.planner_runs import (
    assert_same,
    group,
    i32,
    i64,
    lookups_of,
    num_rows_by_feature,
    one_group,
    random_batch,
    table,
    two_groups,
    without_pooling,
)

bounded = settings(derandomize=True, max_examples=60)


def grouping_of(spec: GroupSpec, batch: Batch, num_features: int) -> tuple[Grouping, list[int]]:
    grouper = Grouper(spec, num_features)
    return grouper.group(grouper.lookups(batch)), [key for key, _, _ in lookups_of(spec, batch)]


def assert_groups(grouping: Grouping, keys: list[int]) -> None:
    unique, inverse, counts = np.unique(i64(keys), return_inverse=True, return_counts=True)
    np.testing.assert_array_equal(grouping.keys, unique)
    np.testing.assert_array_equal(grouping.segment_offsets, np.concatenate([[0], np.cumsum(counts)]))
    slots, order = arranged(grouping, np.arange(len(unique), dtype=np.int32))
    np.testing.assert_array_equal(order, np.argsort(i64(keys), kind="stable"))
    np.testing.assert_array_equal(slots, inverse)


def arranged(
    grouping: Grouping, unique_slots: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    return Grouper(one_group(1)[0], 1).arrange(grouping, unique_slots)


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


@pytest.mark.parametrize("num_lookups", [2**16 - 1, 2**16, 2**16 + 1])
@pytest.mark.parametrize("num_embeddings", [FEW_ROWS, 2**20, 2**48])
def test_tables_with_more_look_ups_than_two_bytes_count_are_grouped_the_same(
    num_lookups: int, num_embeddings: int
) -> None:
    ids = np.random.default_rng(0).integers(0, num_embeddings, num_lookups)
    batch = Batch(dense=np.zeros((num_lookups, 1), np.float32), labels=np.zeros(num_lookups, np.float32), ids=ids)
    grouping, keys = grouping_of(one_group(num_embeddings)[0], batch, 1)
    assert grouping.order.dtype == (np.uint16 if num_lookups <= 2**16 else np.int32)
    assert_groups(grouping, keys)


@pytest.mark.parametrize("num_distinct", [1, FEW_ROWS, FEW_ROWS + 1])
def test_a_large_table_of_which_few_rows_are_used_is_grouped_the_same(num_distinct: int) -> None:
    rows = np.random.default_rng(1).integers(0, 2**48, num_distinct)
    ids = rows[np.random.default_rng(2).integers(0, num_distinct, 5000)]
    ids[:num_distinct] = rows
    batch = Batch(dense=np.zeros((5000, 1), np.float32), labels=np.zeros(5000, np.float32), ids=ids)
    assert_groups(*grouping_of(one_group(2**48)[0], batch, 1))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_any_number_of_threads_gives_the_same_grouping_and_arrangement(num_threads: int) -> None:
    spec = one_group(3, 40_000, 50, 7, 900_000)[0]
    batch = random_batch(np.random.default_rng(3), (spec,), 3000, jagged=True, weighted=False)
    alone, together = Grouper(spec, 5), Grouper(spec, 5, ThreadPool(num_threads))
    ours, theirs = (grouper.group(grouper.lookups(batch)) for grouper in (alone, together))
    assert_same(ours, theirs)
    slots = np.random.default_rng(4).permutation(ours.num_unique).astype(np.int32)
    assert_same(alone.arrange(ours, slots), together.arrange(theirs, slots))


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


def test_look_ups_that_stay_apart_are_bags_of_their_own() -> None:
    groups = without_pooling(two_groups(), 0, 1, 3)
    offsets = i64([0, 2, 2, 3, 4, 4, 5, 5, 6, 8, 8])  # features a, b, c, d, e of two samples
    batch = Batch(
        dense=np.zeros((2, 1), np.float32),
        labels=np.zeros(2, np.float32),
        ids=i64([6, 1, 1, 6, 4, 10, 3, 3]),
        offsets=offsets,
    )
    first, second = (grouping_of(spec, batch, 5)[0] for spec in groups)
    assert first.sequence_offsets is not None
    assert second.sequence_offsets is not None
    assert (first.sequence_offsets.tolist(), second.sequence_offsets.tolist()) == (
        [[0, 2, 2], [0, 1, 2]],
        [[0, 0, 1], [0, 2, 2]],
    )
    assert first.offsets is not None
    assert first.offsets.tolist() == [0, 1, 2, 3, 4, 4, 5], "a0 a0 | b0 b1 | d of both samples"
    assert second.offsets is None, "every bag holds one look-up"
    single_hot = replace(batch, ids=i64([6, 1, 1, 6, 4, 4, 10, 0, 3, 3]), offsets=None)
    first, second = (grouping_of(spec, single_hot, 5)[0] for spec in groups)
    assert first.sequence_offsets is not None
    assert (first.offsets, first.sequence_offsets.tolist()) == (None, [[0, 1, 2], [0, 1, 2]])
    assert grouping_of(two_groups()[0], batch, 5)[0].sequence_offsets is None


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


def test_sorting_in_place_splits_what_its_spare_arrays_cannot_hold() -> None:
    rng = np.random.default_rng(4)
    tables, rows = rng.integers(0, 3, 3 * SORTED_AT_ONCE) << 48, rng.permutation(3 * SORTED_AT_ONCE)
    keys = tables | rows * np.where(tables == 0, 1, 2**20)  # the distinct keys of one table lie close together
    ours, values = keys.copy(), np.arange(len(keys), dtype=np.int32)
    sort_distinct(ours, values)
    np.testing.assert_array_equal(values, np.argsort(keys))
    np.testing.assert_array_equal(ours, np.sort(keys))


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


def keys_in_one_cluster(num_cells: int, count: int) -> list[int]:
    """Keys of several tables; small directories put many of them side by side."""
    return [(i % 5) << 48 | (i * num_cells) for i in range(count)]


def put(directory: Directory, occurrences: Occurrences, key: int, position: int) -> int | None:
    """The row's last occurrence is at `position` from now on; returns where it was before."""
    occurrences.rows["key"][position % len(occurrences.rows)] = key
    before = int(exchange(*directory, occurrences.rows, key, position))
    return None if before == EMPTY else before & int(LOW)


def position_of(directory: Directory, occurrences: Occurrences, key: int) -> int | None:
    cell = int(directory.cells[locate(directory.cells, occurrences.rows, key)])
    return None if cell == EMPTY else cell & int(LOW)


@pytest.mark.parametrize("seed", range(6))
def test_tracking_moving_and_forgetting_in_any_order_finds_exactly_what_is_tracked(seed: int) -> None:
    rng = np.random.default_rng(seed)
    directory, occurrences = with_room(new_directory(16), 32), new_occurrences(4096)
    keys = keys_in_one_cluster(64, 60)
    known: dict[int, int] = {}
    for position in range(3000):
        key = keys[rng.integers(len(keys))]
        if key in known and rng.random() < 0.5:
            forget(*directory, key, known.pop(key))
        elif key in known or len(known) < 32:
            assert put(directory, occurrences, key, position) == known.get(key)
            known[key] = position
        assert [position_of(directory, occurrences, other) for other in keys] == [known.get(other) for other in keys]
    check_directory(directory, occurrences.rows)


def test_a_grown_directory_leads_to_the_same_places() -> None:
    directory, occurrences = with_room(new_directory(16), 12), new_occurrences(64)
    for position, key in enumerate(range(0, 80, 10)):
        put(directory, occurrences, key, position)
    assert with_room(directory, 4) is directory
    grown = with_room(directory, 20)
    assert (len(directory.cells), len(grown.cells), int(grown.num_tracked[0])) == (32, 128, 8)
    assert [position_of(grown, occurrences, key) for key in range(0, 80, 10)] == list(range(8))
    check_directory(grown, occurrences.rows)


def test_places_beyond_32_bits_are_told_apart_within_the_ring() -> None:
    directory, occurrences = new_directory(16), new_occurrences(64)
    far = 5 * 2**32 + 17
    put(directory, occurrences, 3, far)
    assert put(directory, occurrences, 3, far + 9) == 17
    assert position_of(directory, occurrences, 3) == 26
    forget(*directory, 3, far + 9)
    assert position_of(directory, occurrences, 3) is None


@pytest.mark.parametrize("scored", [False, True])
def test_a_grown_ring_keeps_every_place_and_every_queue(scored: bool) -> None:
    occurrences = new_occurrences(8, 4, scored=scored)
    positions, known, steps = np.arange(5, 12), np.arange(8, 12), np.arange(6, 9)
    occurrences.rows["key"][positions % 8] = positions * 10
    occurrences.queued[known % 8], occurrences.next_in[known % 8] = known, known + 3
    occurrences.first[steps % 4], occurrences.tails[steps % 4] = steps * 100, steps
    if scored:
        occurrences.scores[positions % 8] = positions * 7
    make_room(occurrences, 5, 8, 12, 1)
    assert len(occurrences.rows) == 8
    assert with_steps(occurrences, 6, 9) is occurrences
    make_room(occurrences, 5, 8, 12, 2)
    assert (len(occurrences.rows), len(occurrences.queued), len(occurrences.next_in)) == (16, 8, 8)
    make_room(occurrences, 5, 8, 12, 20)
    assert (len(occurrences.rows), len(occurrences.queued), len(occurrences.next_in)) == (32, 32, 32)
    grown = with_steps(occurrences, 6, 10)
    assert len(grown.first) == 8
    assert grown.rows["key"][positions % 32].tolist() == (positions * 10).tolist()
    assert grown.queued[known % 32].tolist() == known.tolist()
    assert grown.next_in[known % 32].tolist() == (known + 3).tolist()
    scores = grown.scores[positions % 32].tolist() if scored else grown.scores.tolist()
    assert scores == ((positions * 7).tolist() if scored else [0])
    assert grown.first[steps % 8].tolist() == (steps * 100).tolist()
    assert grown.tails[steps % 8].tolist() == steps.tolist()
