"""The simulator's own policies against brute force, and the bound against everything."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rowcast.analysis.scan.steps import NEVER
from rowcast.analysis.simulate.moves import Moves, planned_moves, ttl_moves, window_moves
from rowcast.prefetcher.planner.planner import RowPlanner
from tests.analysis.recordings import ROWS, Case, assert_moved, cases, recording_of, ttl_by_sets, window_by_sets
from tests.support.planner_oracle import fewest_fetches
from tests.support.planner_runs import group, table

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


@settings(max_examples=200)
@given(cases())
def test_no_policy_fetches_less_than_the_bound(case: Case) -> None:
    bound = planned(case, len(case.steps)).fetched.sum()
    assert planned(case, 0).fetched.sum() >= bound
    assert planned(case, case.horizon).fetched.sum() >= bound
    assert ttl_moves(case.recording, (case.slots,), case.horizon, tick).fetched.sum() >= bound
    assert window_moves(case.recording, (case.slots,), case.horizon, SEED, tick).fetched.sum() >= bound


@settings(max_examples=200)
@given(cases())
def test_rows_that_leave_early_never_save_a_fetch(case: Case) -> None:
    """ttl is look-ahead but that rows without a known use leave although there is room."""
    ahead = planned(case, case.horizon).fetched.sum()
    assert ttl_moves(case.recording, (case.slots,), case.horizon, tick).fetched.sum() >= ahead


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
