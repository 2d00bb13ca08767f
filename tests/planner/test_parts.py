"""A group planned in parts, ranges of keys, and all groups in one call: the same plans."""

from collections.abc import Callable
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowcast.job.schema import EVICTION_POLICIES, Policy
from rowcast.job.tables import KEY_SHIFT
from rowcast.prefetcher.planner import group_planner, horizon
from rowcast.prefetcher.planner import planner as planner_module
from rowcast.prefetcher.planner.eviction import new_policy
from rowcast.prefetcher.planner.group_planner import GroupPlanner, num_parts, planner_bytes
from rowcast.prefetcher.planner.horizon import BatchRows, Bundle
from rowcast.prefetcher.planner.planner import AutoHorizon, Level, RowPlanner
from rowcast.protocol.batch import Batch, Scheduled
from rowcast.protocol.parts import UNDIVIDED, Rank
from rowcast.runtime.arrays import I64
from rowcast.runtime.stages import ThreadPool
from tests.support.planner_integrity import check_group, check_planner
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


NUM_ROWS = 40


def level_of(num_groups: int, num_slots: int) -> Level:
    groups = [group(g, (table(g, NUM_ROWS, 4 + g, f"f{g}"),), (g,)) for g in range(num_groups)]
    policy, pool = new_policy("lookahead", ()), ThreadPool()
    return Level([GroupPlanner(own, num_slots, policy, "cache.capacity", pool) for own in groups], trains=True)


class Rows:
    def __init__(self, keys: I64) -> None:
        self.keys, self.num_unique, self.num_lookups, self.nbytes = keys, len(keys), len(keys), keys.nbytes


@settings(derandomize=True, max_examples=count(test=60, soak=2000, quick=10))
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(0, 5))
def test_moves_of_all_groups_are_those_of_each_alone(seed: int, num_groups: int, horizon: int) -> None:
    """Some groups have no row in a step, or in none."""
    rng = np.random.default_rng(seed)
    together, alone = (level_of(num_groups, 14) for _ in range(2))
    largest = rng.choice([0, 1, 9, 11], num_groups)
    steps = [
        [np.sort(rng.choice(NUM_ROWS, rng.integers(0, most + 1), replace=False)) for most in largest] for _ in range(12)
    ]
    for step in range(len(steps) + horizon):
        if step < len(steps):
            for own, keys in zip(alone.groups, steps[step], strict=True):
                own.enter(keys, step)
            together.enter(steps[step], step)
        if (planned := step - horizon) >= 0:
            last, kind = min(step, len(steps) - 1), "train" if planned % 3 else "eval"
            rows = tuple(map(Rows, steps[planned]))
            batch = BatchRows(size=1, groups=rows, id_bytes=0)
            known = Scheduled.at(step=planned, kind=kind, train_step=0, epoch=0, batch=batch)  # type: ignore[arg-type]
            moves = together.move(Bundle.of(planned, [known]), last)
            for own, moved, keys in zip(alone.groups, moves, steps[planned], strict=True):
                for ours, theirs in zip(
                    astuple(moved), astuple(own.move(len(keys), planned, last, kind == "train")), strict=True
                ):
                    np.testing.assert_array_equal(ours, theirs)
        for ours, theirs in zip(together.groups, alone.groups, strict=True):
            assert (ours.occupancy, ours.positions, ours.guessed) == (
                theirs.occupancy,
                theirs.positions,
                theirs.guessed,
            )
            known_steps = [
                (s, steps[s][ours.group.index]) for s in range(max(0, planned + 1), min(step + 1, len(steps)))
            ]
            check_group(ours, known_steps)


@pytest.mark.parametrize("num_groups", [1, 26])
def test_the_calls_of_a_step_do_not_grow_with_the_number_of_groups(
    num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()

    def counted(name: str, work: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            calls.append(name)
            return work(*arguments)

        return call

    names = ("find_unprepared", "enter_all", "move_all")
    for name in names:
        monkeypatch.setattr(planner_module, name, counted(name, getattr(planner_module, name)))
    for method in ("enter", "move"):
        monkeypatch.setattr(GroupPlanner, method, counted("a group", getattr(GroupPlanner, method)))
    groups = tuple(group(g, (table(g, 50, 4 + g, f"f{g}"),), (g,)) for g in range(num_groups))
    planner = RowPlanner(groups, [(8,) * num_groups], depth=1, horizon=0)
    ids = np.arange(6 * num_groups) % 6
    batch = Batch(dense=np.zeros((6, 1), np.float32), labels=np.zeros(6, np.float32), ids=ids)
    for scheduled in schedule([batch] * 2, ["train"] * 2):
        calls.clear()
        planner.add(scheduled)
        planner.plan()
    assert calls == list(names)
