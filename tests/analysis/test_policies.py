"""The simulator's own policies against brute force, and the bound against everything."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rowcast.analysis.scan import NEVER, Scan, scan
from rowcast.analysis.simulate.moves import Moves, planned_moves, ttl_moves, window_moves
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.protocol.batch import Batch
from tests.support.planner_oracle import fewest_fetches
from tests.support.planner_runs import group, one_group, schedule, table

ROWS = 12


@dataclass(frozen=True)
class Case:
    """One group: what each step touches, which steps train, and the cache."""

    steps: list[set[int]]
    trains: list[bool]
    slots: int
    horizon: int

    @property
    def recording(self) -> Scan:
        return recording_of(one_group(ROWS), [self.steps], self.trains)

    def next_use(self, row: int, after: int) -> float:
        return min((step for step in range(after + 1, len(self.steps)) if row in self.steps[step]), default=np.inf)

    def last_use(self, row: int, before: int) -> int:
        return max(step for step in range(before) if row in self.steps[step])


def recording_of(groups: tuple[GroupSpec, ...], steps_of_features: list[list[set[int]]], trains: list[bool]) -> Scan:
    """Of batches with one sample, whose bag of each feature holds the feature's rows at that step."""
    batches = []
    for bags in zip(*steps_of_features, strict=True):
        ids = np.array([row for bag in bags for row in sorted(bag)], np.int64)
        offsets = np.cumsum([0, *map(len, bags)])
        batches.append(
            Batch(dense=np.zeros((1, 0), np.float32), labels=np.zeros(1, np.float32), ids=ids, offsets=offsets)
        )
    return scan(groups, schedule(batches, ["train" if train else "eval" for train in trains]), lambda: None)


@st.composite
def cases(draw: st.DrawFn, most_steps: int = 12, rows: int = ROWS) -> Case:
    steps = draw(st.lists(st.sets(st.integers(0, rows - 1), max_size=5), max_size=most_steps))
    trains = draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))
    least = max([1, *map(len, steps)])
    return Case(steps, trains, draw(st.integers(least, least + 5)), draw(st.integers(0, most_steps)))


@dataclass
class Counted:
    """A cache of sets that counts as `Moves` does."""

    fetched: list[int]
    evicted: list[int]
    written_back: list[int]
    dirty: set[int] = field(default_factory=set)
    resident: set[int] = field(default_factory=set)

    def evict(self, step: int, rows: list[int]) -> None:
        assert set(rows) <= self.resident
        self.evicted[step] += len(rows)
        self.written_back[step] += len(self.dirty & set(rows))
        self.resident -= set(rows)
        self.dirty -= set(rows)

    def fetch(self, step: int, rows: set[int]) -> None:
        self.fetched[step] += len(rows - self.resident)
        self.resident |= rows


def new_counted(num_steps: int) -> Counted:
    return Counted([0] * num_steps, [0] * num_steps, [0] * num_steps)


def ttl_by_sets(case: Case) -> Counted:
    counted = new_counted(len(case.steps))
    for step, rows in enumerate(case.steps):
        if step:
            expired = [row for row in case.steps[step - 1] if case.next_use(row, step - 1) > step - 1 + case.horizon]
            counted.evict(step, expired)
        others = sorted(
            counted.resident - rows, key=lambda row: (-case.next_use(row, step), case.last_use(row, step), row)
        )
        counted.evict(step, others[: max(0, len(counted.resident | rows) - case.slots)])
        counted.fetch(step, rows)
        counted.dirty |= rows if case.trains[step] else set()
    return counted


def window_by_sets(case: Case, seed: int) -> Counted:
    counted, random, step = new_counted(len(case.steps)), np.random.default_rng(seed), 0
    while step < len(case.steps):
        ends = range(step + 1, min(step + case.horizon + 1, len(case.steps)) + 1)
        end = max(end for end in ends if len(set().union(*case.steps[step:end])) <= case.slots)
        needed = set().union(*case.steps[step:end])
        others, too_many = sorted(counted.resident - needed), len(counted.resident | needed) - case.slots
        if too_many > 0:
            counted.evict(step, random.choice(others, too_many, replace=False, shuffle=False).tolist())
        counted.fetch(step, needed)
        for position in range(step, end):
            counted.dirty |= case.steps[position] if case.trains[position] else set()
        step = end
    return counted


