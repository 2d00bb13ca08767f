"""The bound against every choice of victims."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rowcast.analysis.scan import Scan, scan
from rowcast.analysis.simulate.moves import Moves, planned_moves
from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.protocol.batch import Batch
from tests.support.planner_oracle import fewest_fetches
from tests.support.planner_runs import one_group, schedule

ROWS = 12


@dataclass(frozen=True)
class Case:
    """One group: what each step touches, which steps train, and the cache."""

    steps: list[set[int]]
    trains: list[bool]
    slots: int

    @property
    def recording(self) -> Scan:
        return recording_of(one_group(ROWS), [self.steps], self.trains)


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
    return Case(steps, trains, draw(st.integers(least, least + 5)))


def tick() -> None:
    """Nobody watches."""


def planned(case: Case, horizon: int) -> Moves:
    return planned_moves(case.recording, RowPlanner(case.recording.groups, [(case.slots,)], 1, horizon), tick)


@settings(max_examples=150)
@given(cases(most_steps=6, rows=6))
def test_the_whole_future_known_fetches_as_little_as_any_choice_of_victims(case: Case) -> None:
    assert planned(case, len(case.steps)).fetched.sum() == (fewest_fetches(case.steps, case.slots) if case.steps else 0)
