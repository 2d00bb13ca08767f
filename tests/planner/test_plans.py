"""Plans against brute force, against an exhaustive search, and replayed on slots and a store."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.job.schema import EVICTION_POLICIES
from rowcast.protocol.plan import BarrierPlan, PlannedSteps, StepPlan
from tests.support.planner_oracle import fewest_fetches, oracle_entries
from tests.support.planner_runs import (
    Run,
    assert_same,
    entries_of,
    lookups_of,
    one_group,
    random_run,
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
        used = [self.last_use[slot] for slot in group.evict_slots.tolist()]
        assert group.fill_after == max(used, default=None)
        assert group.fill_after is None or group.fill_after < plan.plan
        for i, (key, slot) in enumerate(zip(group.evict_keys.tolist(), group.evict_slots.tolist(), strict=True)):
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
