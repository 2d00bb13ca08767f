"""The planner's life: filling the horizon, refusing, barriers, counting, checking itself."""

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest

from rowcast.job.schema import Policy
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.eviction import Choice, Residents, Victims, new_policy
from rowcast.prefetcher.planner.group_planner import planner_bytes
from rowcast.prefetcher.planner.planner import PlanCounters, RowPlanner
from rowcast.protocol.batch import Batch
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError
from tests.support.facts import facts
from tests.support.planner_integrity import check_planner
from tests.support.planner_runs import (
    distinct_keys,
    i64,
    one_group,
    random_batch,
    random_run,
    schedule,
    single_hot_trace,
    two_groups,
)


def planner_over(ids: list[list[int]], num_slots: int, horizon: int = 0, depth: int = 1) -> RowPlanner:
    """One feature's training batches, added and ended as far as the horizon takes them."""
    trace = single_hot_trace(ids)
    planner = RowPlanner(one_group(100), [(num_slots,)], depth, horizon)
    for scheduled in trace[: horizon + 1]:
        planner.add(scheduled)
    if len(trace) <= horizon + 1:
        planner.end()
    return planner


def state_of(planner: RowPlanner) -> list[bytes]:
    """Every array behind a planner."""
    found = []
    for group in planner.levels[0].groups:
        for part in group.parts:
            found += [array.tobytes() for array in (*part.directory, *part.occurrences)]
        found.append(repr(group.positions).encode())
    return [*found, repr((planner.counters, planner.occupancy, planner.wants_batch)).encode()]


def test_a_plan_waits_until_its_horizon_is_complete() -> None:
    trace = single_hot_trace([[0], [1], [2], [3]])
    planner = RowPlanner(one_group(4), [(4,)], 1, 2)
    wanted = []
    for scheduled in trace[:3]:
        wanted.append((planner.wants_batch, planner.ready()))
        planner.add(scheduled)
    assert wanted == [(3, False), (2, False), (1, False)]
    assert planner.ready()
    planner.plan()
    assert (planner.wants_batch, planner.ready()) == (1, False)


def test_no_batch_enters_beyond_the_horizon_out_of_order_or_after_the_end() -> None:
    trace = single_hot_trace([[0], [1], [2]])
    planner = RowPlanner(one_group(4), [(4,)], 1, 1)
    planner.add(trace[0])
    with pytest.raises(AssertionError, match="step 2 was added, but step 1 follows"):
        planner.add(trace[2])
    planner.add(trace[1])
    with pytest.raises(AssertionError, match="the 2 known batches are enough"):
        planner.add(trace[2])
    planner.end()
    with pytest.raises(AssertionError, match="after the end"):
        planner.add(trace[2])


def test_a_batch_with_more_rows_than_slots_is_refused_and_changes_nothing() -> None:
    planner = planner_over([[0, 1], [4, 2, 3, 4]], num_slots=2, horizon=1)
    planner.plan()
    before = state_of(planner)
    for _ in range(2):
        with pytest.raises(ConfigError, match=facts("step 1", "3 distinct rows", "fp32_d4_sgd", "2 slots")) as refusal:
            planner.plan()
    assert "3 rows (48 bytes)" in str(refusal.value)
    assert state_of(planner) == before
    assert planner.barrier("stop", finished=False).dirty[0].keys.tolist() == [0, 1]
    check_planner(planner)


def test_a_refusal_by_the_second_group_leaves_the_first_unchanged() -> None:
    groups = two_groups()
    batch = random_batch(np.random.default_rng(0), groups, size=4, jagged=False, weighted=False)
    needed = [len(distinct_keys(group, batch)) for group in groups]
    planner = RowPlanner(groups, [(needed[0], needed[1] - 1)], 1, 0)
    planner.add(schedule([batch], ["train"])[0])
    before = state_of(planner)
    with pytest.raises(ConfigError, match=rf"step 0 .*{needed[1]} .*fp32_d8_sgd") as refusal:
        planner.plan()
    total = needed[0] * 16 + (needed[1] - 1) * 32
    assert f"raise cache.capacity from {total} to about {-(-total * needed[1] // (needed[1] - 1))} bytes" in str(
        refusal.value
    )
    assert state_of(planner) == before


