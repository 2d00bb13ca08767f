"""What the planner makes of any eviction policy's choice, and what it does where a policy finds too few rows."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowcast.job.schema import EVICTION_POLICIES, PolicyKind
from rowcast.prefetcher.planner.eviction import Choice, EvictionPolicy, LeastScore, Residents, Victims, new_policy
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.runtime.arrays import I32, I64
from tests.support.planner_integrity import check_planner
from tests.support.planner_oracle import oracle_entries
from tests.support.planner_runs import assert_same, entries_of, one_group, random_run, single_hot_trace


class NearestNextUse(LeastScore):
    """The worst that there is: its victims stand anywhere in the queues."""

    def ranks(self, scores: I64, next_uses: I32) -> I64:
        return next_uses.astype(np.int64)


class OneTooFew:
    """Look-ahead that finds no last row."""

    per_use = 0

    def __init__(self) -> None:
        self._own = new_policy("lookahead", ())

    def first_scores(self, keys: I64) -> None:
        """None."""

    def choose(self, parts: Sequence[Residents], victims: Victims, num_victims: int) -> Choice:
        return self._own.choose(parts, victims, num_victims - 1)


@pytest.fixture
def nearest(monkeypatch: pytest.MonkeyPatch) -> str:
    def made(name: str, first_batches: Iterable[I64]) -> EvictionPolicy:
        return NearestNextUse()

    monkeypatch.setitem(EVICTION_POLICIES, "nearest", PolicyKind(__name__, looks_ahead=True))
    monkeypatch.setattr("rowcast.prefetcher.planner.planner.new_policy", made)
    return "nearest"


@settings(derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans())
def test_victims_from_anywhere_in_the_queues_leave_plans_that_equal_brute_force(
    nearest: str, seed: int, horizon: int, pins: bool
) -> None:
    run = random_run(
        seed, one_group(12), num_steps=14, batch_size=4, depth=1, horizon=horizon, policy=nearest, pins=pins
    )
    assert_same(entries_of(run, check=True), oracle_entries(run))


@pytest.mark.parametrize("horizon", [0, 2])
def test_a_policy_that_finds_too_few_rows_ends_the_plan_with_nothing_changed(
    horizon: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = single_hot_trace([[0, 1, 2], [3, 4], [0, 5], [1, 3]])
    planner = RowPlanner(one_group(6), [(4,)], 1, horizon)
    (group,) = planner.levels[0].groups
    monkeypatch.setattr(group, "_policy", OneTooFew())
    for scheduled in trace[: 2 + horizon]:
        if not planner.wants_batch:
            planner.plan()
        planner.add(scheduled)
    occupancy, before = group.occupancy, group.occurrences.rows.copy()
    with pytest.raises(AssertionError, match=r"0 rows can leave, but 1 must"):
        planner.plan()
    assert group.occupancy == occupancy
    assert np.array_equal(group.occurrences.rows, before)
    check_planner(planner)
