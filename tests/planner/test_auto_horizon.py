"""The automatic horizon: grown by the plans and a budget alone, and long enough to be as good as knowing everything."""

import numpy as np
import pytest

from rowcast.prefetcher.planner.planner import WHILE_FILLING, AutoHorizon, RowPlanner
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import StepPlan
from tests.support.planner_runs import feed, one_group, random_batch, schedule

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
        most = max(most, sum(known.id_bytes for known in planner.known.bundles))
        assert planner.known.id_bytes == sum(known.id_bytes for known in planner.known.bundles)
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
            known, num_plans = planner.known.num_batches, len(planner.known.bundles)
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