def assert_moved(moves: Moves, counted: Counted) -> None:
    assert moves.fetched[:, 0].tolist() == counted.fetched
    assert moves.evicted[:, 0].tolist() == counted.evicted
    assert moves.written_back[:, 0].tolist() == counted.written_back
    assert moves.flushed.tolist() == [len(counted.dirty)]


SEED = 5
TWO_GROUPS = (group(0, (table(0, ROWS, 4, "a"),), (0,)), group(1, (table(1, ROWS, 8, "b"),), (1,)))


def tick() -> None:
    """Nobody watches."""


def planned(case: Case, horizon: int) -> Moves:
    return planned_moves(case.recording, RowPlanner(case.recording.groups, [(case.slots,)], 1, horizon), tick)


@settings(max_examples=300)
@given(cases())
@example(Case([{0}, {1}, {2}, {0}, {1}, {2}], [True] * 6, 2, 3))
def test_ttl_moves_what_sets_say(case: Case) -> None:
    assert_moved(ttl_moves(case.recording, (case.slots,), case.horizon, tick), ttl_by_sets(case))


@settings(max_examples=300)
@given(cases())
@example(Case([{0, 1}, {2, 3}, {0, 4}, {1, 5}], [True] * 4, 3, 2))
def test_windows_move_what_sets_say(case: Case) -> None:
    assert_moved(window_moves(case.recording, (case.slots,), case.horizon, SEED, tick), window_by_sets(case, SEED))


@settings(max_examples=150)
@given(cases(most_steps=6, rows=6))
def test_the_whole_future_known_fetches_as_little_as_any_choice_of_victims(case: Case) -> None:
    assert planned(case, len(case.steps)).fetched.sum() == (fewest_fetches(case.steps, case.slots) if case.steps else 0)


@given(cases())
def test_next_uses_are_those_that_a_search_finds(case: Case) -> None:
    (numbered,) = case.recording.numbered
    rows_by_number = sorted(set().union(*case.steps))
    assert numbered.num_rows == len(rows_by_number)
    for position, (rows, next_uses) in enumerate(zip(numbered.rows, numbered.next_uses, strict=True)):
        assert [rows_by_number[number] for number in rows] == sorted(case.steps[position])
        expected = [case.next_use(row, position) for row in sorted(case.steps[position])]
        assert [np.inf if use == NEVER else use for use in next_uses.tolist()] == expected


@settings(max_examples=100)
@given(cases(), cases(), st.integers(0, 5))
def test_a_window_ends_for_all_groups_together(first: Case, second: Case, horizon: int) -> None:
    """Two groups of which one has all the room it wants move what the tight one alone moves, in its windows."""
    num_steps = min(len(first.steps), len(second.steps))
    tight = Case(first.steps[:num_steps], first.trains[:num_steps], first.slots, horizon)
    wide = Case(second.steps[:num_steps], tight.trains, 100, horizon)
    both = recording_of(TWO_GROUPS, [tight.steps, wide.steps], tight.trains)
    moves = window_moves(both, (tight.slots, wide.slots), horizon, SEED, tick)
    alone = window_moves(tight.recording, (tight.slots,), horizon, SEED, tick)
    assert np.array_equal(moves.fetched[:, 0], alone.fetched[:, 0])
    assert np.array_equal(moves.written_back[:, 0], alone.written_back[:, 0])
    assert moves.fetched[:, 1].sum() == len(set().union(*wide.steps)), "each of its rows comes once"
    begins = np.flatnonzero(moves.fetched[:, 1])
    assert all(alone_begins(tight, int(step)) for step in begins), f"rows came at {begins}, inside a window"


def alone_begins(case: Case, step: int) -> bool:
    """Whether a window of the case begins at a step."""
    begin = 0
    while begin < step:
        ends = range(begin + 1, min(begin + case.horizon + 1, len(case.steps)) + 1)
        begin = max(end for end in ends if len(set().union(*case.steps[begin:end])) <= case.slots)
    return begin == step
