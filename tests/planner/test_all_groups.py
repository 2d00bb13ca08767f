"""All groups of a step in one compiled call: the same moves as group by group."""

from collections.abc import Callable
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.prefetcher.planner import planner as planner_module
from rowcast.prefetcher.planner.eviction import new_policy
from rowcast.prefetcher.planner.group_planner import GroupPlanner
from rowcast.prefetcher.planner.horizon import BatchRows, Bundle
from rowcast.prefetcher.planner.planner import Level, RowPlanner
from rowcast.protocol.batch import Batch, Scheduled
from rowcast.runtime.arrays import I64
from rowcast.runtime.stages import ThreadPool
from tests.support.planner_integrity import check_group
from tests.support.planner_runs import group, schedule, table
from tests.support.repeats import count

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
