"""Checks that all copies of a group's planning state agree. Slow."""

import numpy as np

from rowcast.prefetcher.planner.directory import EMPTY, LOW, Directory, Records, locate
from rowcast.prefetcher.planner.group_planner import GroupPart, GroupPlanner
from rowcast.prefetcher.planner.horizon import DIRTY, FLAG_BITS, NONE, Occurrences
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.runtime.arrays import I32, I64


def check_planner(planner: RowPlanner) -> None:
    """Raises AssertionError with both numbers if directory, slots, queues and horizon disagree."""
    for level in planner.levels:
        for index, group in enumerate(level.groups):
            check_group(group, [(bundle.plan, bundle.keys[index]) for bundle in planner.known._known])


def check_group(planner: GroupPlanner, known: list[tuple[int, I64]]) -> None:
    """`known`: step and distinct keys of every batch in the horizon. Raises AssertionError with both numbers."""
    oldest, head, tail = planner.positions
    for part in planner.parts:
        check_directory(part.directory, part.occurrences.rows)
        check_keys(part, *planner.bounds[part.number : part.number + 2].tolist())
    in_horizon, steps = check_occurrences(planner.occurrences, head, tail, known)
    first, at = np.unique(in_horizon["key"], return_index=True)
    at = at[in_horizon["slot"][at] >= 0]
    resident = in_horizon[at]
    num_early = np.count_nonzero(in_horizon["slot"] >= 0) - len(resident)
    assert num_early == 0, f"{num_early} of {len(in_horizon)} occurrences have a slot before their turn"
    idle = check_idle(planner, oldest, head)
    both = np.intersect1d(first, idle["key"])
    assert not len(both), f"{len(both)} of {len(idle)} idle rows are in the horizon"
    check_slots(planner, np.concatenate([resident["slot"], idle["slot"]]))
    num_dirty = int(sum(np.count_nonzero(rows["use"] & DIRTY) for rows in (resident, idle)))
    assert num_dirty == planner.occupancy.num_dirty, (
        f"{num_dirty} dirty rows, but {planner.occupancy.num_dirty} were counted"
    )
    num_tracked = len(first) + len(idle)
    assert num_tracked == planner.num_tracked, f"{planner.num_tracked} rows are tracked, but {num_tracked} are known"
    of_parts = np.searchsorted(planner.bounds, resident["key"], side="right") - 1
    for part in planner.parts:
        own = of_parts == part.number
        check_queues(part.occurrences, [step for step, _ in known], resident[own], steps[at][own])


def check_directory(directory: Directory, rows: Records) -> None:
    """Raises AssertionError unless every key leads to its cell and the count is right."""
    used = np.flatnonzero(directory.cells != EMPTY)
    assert len(used) == directory.num_tracked[0], (
        f"{len(used)} cells are in use, but {directory.num_tracked[0]} rows are tracked"
    )
    for cell in used.tolist():
        key = int(rows["key"][int(directory.cells[cell] & LOW) % len(rows)])
        found = int(locate(directory.cells, rows, key))
        assert found == cell, f"key {key} leads to cell {found}, but is in cell {cell}"


def check_keys(part: GroupPart, least: int, above: int) -> None:
    cells, rows = part.directory.cells, part.occurrences.rows
    keys = rows["key"][(cells[cells != EMPTY] & LOW).astype(np.int64) % len(rows)]
    num_others = np.count_nonzero((keys < least) | (keys >= above))
    assert num_others == 0, f"{num_others} of {len(keys)} rows of part {part.number} belong to other parts"


def check_idle(planner: GroupPlanner, oldest: int, head: int) -> Records:
    positions = np.arange(oldest, head)
    rows: Records = planner.occurrences.rows[positions % len(planner.occurrences.rows)]
    positions, rows = positions[rows["slot"] >= 0], rows[rows["slot"] >= 0]
    assert len(rows) == planner.num_idle, f"{len(rows)} idle rows, but {planner.num_idle} are counted"
    order = np.lexsort((rows["key"], rows["use"] >> FLAG_BITS))
    assert np.array_equal(order, np.arange(len(rows))), f"the line of {len(rows)} idle rows is out of order at {order}"
    for position, key in zip(positions.tolist(), rows["key"].tolist(), strict=True):
        cells = directory_of(planner, key).cells
        held = cells[locate(cells, planner.occurrences.rows, key)] & LOW
        assert held == position & int(LOW), f"row {key} is idle at {position}, but the directory has it at {held}"
    return rows


def directory_of(planner: GroupPlanner, key: int) -> Directory:
    return planner.parts[int(np.searchsorted(planner.bounds, key, side="right")) - 1].directory


def check_slots(planner: GroupPlanner, slots: I32) -> None:
    occupancy = planner.occupancy
    assert occupancy.num_resident <= occupancy.num_slots, (
        f"{occupancy.num_resident} slots in use of {occupancy.num_slots}"
    )
    in_order = np.array_equal(np.sort(slots), np.arange(occupancy.num_resident))
    assert in_order, f"{len(slots)} resident rows do not fill slots 0 to {occupancy.num_resident - 1}"


def check_occurrences(
    occurrences: Occurrences, head: int, tail: int, known: list[tuple[int, I64]]
) -> tuple[Records, I64]:
    """Returns the occurrences in the horizon, and the step of each."""
    keys = np.concatenate([np.zeros(0, np.int64), *(keys for _, keys in known)])
    steps = np.repeat(np.array([step for step, _ in known], np.int64), [len(keys) for _, keys in known])
    assert len(keys) == tail - head, f"positions {head} to {tail} hold {len(keys)} occurrences"
    found: Records = occurrences.rows[np.arange(head, tail) % len(occurrences.rows)]
    assert np.array_equal(found["key"], keys), (
        f"{np.count_nonzero(found['key'] != keys)} of {len(keys)} occurrences are of other rows"
    )
    waits = found["slot"] < NONE
    num_others = np.count_nonzero(NONE - 1 - found["slot"][waits] != steps[waits])
    assert num_others == 0, f"{num_others} of {len(keys)} occurrences are of other steps"
    next_in = occurrences.next_in[np.arange(head, tail) % len(occurrences.next_in)]
    next_position: dict[int, int] = {}
    for position in range(tail - 1, head - 1, -1):
        row = found[position - head]
        expected = next_position.get(int(row["key"]), position) - position
        distance = int(next_in[position - head])
        assert distance == expected, (
            f"row {row['key']} at position {position} is next in {distance} positions, which should be {expected}"
        )
        next_position[int(row["key"])] = position
    return found, steps


def check_queues(occurrences: Occurrences, known_steps: list[int], resident: Records, next_uses: I64) -> None:
    """A part's queue of a step holds its resident rows next used there, ordered by last use and key."""
    for step in known_steps:
        at = step % len(occurrences.first)
        places = occurrences.first[at] + np.arange(occurrences.heads[at], occurrences.tails[at])
        queue = occurrences.queued[places % len(occurrences.queued)]
        found = occurrences.rows[(occurrences.first[at] + queue) % len(occurrences.rows)]
        belongs = resident[next_uses == step]
        expected = belongs[np.lexsort((belongs["key"], belongs["use"] >> FLAG_BITS))]
        assert np.array_equal(found["key"], expected["key"]), (
            f"the queue of step {step} holds {len(found)} rows, but {len(expected)} belong there"
        )
