"""Plans against brute force, against an exhaustive search, and replayed on slots and a store.

The automatic horizon is grown by the plans and a budget alone, and long enough to be as good as knowing everything.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.schema import EVICTION_POLICIES
from rowcast.prefetcher.planner.horizon import joined
from rowcast.prefetcher.planner.planner import WHILE_FILLING, AutoHorizon, RowPlanner
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import BarrierPlan, PlannedSteps, StepPlan
from tests.support.planner_oracle import fewest_fetches, oracle_entries
from tests.support.planner_runs import (
    Run,
    assert_same,
    entries_of,
    feed,
    lookups_of,
    one_group,
    random_batch,
    random_run,
    schedule,
    single_hot_trace,
    two_groups,
    without_pooling,
)

bounded = settings(derandomize=True, max_examples=200)
runs = st.builds(
    random_run,
    seed=st.integers(0, 2**32),
    groups=st.sampled_from([two_groups(), without_pooling(two_groups(), 0, 3), without_pooling(two_groups(), 1, 2, 3)]),
    num_steps=st.integers(0, 14),
    batch_size=st.integers(1, 4),
    depth=st.integers(1, 4),
    horizon=st.integers(0, 8),
    policy=st.sampled_from(list(EVICTION_POLICIES)),
)


@bounded
@given(runs)
def test_plans_and_barriers_equal_brute_force_field_by_field(run: Run) -> None:
    assert_same(entries_of(run, check=True), oracle_entries(run))


def test_plans_equal_brute_force_when_directory_and_ring_grow() -> None:
    run = random_run(seed=5, groups=one_group(40, 3000, 9000), num_steps=12, batch_size=900, depth=2, horizon=3)
    assert_same(entries_of(run, check=True), oracle_entries(run))


@settings(bounded, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=8), st.integers(3, 4))
def test_no_choice_of_victims_fetches_less_when_the_whole_future_is_known(ids: list[list[int]], num_slots: int) -> None:
    trace = single_hot_trace(ids)
    run = Run(groups=one_group(6), slots=(num_slots,), depth=1, horizon=len(trace), trace=trace, barriers=frozenset())
    plans = [entry for entry in entries_of(run) if isinstance(entry, PlannedSteps)]
    assert sum(len(plan.move[0].fetch_keys) for plan in plans) == fewest_fetches([set(row) for row in ids], num_slots)


class Replay:
    """One group's slots and store, moved only as plans say, no sooner than they must be: versions stand for values."""

    def __init__(self, num_slots: int, depth: int) -> None:
        self.depth = depth
        self.slots: list[tuple[int, int] | None] = [None] * num_slots  # key, version
        self.newest: dict[int, int] = {}
        self.store: dict[int, int] = {}
        self.on_the_way: list[tuple[int, int, int]] = []  # plan that evicted it, key, version
        self.last_use: dict[int, int] = {}  # slot -> plan

    def apply_until(self, step: int) -> None:
        for evicted_by, key, version in self.on_the_way:
            if evicted_by <= step:
                self.store[key] = version
        self.on_the_way = [entry for entry in self.on_the_way if entry[0] > step]

    def move(self, plan: PlannedSteps, index: int) -> None:
        group = plan.move[index]
        self.apply_until(max(plan.plan - self.depth - 1, -1 if plan.after_plan is None else plan.after_plan))
        evict_slots = group.fetch_slots[: len(group.evict_keys)].tolist()
        used = [self.last_use[slot] for slot in evict_slots]
        assert group.fill_after == max(used, default=None)
        assert group.fill_after is None or group.fill_after < plan.plan
        for i, (key, slot) in enumerate(zip(group.evict_keys.tolist(), evict_slots, strict=True)):
            held = self.slots[slot]
            assert held is not None
            assert held[0] == key
            assert i < group.num_dirty or held[1] == self.store.get(key, 0), "a clean victim is not what the store has"
            if i < group.num_dirty:
                self.on_the_way.append((plan.plan, key, held[1]))
            self.slots[slot] = None
        for key, slot in zip(group.fetch_keys.tolist(), group.fetch_slots.tolist(), strict=True):
            assert self.slots[slot] is None, "a fill would overwrite a row that stays"
            assert self.store.get(key, 0) == self.newest.get(key, 0), "a fetch would read a stale row"
            self.slots[slot] = (key, self.store.get(key, 0))

    def look_up(self, plan: int, step: StepPlan, keys: list[int], index: int) -> None:
        looked_up = step.groups[index].slots
        assert looked_up is not None
        slots = looked_up.tolist()
        held = [self.slots[slot] for slot in slots]
        assert [row and row[0] for row in held] == keys
        for slot in set(slots):
            row = self.slots[slot]
            assert row is not None
            self.last_use[slot] = plan
            if step.kind == "train":
                self.slots[slot] = (row[0], row[1] + 1)
                self.newest[row[0]] = row[1] + 1

    def flush(self, barrier: BarrierPlan, index: int) -> None:
        """Every row is in the store once the barrier is done."""
        self.apply_until(2**62)
        move = barrier.dirty[index]
        for key, slot in zip(move.keys.tolist(), move.slots.tolist(), strict=True):
            row = self.slots[slot]
            assert row is not None
            assert row[0] == key
            self.store[key] = row[1]
        assert self.store == self.newest


