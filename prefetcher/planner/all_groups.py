"""Enters and moves all groups of a step in one compiled call: a call a group would take longer than its work.

A group's numbers, and the addresses of its arrays, are in its row of `states` (GROUP_STATE). Groups in several parts or
with another policy than look-ahead are passed over: `GroupPlanner` plans them.
"""

import numpy as np

from rowcast.prefetcher.planner.directory import CELLS_A_ROW, MOST_ROWS, Directory, Records, forget_before
from rowcast.prefetcher.planner.eviction import (
    Left,
    Residents,
    Victims,
    count_farthest,
    in_order,
    leave,
    oldest_idle,
    pick_idle,
    take_queued,
)
from rowcast.prefetcher.planner.group_planner import ALL_KEYS, MOST_GAPS, fill, find_missing
from rowcast.prefetcher.planner.horizon import NONE, OCCURRENCE, Occurrences, Revived, enter, queue_revived, use_rows
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import arrays_of, compiled, compiled_loop, compiled_part

FETCHED, EVICTED, WRITTEN, FILL_AFTER, LAST_EVICTED = range(5)  # columns of `moved`, which has a row for each group
NUM_MOVED = 5
i32_at, i64_at, u64_at, rows_at = map(arrays_of, (np.int32, np.int64, np.uint64, OCCURRENCE))


@compiled_part
def occurrences_of(state: np.void) -> Occurrences:
    return Occurrences(
        rows_at(state["rows"], state["num_rows"]),
        i32_at(state["scores"], state["num_scores"]),
        i32_at(state["next_in"], state["num_next_in"]),
        i32_at(state["queued"], state["num_queued"]),
        i64_at(state["first"], state["num_first"]),
        i32_at(state["heads"], state["num_heads"]),
        i32_at(state["tails"], state["num_tails"]),
    )


@compiled_part
def directory_of(state: np.void) -> Directory:
    return Directory(u64_at(state["cells"], state["num_cells"]), i64_at(state["tracked"], state["num_tracked"]))


@compiled_loop
def find_unprepared(states: Records, starts: I64, step: int, unprepared: I64) -> int:
    """Fills `unprepared` with the groups that `GroupPlanner.prepare` must prepare; returns how many. Group g's rows are
    the entering batch's from starts[g] to starts[g + 1] - 1."""
    found = 0
    for g in range(len(states)):
        state, count = states[g], starts[g + 1] - starts[g]
        unprepared[found] = g
        if state["tail"] == 0:
            found += 1
        elif state["is_whole"]:
            if state["head"] == state["tail"]:
                state["first_step"] = step
            tracked = i64_at(state["tracked"], state["num_tracked"])[0] + count
            oldest, head, tail = state["oldest"], state["head"], state["tail"] + count
            found += (
                tracked > MOST_ROWS
                or CELLS_A_ROW * tracked > state["num_cells"]
                or head - oldest > (1 + MOST_GAPS) * state["num_idle"] + count
                or tail - oldest > state["num_rows"]
                or tail - head > state["num_queued"]
                or step - state["first_step"] >= state["num_first"]
            )
    return found


@compiled
def enter_all(states: Records, keys: I64, starts: I64, step: int) -> None:
    """Adds a batch with these keys, as `GroupPlanner.enter`."""
    positions, numbers = np.empty(len(keys), np.int64), np.empty(len(keys), np.int32)
    for g in range(len(states)):
        state, own = states[g], keys[starts[g] : starts[g + 1]]
        if state["is_whole"]:
            occurrences, directory = occurrences_of(state), directory_of(state)
            revived = Revived(positions[: len(own)], numbers[: len(own)])
            head, tail, cells, tracked = state["head"], state["tail"], directory.cells, directory.num_tracked
            state["num_idle"] -= enter(step, own, head, tail, cells, tracked, occurrences, revived)
            queue_revived(step, occurrences, revived)
            state["tail"] += len(own)


