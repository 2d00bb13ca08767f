"""Dividing the cache's capacity between groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetcher.planner.capacity import MAX_SLOTS, Touched, divide_capacity, measure
from protocol.errors import ConfigError
from protocol.tables import GroupSpec
from tests.planner.traces import distinct_keys, group, one_group, random_batch, schedule, single_hot_trace, table, two_groups


def groups_of(*rows_and_dims: tuple[int, int]) -> tuple[GroupSpec, ...]:
    """One table a group; a record has four bytes a column."""
    return tuple(group(i, (table(i, rows, dim, f"f{i}"),), (i,)) for i, (rows, dim) in enumerate(rows_and_dims))


def touched(*largest_and_distinct: tuple[int, int]) -> Touched:
    largest, distinct = zip(*largest_and_distinct, strict=True)
    return Touched(largest_batch_rows=largest, distinct_rows=distinct)


def test_measuring_counts_the_largest_batch_and_all_distinct_rows() -> None:
    groups = two_groups()
    rng = np.random.default_rng(3)
    batches = [random_batch(rng, groups, 3, jagged=True, weighted=False) for _ in range(6)]
    found = measure(groups, schedule(batches, ["train"] * 6))
    for index, spec in enumerate(groups):
        keys = [set(distinct_keys(spec, batch)) for batch in batches]
        assert found.largest_batch_rows[index] == max(map(len, keys))
        assert found.distinct_rows[index] == len(set.union(*keys))


def test_measuring_stops_after_32_batches() -> None:
    trace = single_hot_trace([[i] for i in range(40)])
    assert measure(one_group(100), trace) == Touched(largest_batch_rows=(1,), distinct_rows=(32,))


def test_a_group_that_nothing_touched_is_expected_to_need_a_row_a_bag() -> None:
    assert measure(one_group(100), []) == Touched(largest_batch_rows=(1,), distinct_rows=(1,))


def test_one_group_takes_the_whole_capacity_up_to_its_rows() -> None:
    groups = groups_of((1000, 16))
    assert divide_capacity(groups, touched((10, 50)), capacity_bytes=100 * 64 + 63) == (100,)
    assert divide_capacity(groups, touched((10, 50)), capacity_bytes=10**9) == (1000,)
    assert divide_capacity(groups, touched((10, 50)), capacity_rows=123) == (123,)
    assert divide_capacity(groups, touched((10, 50)), capacity_rows=10) == (10,)


def test_the_rest_goes_by_distinct_bytes() -> None:
    groups = groups_of((10**6, 4), (10**6, 8))
    # least: 10 x 16 + 20 x 32 = 800 bytes; the rest goes 100 x 16 : 150 x 32 = 1 : 3
    assert divide_capacity(groups, touched((10, 100), (20, 150)), capacity_bytes=800 + 6400) == (10 + 1600 // 16, 20 + 4800 // 32)


def test_what_a_full_group_cannot_use_goes_to_the_others() -> None:
    groups = groups_of((12, 4), (10**6, 4))
    assert divide_capacity(groups, touched((10, 12), (10, 12)), capacity_bytes=100 * 16) == (12, 88)
    untouched = divide_capacity(groups, touched((10, 12), (0, 0)), capacity_bytes=100 * 16)
    assert untouched == (12, 88)


def test_a_slot_fits_an_int32() -> None:
    assert divide_capacity(groups_of((2**48, 1)), touched((10, 12)), capacity_bytes=2**40) == (MAX_SLOTS,)


def test_a_capacity_below_the_largest_batch_is_refused_with_both_numbers() -> None:
    groups = groups_of((100, 4), (100, 8))
    with pytest.raises(ConfigError, match=r"799 bytes is too small.*10 \+ 20 rows, 800 bytes; set 800 or more"):
        divide_capacity(groups, touched((10, 100), (20, 150)), capacity_bytes=799)
    assert divide_capacity(groups, touched((10, 100), (20, 150)), capacity_bytes=800) == (10, 20)
    with pytest.raises(ConfigError, match=r'"9 rows" is too small.*touches 10 rows; set "10 rows" or more'):
        divide_capacity(groups[:1], touched((10, 100)), capacity_rows=9)


sizes = st.tuples(st.integers(1, 500), st.integers(1, 9), st.floats(0, 1), st.floats(0, 1))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(sizes, min_size=1, max_size=4), st.integers(0, 20000))
def test_no_group_falls_short_none_overflows_and_nothing_usable_is_left(drawn: list[tuple[int, int, float, float]], rest: int) -> None:
    groups = groups_of(*((rows, dim) for rows, dim, _, _ in drawn))
    counts = touched(*((int(rows * a * b), int(rows * a)) for rows, _, a, b in drawn))
    least = sum(rows * spec.record_bytes for rows, spec in zip(counts.largest_batch_rows, groups, strict=True))
    slots = divide_capacity(groups, counts, capacity_bytes=least + rest)
    left = least + rest - sum(n * spec.record_bytes for n, spec in zip(slots, groups, strict=True))
    assert left >= 0
    for n, most, spec in zip(slots, counts.largest_batch_rows, groups, strict=True):
        assert most <= n <= spec.num_rows
        assert n == spec.num_rows or left < spec.record_bytes
