"""Dividing the cache's capacity between groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.schema import Lookahead
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.planner.directory import MOST_ROWS
from rowcast.prefetcher.planner.first_batches import (
    Touched,
    check_trackable,
    divide_capacity,
    known_rows,
    measure,
    slots_of,
)
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.protocol.parts import Rank
from rowcast.runtime.errors import ConfigError
from tests.support import jobs
from tests.support.batches import small_batches, small_job
from tests.support.facts import facts
from tests.support.planner_integrity import check_planner
from tests.support.planner_runs import (
    distinct_keys,
    group,
    one_group,
    random_batch,
    schedule,
    single_hot_trace,
    table,
    two_groups,
)


def groups_of(*rows_and_dims: tuple[int, int]) -> tuple[GroupSpec, ...]:
    """One table a group; a record has four bytes a column."""
    return tuple(group(i, (table(i, rows, dim, f"f{i}"),), (i,)) for i, (rows, dim) in enumerate(rows_and_dims))


def touched(*largest_and_distinct: tuple[int, int]) -> Touched:
    largest, distinct = zip(*largest_and_distinct, strict=True)
    return Touched(num_batches=6, largest_batch_rows=largest, distinct_rows=distinct)


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
    assert measure(one_group(100), trace) == Touched(num_batches=32, largest_batch_rows=(1,), distinct_rows=(32,))


def test_a_group_that_nothing_touched_is_expected_to_need_a_row_a_bag() -> None:
    assert measure(one_group(100), []) == Touched(num_batches=0, largest_batch_rows=(1,), distinct_rows=(1,))


def test_one_group_takes_the_whole_capacity_up_to_its_rows() -> None:
    groups = groups_of((1000, 16))
    assert divide_capacity(groups, touched((10, 50)), capacity_bytes=100 * 64 + 63) == (100,)
    assert divide_capacity(groups, touched((10, 50)), capacity_bytes=10**9) == (1000,)
    assert divide_capacity(groups, touched((10, 50)), capacity_rows=123) == (123,)
    assert divide_capacity(groups, touched((10, 50)), capacity_rows=10) == (10,)


def test_the_rest_goes_by_distinct_bytes() -> None:
    groups = groups_of((10**6, 4), (10**6, 8))
    # least: 10 x 16 + 20 x 32 = 800 bytes; the rest goes 100 x 16 : 150 x 32 = 1 : 3
    assert divide_capacity(groups, touched((10, 100), (20, 150)), capacity_bytes=800 + 6400) == (
        10 + 1600 // 16,
        20 + 4800 // 32,
    )


def test_what_a_full_group_cannot_use_goes_to_the_others() -> None:
    groups = groups_of((12, 4), (10**6, 4))
    assert divide_capacity(groups, touched((10, 12), (10, 12)), capacity_bytes=100 * 16) == (12, 88)
    untouched = divide_capacity(groups, touched((10, 12), (0, 0)), capacity_bytes=100 * 16)
    assert untouched == (12, 88)


@pytest.mark.parametrize("alone", [True, False])
def test_more_slots_than_the_planner_can_keep_track_of_are_refused_with_what_to_change(alone: bool) -> None:
    (huge,) = groups_of((2**48, 16))
    key = "cache.capacity" if alone else "cache.groups.fp32_d16_sgd"
    check_trackable(huge, MOST_ROWS - 5000, 5000, alone=alone)
    with pytest.raises(ConfigError) as raised:
        check_trackable(huge, MOST_ROWS - 5000, 5001, alone=alone)
    assert str(raised.value) == (
        f"the capacity gives group fp32_d16_sgd {MOST_ROWS - 5000} slots, and batches known ahead touch up to 5001 "
        f"rows, but the planner keeps track of at most {MOST_ROWS} rows of a group; "
        f'set {key} = "{MOST_ROWS - 5001} rows" or less'
    )
    with pytest.raises(ConfigError, match=facts("lookahead.horizon", "lookahead.id_bytes", MOST_ROWS)):
        check_trackable(huge, 1, MOST_ROWS, alone=alone)


def test_tables_that_the_planner_can_keep_track_of_as_a_whole_fit_any_capacity() -> None:
    (group,) = groups_of((MOST_ROWS, 16))
    check_trackable(group, MOST_ROWS, 10**9, alone=True)


def test_rows_of_the_horizon_are_its_batches_or_what_its_bytes_hold() -> None:
    assert known_rows(Lookahead(depth=4, horizon=16), 1000) == 18 * 1000
    assert known_rows(Lookahead(depth=4, horizon=0), 1000) == 6 * 1000
    assert known_rows(Lookahead(depth=4, id_bytes="36MB"), 1000) == 10**6
    assert known_rows(Lookahead(depth=64, id_bytes="36KB"), 1000) == 66 * 1000


def test_a_job_whose_capacity_gives_too_many_slots_is_refused_as_it_is_divided() -> None:
    tables = [jobs.table("t", 2**40, 16, "cat_0")]
    job = jobs.job(tables=tables, cache={"capacity": "100GiB"})
    with pytest.raises(ConfigError, match=facts("fp32_d16_sgd", "1677721600 slots")):
        slots_of(job, group_specs(job), measure(group_specs(job), []))
    job = jobs.job(tables=tables, cache={"capacity": "10GiB"})
    assert slots_of(job, group_specs(job), measure(group_specs(job), [])) == (10 * 2**30 // 64,)


def test_a_batch_beyond_what_can_be_tracked_is_refused_and_changes_nothing() -> None:
    planner = RowPlanner(one_group(100), [(5,)], 1, 0)
    (group,) = planner.levels[0].groups
    first, second = single_hot_trace([[0, 1], [2, 3, 4]])
    planner.add(first)
    planner.plan()
    group.parts[0].directory.num_tracked[0] = MOST_ROWS - 2
    with pytest.raises(ConfigError, match=facts("step 1", "3 distinct rows", MOST_ROWS - 2)):
        planner.add(second)
    group.parts[0].directory.num_tracked[0] = 2
    check_planner(planner)
    planner.add(second)
    assert len(planner.plan().move[0].fetch_keys) == 3


def test_a_capacity_below_the_largest_batch_is_refused_with_both_numbers() -> None:
    groups = groups_of((100, 4), (100, 8))
    with pytest.raises(ConfigError, match=facts("799 bytes", "10 + 20 rows", "800 bytes")):
        divide_capacity(groups, touched((10, 100), (20, 150)), capacity_bytes=799)
    assert divide_capacity(groups, touched((10, 100), (20, 150)), capacity_bytes=800) == (10, 20)
    with pytest.raises(ConfigError, match=facts("9 rows", "10 rows")):
        divide_capacity(groups[:1], touched((10, 100)), capacity_rows=9)


def test_a_named_group_gets_exactly_its_share_and_the_others_divide_the_rest() -> None:
    groups = groups_of((10**6, 4), (10**6, 8), (10**6, 16))
    counts = touched((10, 100), (20, 150), (5, 100))
    free = divide_capacity(groups, counts, capacity_bytes=10**5)
    fixed = divide_capacity(groups, counts, capacity_bytes=10**5, fixed_rows={groups[1].name: 700})
    rest = divide_capacity((groups[0], groups[2]), touched((10, 100), (5, 100)), capacity_bytes=10**5 - 700 * 32)
    assert fixed == (rest[0], 700, rest[1])
    assert free[1] != 700


def test_a_named_group_gets_at_most_its_rows_and_the_others_what_it_leaves() -> None:
    groups = groups_of((50, 4), (10**6, 8))
    assert divide_capacity(
        groups, touched((10, 50), (1, 1)), capacity_bytes=10**4, fixed_rows={groups[0].name: 10**9}
    ) == (50, 287)


def test_what_no_group_is_left_to_take_stays_unused() -> None:
    groups = groups_of((1000, 4))
    assert divide_capacity(groups, touched((10, 50)), capacity_rows=500, fixed_rows={groups[0].name: 40}) == (40,)


def test_a_share_below_the_groups_largest_batch_is_refused_with_both_numbers() -> None:
    groups = groups_of((100, 4), (100, 8))
    counts = touched((10, 100), (20, 100))
    with pytest.raises(
        ConfigError,
        match=facts("cache.groups.fp32_d8_sgd", 19, 20, "640 bytes"),
    ):
        divide_capacity(groups, counts, capacity_bytes=10**6, fixed_rows={"fp32_d8_sgd": 19})
    assert divide_capacity(groups, counts, capacity_bytes=800, fixed_rows={"fp32_d8_sgd": 20}) == (10, 20)


def test_shares_that_starve_other_groups_are_refused_with_the_capacity_needed() -> None:
    groups = groups_of((100, 4), (100, 8), (100, 16))
    counts = touched((10, 100), (20, 100), (30, 100))
    with pytest.raises(
        ConfigError,
        match=facts("3039 bytes", "cache.groups", "10 + 30 rows", "2080 bytes", 3040),
    ):
        divide_capacity(groups, counts, capacity_bytes=3039, fixed_rows={"fp32_d8_sgd": 30})
    assert divide_capacity(groups, counts, capacity_bytes=3040, fixed_rows={"fp32_d8_sgd": 30}) == (10, 30, 30)


def test_a_jobs_slots_follow_its_capacity_and_the_shares_that_it_names() -> None:
    """Two groups of small_job: width 5 takes 32 bytes a row with sgd, width 8 as much."""
    for cache, expected in (
        ({"capacity": "64KB", "groups": {"fp32_d8_sgd": "150 rows"}}, (1850, 150)),
        ({"capacity": "64KB", "groups": {"fp32_d8_sgd": "6400B", "fp32_d5_sgd": "400 rows"}}, (400, 200)),
        ({"capacity": "1GiB", "groups": {"fp32_d8_sgd": "1GiB"}}, (2400, 400)),
    ):
        job = small_job("sgd", cache=cache)
        assert slots_of(job, group_specs(job), measure(group_specs(job), small_batches(job, "single"))) == expected


BAD_SHARES: dict[str, tuple[dict[str, str], str]] = {
    "unknown group": (
        {"fp32_d16_sgd": "1KiB"},
        "cache.groups: fp32_d16_sgd is no group of this job; it has fp32_d5_sgd, fp32_d8_sgd",
    ),
    "no row": ({"fp32_d5_sgd": "31B"}, "cache.groups.fp32_d5_sgd = '31B' is less than one row of 32 bytes; give more"),
    "no rows": ({"fp32_d5_sgd": "0 rows"}, "cache.groups.fp32_d5_sgd = '0 rows' is less than one row"),
    "together": (
        {"fp32_d5_sgd": "300 rows", "fp32_d8_sgd": "1KiB"},
        "the named groups take 10624 bytes, more than cache.capacity = '10KiB' (10240 bytes); give them less or "
        "raise it to 10624 bytes",
    ),
    "no size": ({"fp32_d5_sgd": "half"}, "'half' is not a size"),
}


@pytest.mark.parametrize("name", BAD_SHARES)
def test_a_share_that_no_run_could_have_is_refused_as_the_job_file_is_read(name: str) -> None:
    groups, sentence = BAD_SHARES[name]
    with pytest.raises(ConfigError) as raised:
        small_job("sgd", cache={"capacity": "10KiB", "groups": groups})
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


sizes = st.tuples(st.integers(1, 500), st.integers(1, 9), st.floats(0, 1), st.floats(0, 1))


@settings(derandomize=True, max_examples=200)
@given(st.lists(sizes, min_size=1, max_size=4), st.integers(0, 20000))
def test_no_group_falls_short_none_overflows_and_nothing_usable_is_left(
    drawn: list[tuple[int, int, float, float]], rest: int
) -> None:
    groups = groups_of(*((rows, dim) for rows, dim, _, _ in drawn))
    counts = touched(*((int(rows * a * b), int(rows * a)) for rows, _, a, b in drawn))
    least = sum(rows * spec.record_bytes for rows, spec in zip(counts.largest_batch_rows, groups, strict=True))
    slots = divide_capacity(groups, counts, capacity_bytes=least + rest)
    left = least + rest - sum(n * spec.record_bytes for n, spec in zip(slots, groups, strict=True))
    assert left >= 0
    for n, most, spec in zip(slots, counts.largest_batch_rows, groups, strict=True):
        assert most <= n <= spec.num_rows
        assert n == spec.num_rows or left < spec.record_bytes


def test_a_rank_counts_the_rows_of_its_shard() -> None:
    job = small_job("adagrad", "multi")
    groups, batches = group_specs(job), small_batches(job, "multi")
    whole = measure(groups, batches)
    of_ranks = [measure(groups, batches, Rank(number=number, count=3, parts=6)) for number in range(3)]
    for index in range(len(groups)):
        assert sum(own.distinct_rows[index] for own in of_ranks) == whole.distinct_rows[index]
        assert all(own.largest_batch_rows[index] < whole.largest_batch_rows[index] for own in of_ranks)


def test_a_batch_of_which_a_rank_owns_a_part_fits_a_cache_that_is_too_small_for_one_trainer() -> None:
    job = small_job("adagrad", "single")
    groups, batches = group_specs(job), small_batches(job, "single")
    least = sum(
        rows * group.record_bytes
        for rows, group in zip(measure(groups, batches).largest_batch_rows, groups, strict=True)
    )
    job = small_job("adagrad", "single", cache={"capacity": least - 16})
    with pytest.raises(ConfigError, match="too small"):
        slots_of(job, groups, measure(groups, batches))
    slots = slots_of(job, groups, measure(groups, batches, Rank(number=1, count=2, parts=2)))
    assert sum(n * group.record_bytes for n, group in zip(slots, groups, strict=True)) <= least - 16