@compiled
def move_all(
    states: Records, starts: I64, step: int, last_step: int, train: bool, slots: I32, keys: I64, moved: I64
) -> None:
    """Plans the oldest batch, as `GroupPlanner.move`. Group g's entries begin at starts[g]: its `unique_slots` in
    slots[0], `fetch_slots` in slots[1], `fetch_keys` in keys[0], `evict_keys` in keys[1]; moved[g] says how many. If
    too few of its rows can leave, EVICTED is below 0."""
    unique_slots, filled, fetched, evicted = slots[0], slots[1], keys[0], keys[1]
    missing = np.empty(starts[-1], np.int32)
    for g in range(len(states)):
        state, out, a, count = states[g], moved[g], starts[g], starts[g + 1] - starts[g]
        if not state["is_whole"]:
            continue
        occurrences, head = occurrences_of(state), state["head"]
        found = find_missing(occurrences, head, count, missing)
        num_victims = max(0, found - (state["num_slots"] - state["num_resident"]))
        out[FETCHED], out[EVICTED], out[WRITTEN], out[FILL_AFTER] = found, num_victims, 0, NONE
        fetch_slots = filled[a : a + found]
        if num_victims:
            rows = Residents(occurrences, state["oldest"], head, step, last_step)
            evict(rows, state, num_victims, evicted[a : a + num_victims], fetch_slots[:num_victims], out)
            if out[EVICTED] < 0:
                continue
        state["guessed"] = num_victims > 0 and state["num_idle"] > 0
        for i in range(num_victims, found):
            fetch_slots[i] = state["num_resident"] + i - num_victims
        state["num_resident"] += found - num_victims
        out[LAST_EVICTED] = fill(occurrences, head, missing[:found], fetch_slots, fetched[a : a + found])
        num_dirtied, num_idle = use_rows(step, train, 0, head, occurrences, unique_slots[a : a + count])
        state["num_dirty"] += num_dirtied
        state["num_idle"] += num_idle
        state["head"] += count
        state["first_step"] = step + 1


@compiled
def evict(rows: Residents, state: np.void, num_victims: int, keys: I64, slots: I32, out: I64) -> None:
    """Removes victims; fills `keys` and `slots` with them, and the group's row `out`."""
    # loops in place of numpy's functions, which take longer to compile than all else here
    victims = Victims(ALL_KEYS, np.empty(1, np.int64), np.empty((1, num_victims), np.int64))
    victims.counts[0] = 0
    oldest, positions, directory = pick_idle(rows, victims, num_victims), victims.positions[0], directory_of(state)
    queued, searched = np.empty((1, rows.last_step - rows.step), np.int64), np.empty((3, 1), np.int64)
    for s in range(queued.shape[1]):
        queued[0, s] = 0
    shape, num_picked = (1, len(rows.occurrences.first)), victims.counts[0]
    first, heads = rows.occurrences.first.reshape(shape), rows.occurrences.heads.reshape(shape)
    tails = rows.occurrences.tails.reshape(shape)
    count_farthest(rows, first, heads, tails, num_victims - num_picked, queued, searched)
    chosen = num_picked
    for s in range(queued.shape[1]):
        chosen += queued[0, s]
    if chosen != num_victims:
        out[FETCHED], out[EVICTED] = num_victims, -1 - chosen
        return
    take_queued(rows, queued[0], positions, num_picked)
    uses, dirty = np.empty(num_victims, np.int32), np.empty(num_victims, np.int32)
    left = Left(np.empty(num_victims, np.int64), np.empty(num_victims, np.int32), uses, dirty)
    state["num_idle"] -= leave(rows, positions, left)
    forget_before(rows.head, directory.cells, directory.num_tracked, left.keys, positions)
    out[WRITTEN] = in_order(left, keys, slots)
    out[FILL_AFTER] = NONE
    for use in uses:
        out[FILL_AFTER] = max(out[FILL_AFTER], use)
    state["oldest"] = oldest_idle(rows, oldest)
    state["num_dirty"] -= out[WRITTEN]
