"""The memory tier in the plans: a second cache over the same batches, which holds every row of the device."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.prefetcher.planner.directory import MOST_ROWS
from rowcast.prefetcher.planner.planner import AutoHorizon, RowPlanner
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import GroupPlan, PlannedSteps
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.planner_integrity import check_planner
from tests.support.planner_oracle import fewest_fetches
from tests.support.planner_runs import (
    Run,
    assert_same,
    distinct_keys,
    entries_of,
    feed,
    i64,
    one_group,
    random_batch,
    random_run,
    schedule,
    single_hot_trace,
    two_groups,
    without_pooling,
)

bounded = settings(derandomize=True, max_examples=100)
AMPLE_BYTES = 2**30


def tiered_run(seed: int, spare: tuple[int, int], num_steps: int, batch_size: int, depth: int, horizon: int) -> Run:
    """A random run whose tier has `spare` slots more than the device, by group."""
    groups = without_pooling(two_groups(), 1)
    run = random_run(seed, groups, num_steps, batch_size, depth, horizon)
    return replace(run, tiers=(tuple(n + more for n, more in zip(run.slots, spare, strict=True)),))


runs = st.builds(
    tiered_run,
    seed=st.integers(0, 2**32),
    spare=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    num_steps=st.integers(0, 20),
    batch_size=st.integers(1, 4),
    depth=st.integers(1, 4),
    horizon=st.integers(0, 8),
)


def group_plans(run: Run, horizon: AutoHorizon | None = None, check: bool = False) -> list[list[GroupPlan]]:
    """The plans of each group."""
    entries = entries_of(run, check=check, horizon=horizon)
    plans = [entry.move for entry in entries if isinstance(entry, PlannedSteps)]
    return [[groups[index] for groups in plans] for index in range(len(run.groups))]


@bounded
@given(runs, st.booleans())
def test_every_row_of_the_device_is_in_the_tier_and_each_holds_no_more_rows_than_slots(run: Run, auto: bool) -> None:
    plans = group_plans(run, AutoHorizon(run.horizon, AMPLE_BYTES) if auto else None, check=True)
    for index, group in enumerate(run.groups):
        device, tier = set[int](), set[int]()
        for scheduled, plan in zip(run.trace, plans[index], strict=True):
            device = device - set(plan.evict_keys.tolist()) | set(plan.fetch_keys.tolist())
            assert set(plan.load_keys.tolist()).isdisjoint(tier)
            assert set(plan.spill_keys.tolist()) <= tier
            tier = tier - set(plan.spill_keys.tolist()) | set(plan.load_keys.tolist())
            assert set(distinct_keys(group, scheduled.batch)) <= device <= tier
            assert len(device) <= run.slots[index]
            assert len(tier) <= run.tiers[0][index]


@bounded
@given(runs)
def test_the_tier_loads_and_spills_what_a_device_with_its_slots_would_fetch_and_evict(run: Run) -> None:
    alone = replace(run, slots=run.tiers[0], tiers=())
    for both, single in zip(group_plans(run), group_plans(alone), strict=True):
        for ours, theirs in zip(both, single, strict=True):
            assert_same(ours.load_keys, theirs.fetch_keys)
            assert_same(ours.spill_keys, np.sort(theirs.evict_keys))


@bounded
@given(runs)
def test_a_tier_changes_no_plan_of_the_device(run: Run) -> None:
    none, without_keys = i64([]), []
    for entry in entries_of(run):
        if isinstance(entry, PlannedSteps):
            groups = tuple(replace(group, load_keys=none, spill_keys=none) for group in entry.move)
            entry = replace(entry, steps=(replace(entry.steps[0], groups=groups), *entry.steps[1:]))
        without_keys.append(entry)
    assert_same(without_keys, entries_of(replace(run, tiers=())))


@settings(bounded, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2), min_size=1, max_size=8), st.integers(2, 4))
def test_no_choice_of_rows_loads_less_when_the_whole_future_is_known(ids: list[list[int]], tier_slots: int) -> None:
    run = Run(
        groups=one_group(6),
        slots=(2,),
        depth=1,
        horizon=len(ids),
        trace=single_hot_trace(ids),
        barriers=frozenset(),
        tiers=((tier_slots,),),
    )
    loaded = sum(len(plan.load_keys) for plan in group_plans(run)[0])
    assert loaded == fewest_fetches([set(row) for row in ids], tier_slots)


# the automatic horizon

SKEWED = one_group(3000, 40, 6000)


def skewed_trace(num_steps: int = 150) -> list[ScheduledBatch]:
    rng = np.random.default_rng(9)
    batches = [random_batch(rng, SKEWED, 60, jagged=False, weighted=False) for _ in range(num_steps)]
    return schedule(batches, ["train"] * num_steps)


def loads_and_horizons(slots: int, tier_slots: int, horizon: int | AutoHorizon) -> tuple[int, list[int], list[int]]:
    """Rows loaded over all steps, and after each the horizon and the bytes of the known batches."""
    planner, left = RowPlanner(SKEWED, [(slots,), (tier_slots,)], 2, horizon), skewed_trace()
    loaded, horizons, known_bytes = 0, list[int](), list[int]()
    feed(planner, left, True)
    while planner.ready():
        known_bytes.append(planner.known.id_bytes)
        loaded += len(planner.plan().move[0].load_keys)
        horizons.append(planner.horizon)
        feed(planner, left, True)
    return loaded, horizons, known_bytes


@pytest.mark.parametrize("tier_slots", [1000, 2500])
def test_the_horizon_grows_until_the_tier_has_nothing_to_guess_either(tier_slots: int) -> None:
    bound, *_ = loads_and_horizons(200, tier_slots, len(skewed_trace()))
    ours, horizons, _ = loads_and_horizons(200, tier_slots, AutoHorizon(2, AMPLE_BYTES))
    _, of_device, _ = loads_and_horizons(200, 200, AutoHorizon(2, AMPLE_BYTES))
    as_the_device_needs, *_ = loads_and_horizons(200, tier_slots, max(of_device))
    assert bound <= ours <= 1.02 * bound
    assert as_the_device_needs > 1.03 * bound, "the device's horizon is enough for the tier"
    assert max(horizons) > max(of_device)


def test_the_known_batches_of_both_levels_stay_within_the_budget() -> None:
    budget = 300_000
    _, _, known_bytes = loads_and_horizons(200, 2500, AutoHorizon(2, budget))
    assert budget / 2 < max(known_bytes) < 1.1 * budget


def test_a_tier_counts_each_known_row_a_second_time() -> None:
    alone, both = (RowPlanner(one_group(100), [(5,)] * num_levels, 1, 0) for num_levels in (1, 2))
    (batch,) = single_hot_trace([[1, 2, 3]])
    for planner in (alone, both):
        planner.add(batch)
    assert both.known.id_bytes == alone.known.id_bytes + 3 * 36


# what it takes, refuses and checks


def test_a_batch_beyond_the_tier_is_refused_with_the_memory_to_raise_and_changes_nothing() -> None:
    planner = RowPlanner(one_group(100), [(2,), (2,)], 1, 0)
    (batch,) = single_hot_trace([[1, 2, 3]])
    planner.add(batch)
    with pytest.raises(ConfigError) as raised:
        planner.plan()
    assert str(raised.value) == (
        "step 0 touches 3 distinct rows of group fp32_d4_sgd, more than its 2 slots; raise cache.capacity to at least "
        "3 rows (48 bytes) and store.memory, which has room for 2 rows of the group, or make data.batch_size smaller"
    )
    assert [group.occupancy.num_resident for level in planner.levels for group in level.groups] == [0, 0]


def test_a_batch_beyond_what_the_tier_can_keep_track_of_is_refused_and_changes_nothing() -> None:
    planner = RowPlanner(one_group(100), [(5,), (50,)], 1, 0)
    (tier,) = planner.levels[1].groups
    first, second = single_hot_trace([[0, 1], [2, 3, 4]])
    planner.add(first)
    planner.plan()
    tier.parts[0].directory.num_tracked[0] = MOST_ROWS - 2
    with pytest.raises(ConfigError, match=facts("store.memory", "lookahead.horizon", MOST_ROWS)):
        planner.add(second)
    tier.parts[0].directory.num_tracked[0] = 2
    check_planner(planner)
    planner.add(second)
    assert planner.plan().move[0].load_keys.tolist() == [2, 3, 4]


def test_a_batch_beyond_the_device_alone_is_refused_without_a_word_on_memory() -> None:
    planner = RowPlanner(two_groups(), [(1, 1), (18, 9)], 1, 0)
    batch = random_batch(np.random.default_rng(0), two_groups(), size=4, jagged=False, weighted=False)
    planner.add(schedule([batch], ["train"])[0])
    with pytest.raises(ConfigError, match=facts("cache.capacity", 48)) as raised:
        planner.plan()
    assert "store.memory" not in str(raised.value)
