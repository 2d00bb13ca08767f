"""Small recordings, drawn by hypothesis, and what their policies move by brute force over sets."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from rowcast.analysis.scan.steps import Scan, scan
from rowcast.analysis.simulate.moves import Moves
from rowcast.job.tables import GroupSpec
from rowcast.protocol.batch import Batch
from tests.support.planner_runs import one_group, schedule

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