@bounded
@given(runs)
def test_replayed_plans_read_no_stale_row_and_overwrite_no_row_in_use(run: Run) -> None:
    replays = [Replay(num_slots, run.depth) for num_slots in run.slots]
    batches = {scheduled.step: scheduled.batch for scheduled in run.trace}
    for entry in entries_of(run):
        for index, (replay, group) in enumerate(zip(replays, run.groups, strict=True)):
            if isinstance(entry, BarrierPlan):
                replay.flush(entry, index)
            else:
                replay.move(entry, index)
                for step in entry.steps:
                    keys = [key for key, _, _ in lookups_of(group, batches[step.step])]
                    replay.look_up(entry.plan, step, keys, index)


@settings(bounded, max_examples=40)
@given(runs)
def test_plans_do_not_depend_on_when_batches_are_added(run: Run) -> None:
    assert_same(entries_of(run, eager=True), entries_of(run, eager=False))


@settings(bounded, max_examples=60)
@given(runs)
def test_moves_are_those_of_the_plans_and_groupings_can_be_shared(run: Run) -> None:
    planners, left = [run.planner() for _ in range(2)], list(run.trace)
    while any(planner.wants_batch and left for planner in planners):
        scheduled = left.pop(0)
        groupings = planners[0].group(scheduled.batch)
        for planner in planners:
            planner.add(scheduled, groupings)
        if not left:
            for planner in planners:
                planner.end()
        while planners[0].ready():
            plan = planners[0].plan()
            moves = planners[1].move()
            assert moves.after_plan == plan.after_plan
            for planned, moved in zip(plan.move, moves.levels[0], strict=True):
                for name in ("unique_slots", "fetch_slots", "fetch_keys", "evict_keys", "num_dirty", "fill_after"):
                    assert_same(getattr(moved, name), getattr(planned, name), name)
    assert planners[0].counters == planners[1].counters


@settings(bounded, max_examples=30)
@given(runs, st.integers(2, 5))
def test_plans_are_the_same_for_any_number_of_threads(run: Run, num_threads: int) -> None:
    assert_same(entries_of(run), entries_of(replace(run, num_threads=num_threads)))


@given(st.lists(st.sets(st.integers(0, 20)).map(sorted), min_size=1, max_size=8))
def test_rows_of_a_bundle_are_those_of_its_steps_with_their_places(rows: list[list[int]]) -> None:
    of_steps = [np.array(own, np.int64) for own in rows]
    keys, places = joined(of_steps)
    assert keys.tolist() == sorted(set().union(*rows))
    assert [keys[own].tolist() for own in places] == rows


GROUPS = one_group(3000, 40, 6000)
AMPLE_BYTES = 2**30


def skewed_trace(num_steps: int = 150) -> list[ScheduledBatch]:
    rng = np.random.default_rng(9)
    return schedule(
        [random_batch(rng, GROUPS, 60, jagged=False, weighted=False) for _ in range(num_steps)], ["train"] * num_steps
    )


def plans_of(
    trace: list[ScheduledBatch], slots: int, horizon: int | AutoHorizon, eager: bool = True
) -> tuple[list[StepPlan], list[int]]:
    """Plans, and the horizon after each."""
    planner, left = RowPlanner(GROUPS, [(slots,)], 2, horizon), list(trace)
    plans, horizons = list[StepPlan](), list[int]()
    feed(planner, left, eager)
    while planner.ready():
        plans.extend(planner.plan().steps)
        horizons.append(planner.horizon)
        feed(planner, left, eager)
    return plans, horizons