def test_a_barrier_takes_no_memory_but_the_rows_that_it_lists() -> None:
    num_rows = 200_000
    planner = RowPlanner(one_group(num_rows), [(num_rows,)], 1, 0)
    planner.barrier("compiles the loops", finished=False)
    planner.add(single_hot_trace([list(range(num_rows))])[0])
    planner.plan()
    tracemalloc.start()
    try:
        barrier = planner.barrier("checkpoint", finished=False)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(barrier.dirty[0]) == num_rows
    assert most < 12 * num_rows + 2**20, "keys and slots, and what sorting some of them takes"


def test_counters_add_up_and_slots_are_free_dirty_or_clean() -> None:
    planner = RowPlanner(one_group(100), [(3,)], 1, 0)
    for scheduled in single_hot_trace([[7, 7, 5], [5, 6], [1, 1]]):
        planner.add(scheduled)
        planner.plan()
    assert planner.counters == PlanCounters(
        lookups=7, unique_rows=5, hits=1, rows_fetched=4, rows_evicted=1, rows_written_back=1, rows_flushed=0
    )
    occupancy = planner.occupancy[0]
    assert (occupancy.num_slots, occupancy.num_resident, occupancy.num_dirty, occupancy.num_free) == (3, 3, 3, 0)
    planner.barrier("end", finished=True)
    assert planner.counters.rows_flushed == 3


def test_a_batch_without_look_ups_is_planned() -> None:
    empty = Batch(
        dense=np.zeros((2, 1), np.float32), labels=np.zeros(2, np.float32), ids=i64([]), offsets=i64([0, 0, 0])
    )
    planner = RowPlanner(one_group(3), [(0,)], 1, 0)
    planner.add(schedule([empty], ["train"])[0])
    plan = planner.plan().move[0]
    assert (plan.num_lookups, len(plan.unique_slots), plan.segment_offsets.tolist()) == (0, 0, [0])
    assert plan.offsets is not None
    assert plan.offsets.tolist() == [0, 0, 0]


def test_the_memory_follows_slots_and_horizon_not_the_rows_seen() -> None:
    groups: tuple[GroupSpec, ...] = one_group(10**9)
    run = random_run(seed=1, groups=groups, num_steps=300, batch_size=40, depth=1, horizon=2)
    planner = run.planner()
    for scheduled in run.trace:
        planner.add(scheduled)
        if planner.ready():
            planner.plan()
    seen = {key for scheduled in run.trace for key in distinct_keys(groups[0], scheduled.batch)}
    assert len(seen) > 4 * 1024
    (group,) = planner.levels[0].groups
    assert (len(group.parts[0].directory.cells), len(group.occurrences.rows)) == (2048, 1024)
    check_planner(planner)


@pytest.mark.parametrize("policy", ["lookahead", "lfu"])
@pytest.mark.parametrize("num_slots", [16_000, 17_000, 23_000])
def test_a_planner_holds_what_is_said_of_it_and_at_most_100_bytes_a_slot(num_slots: int, policy: Policy) -> None:
    planner = RowPlanner(one_group(200_000), [(num_slots,)], 1, 3, policy=policy)
    (group,) = planner.levels[0].groups
    rng, most_known = np.random.default_rng(2), 0
    ids = (200_000 * rng.random((600, 800)) ** 5).astype(np.int64)  # rows in frequent use leave gaps in the line
    for scheduled in single_hot_trace(ids.tolist()):
        planner.add(scheduled)
        _, head, tail = group.positions
        most_known = max(most_known, tail - head)
        if planner.ready():
            planner.plan()
    assert planner.occupancy[0].num_free == 0
    said = planner_bytes(num_slots, most_known, 1, scored=policy == "lfu")
    assert 0.8 * said <= group.nbytes <= 1.01 * said
    assert group.nbytes <= 100 * num_slots


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
