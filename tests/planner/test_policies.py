"""What the planner does where a policy finds too few rows."""

from collections.abc import Sequence

import numpy as np
import pytest

from rowcast.prefetcher.planner.eviction import Choice, Residents, Victims, new_policy
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.runtime.arrays import I64
from tests.support.planner_integrity import check_planner
from tests.support.planner_runs import one_group, single_hot_trace


class OneTooFew:
    """Look-ahead that finds no last row."""

    per_use = 0

    def __init__(self) -> None:
        self._own = new_policy("lookahead", ())

    def first_scores(self, keys: I64) -> None:
        """None."""

    def choose(self, parts: Sequence[Residents], victims: Victims, num_victims: int) -> Choice:
        return self._own.choose(parts, victims, num_victims - 1)


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