def rows_fetched(plans: list[StepPlan]) -> int:
    return sum(len(plan.groups[0].fetch_keys) for plan in plans)


@pytest.mark.parametrize("slots", [200, 400, 1000, 2500])
def test_it_fetches_hardly_more_than_a_planner_that_knows_everything(slots: int) -> None:
    trace = skewed_trace()
    bound = rows_fetched(plans_of(trace, slots, len(trace))[0])
    blind = rows_fetched(plans_of(trace, slots, 2)[0])
    ours = rows_fetched(plans_of(trace, slots, AutoHorizon(2, AMPLE_BYTES))[0])
    assert bound <= ours <= 1.02 * bound
    assert blind > 1.03 * bound, "looking ahead makes no difference here"


def test_it_stops_growing_where_more_would_change_nothing() -> None:
    _, horizons = plans_of(skewed_trace(), 200, AutoHorizon(2, AMPLE_BYTES))
    assert max(horizons) < 30


def test_it_grows_while_slots_are_free_and_not_at_all_where_every_row_has_one() -> None:
    _, horizons = plans_of(skewed_trace(12), 2500, AutoHorizon(2, AMPLE_BYTES))
    assert horizons[:3] == [2 + WHILE_FILLING * (i + 1) for i in range(3)]
    _, horizons = plans_of(
        skewed_trace(12), sum(table.num_embeddings for table in GROUPS[0].tables), AutoHorizon(2, AMPLE_BYTES)
    )
    assert set(horizons) == {2}


def test_the_known_batches_stay_within_the_budget() -> None:
    trace, budget = skewed_trace(), 100_000
    planner, left = RowPlanner(GROUPS, [(2500,)], 2, AutoHorizon(2, budget)), list(trace)
    most = 0
    feed(planner, left, True)
    while planner.ready():
        most = max(most, sum(known.id_bytes for known in planner.known._known))
        assert planner.known.id_bytes == sum(known.id_bytes for known in planner.known._known)
        planner.plan()
        feed(planner, left, True)
    assert budget / 2 < most < 1.1 * budget, "batches differ in size, so the mean decides"


@pytest.mark.parametrize("horizon", [4, 32])
def test_a_horizon_counts_batches_and_as_many_plans_as_are_in_flight(horizon: int) -> None:
    """Plans of up to 8 steps; the slots allow 2 or 3 of them, and the depth asks for 3 plans."""

    def noted(eager: bool) -> list[tuple[int, int, int]]:
        """Of each plan: its steps, and the batches and plans that it knows beyond them."""
        planner, left = RowPlanner(GROUPS, [(1500,)], 3, horizon, bundle=8), list(skewed_trace())
        notes = []
        feed(planner, left, eager)
        while planner.ready() and left:
            assert planner.num_known <= planner.horizon + 1
            known, num_plans = planner.known.num_batches, len(planner.known._known)
            num_steps = len(planner.plan().steps)
            notes.append((num_steps, known - num_steps, num_plans - 1))
            feed(planner, left, eager)
        return notes

    notes = noted(eager=True)
    assert notes == noted(eager=False)[: len(notes)]
    steps, batches, plans = (set(own) for own in zip(*notes, strict=True))
    assert len(notes) > 10
    assert max(steps) == 3
    if horizon == 32:
        assert 32 <= min(batches) <= max(batches) < 32 + 3, "as many as it asks for, and the rest of a plan"
        assert min(plans) > 3
    else:
        assert min(batches) > 4
        assert plans == {3}, "no more than are in flight"


def test_an_automatic_horizon_keeps_its_budget_although_plans_are_short() -> None:
    trace, budget = skewed_trace(), 200_000
    planner, left = RowPlanner(GROUPS, [(1000,)], 2, AutoHorizon(2, budget), bundle=8), list(trace)
    most, known = 0, 0
    feed(planner, left, True)
    while planner.ready() and left:
        most, known = max(most, planner.known.id_bytes), max(known, planner.num_known)
        assert planner.num_known <= planner.horizon + 1
        planner.plan()
        feed(planner, left, True)
    assert budget / 2 < most < 1.2 * budget, "the batches of the next plan come on top"
    assert planner.known.num_ahead <= known <= planner.known.num_ahead + 4
