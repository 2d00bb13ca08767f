"""A group planned in parts, ranges of keys: the same plans for any number of them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowcast.job.schema import EVICTION_POLICIES, Policy
from rowcast.job.tables import KEY_SHIFT
from rowcast.prefetcher.planner import group_planner, horizon
from rowcast.prefetcher.planner.group_planner import num_parts, planner_bytes
from rowcast.prefetcher.planner.planner import AutoHorizon, RowPlanner
from rowcast.protocol.batch import Batch
from rowcast.protocol.parts import UNDIVIDED, Rank
from tests.support.planner_integrity import check_planner
from tests.support.planner_runs import (
    Run,
    assert_same,
    entries_of,
    group,
    one_group,
    random_run,
    schedule,
    single_hot_trace,
    table,
    two_groups,
    without_pooling,
)
from tests.support.repeats import count

bounded = settings(derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
LARGE = (
    group(0, (table(0, 40, 4, "a"), table(2, 3000, 4, "b"), table(3, 9000, 4, "c")), (0, 2, 3)),
    group(1, (table(1, 5000, 8, "d"),), (1,)),
)
AMPLE_BYTES = 2**30


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group has as many parts as threads, down to a single row each."""
    monkeypatch.setattr(group_planner, "ROWS_A_PART", 1)


def run_of(
    seed: int,
    large: bool,
    policy: Policy,
    horizon: int,
    tiered: bool,
    rank: Rank,
) -> Run:
    """Slots from just enough to several times as many: rows stay idle, or leave from the queues."""
    rng = np.random.default_rng(seed)
    if large:
        run = random_run(seed, LARGE, 24, int(rng.choice([3, 60, 400])), 2, horizon, policy)
    else:
        groups = without_pooling(two_groups(), 0, 3) if rng.random() < 0.3 else two_groups()
        run = random_run(seed, groups, 14, 4, 1, horizon, policy)
    slots = tuple(int(n * rng.choice([1, 1, 1.3, 4])) for n in run.slots)
    tiers = (tuple(int(n * rng.choice([1, 1.5, 3])) for n in slots),) if tiered and policy == "lookahead" else ()
    return replace(run, slots=slots, tiers=tiers, rank=rank)


runs = st.builds(
    run_of,
    seed=st.integers(0, 2**32),
    large=st.booleans(),
    policy=st.sampled_from(["lookahead", "lookahead", *EVICTION_POLICIES]),
    horizon=st.integers(0, 8),
    tiered=st.booleans(),
    rank=st.sampled_from([UNDIVIDED, UNDIVIDED, Rank(number=1, count=2, parts=4)]),
)


@settings(bounded, max_examples=count(test=40, soak=2000, quick=10))
@given(runs, st.sampled_from([2, 3, 8]), st.booleans())
def test_plans_and_barriers_are_the_same_for_any_number_of_parts(run: Run, num_threads: int, auto: bool) -> None:
    one, several = (
        entries_of(
            replace(run, num_threads=threads),
            check=threads > 1 and len(run.groups[0].tables) == 2,
            horizon=AutoHorizon(run.horizon, AMPLE_BYTES) if auto and run.policy == "lookahead" else None,
        )
        for threads in (1, num_threads)
    )
    assert_same(several, one)


@pytest.mark.parametrize("policy", ["lookahead", "lfu"])
def test_parts_grow_and_close_gaps_and_stay_the_same(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, closed = np.random.default_rng(2), list[int]()
    ids = (6000 * rng.random((160, 800)) ** 3).astype(np.int64)  # rows in frequent use leave gaps in the line
    trace = single_hot_trace(ids.tolist())
    run = Run(
        groups=one_group(6000),
        slots=(5000,),
        depth=1,
        horizon=3,
        trace=trace,
        barriers=frozenset(range(5, 160, 20)),
        policy=policy,
    )
    monkeypatch.setattr(group_planner, "close_gaps", noting(closed, horizon.close_gaps))
    one = entries_of(run)
    with_one_part, planners, new_planner = len(closed), list[RowPlanner](), Run.planner

    def noted(run: Run, horizon: AutoHorizon | None = None) -> RowPlanner:
        planners.append(new_planner(run, horizon))
        return planners[-1]

    monkeypatch.setattr(Run, "planner", noted)
    assert_same(entries_of(replace(run, num_threads=3)), one)
    check_planner(planners[0])
    (planned,) = planners[0].levels[0].groups
    assert len(closed) == 2 * with_one_part > 0
    assert len(planned.parts) == 3
    assert len({len(part.directory.cells) for part in planned.parts}) > 1, "each grows as it fills"
    most_known = 4 * 800
    assert planned.nbytes <= planner_bytes(5000, most_known, 3, scored=policy == "lfu")


def test_the_rows_used_longest_ago_leave_first_whatever_part_they_are_in() -> None:
    first, second = [0, 1, 2, 3], [10, 11, 12, 13]
    trace = single_hot_trace([first + second, first, [20], [20], [20, 21, 22], first + second])
    run = Run(
        groups=one_group(30), slots=(9,), depth=1, horizon=8, trace=trace, barriers=frozenset(), policy="lookahead"
    )
    assert_same(entries_of(replace(run, num_threads=2)), entries_of(run))


def noting(calls: list[int], work: Callable[..., int]) -> Callable[..., int]:
    def noted(*arguments: object) -> int:
        calls.append(1)
        return work(*arguments)

    return noted


def test_parts_are_cut_at_rows_of_the_first_batch_also_inside_a_table() -> None:
    planner = RowPlanner(one_group(100, 100), [(20,)], 1, 0, num_threads=4)
    (planned,) = planner.levels[0].groups
    ids = np.array([0, 1, 2, 3, 4, 5, 6, 7, 50, 51, 52, 53])  # six samples of two tables
    batch = Batch(dense=np.zeros((6, 1), np.float32), labels=np.zeros(6, np.float32), ids=ids)
    planner.add(schedule([batch], ["train"])[0])
    assert planned.bounds.tolist() == [0, 3, 2**KEY_SHIFT + 6, 2**KEY_SHIFT + 51, 2**63 - 1]
    assert [int(part.directory.num_tracked[0]) for part in planned.parts] == [3, 3, 3, 3]


def test_small_batches_are_planned_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [num_parts(rows, 8) for rows in (0, 15_000, 33_000, 210_000)] == [1, 1, 2, 8]
