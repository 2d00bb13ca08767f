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


def test_a_fixed_horizon_knows_its_batches_although_plans_are_short() -> None:
    """Plans of up to 8 steps, 4 of them known ahead: 32 batches, also where the slots allow 2 steps a plan."""

    def noted(eager: bool) -> list[tuple[int, int]]:
        planner, left = RowPlanner(GROUPS, [(400,)], 2, 4, bundle=8), list(skewed_trace())
        notes = []
        feed(planner, left, eager)
        while planner.ready():
            known, at_end = planner.known.num_batches, not left
            num_steps = len(planner.plan().steps)
            if not at_end:
                notes.append((num_steps, known - num_steps))
            feed(planner, left, eager)
        return notes

    notes = noted(eager=True)
    assert notes == noted(eager=False)[: len(notes)]
    assert max(num_steps for num_steps, _ in notes) < 4
    grown = [beyond for _, beyond in notes[32:]]
    assert len(grown) > 10
    assert 32 <= min(grown) <= max(grown) < 32 + 4
    assert set(plans_of(skewed_trace(), 400, 4)[1]) == {4}, "plans of one step need no more, also at the end"
