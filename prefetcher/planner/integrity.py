"""Whether what a group's planner keeps in several places agrees. Slow, for idle times and tests."""

import numpy as np

from rowcast.prefetcher.planner.directory import LOW, Records, check_directory, locate
from rowcast.prefetcher.planner.group_planner import GroupPlanner
from rowcast.prefetcher.planner.horizon import DIRTY, NONE, PINNED, Occurrences
from rowcast.runtime.arrays import I32, I64


def check_group(planner: GroupPlanner, known: list[tuple[int, I64]]) -> None:
    """`known`: step and distinct keys of every batch in the horizon. Raises AssertionError with both numbers."""
    directory, ring = planner.directory, planner.ring
    oldest, head, tail = planner.places
    check_directory(directory, ring.rows)
    occurrences = check_occurrences(ring, head, tail, known)
    first, at = np.unique(occurrences["key"], return_index=True)
    resident = occurrences[at][occurrences["slot"][at] != NONE]
    num_early = np.count_nonzero(occurrences["slot"] != NONE) - len(resident)
    assert num_early == 0, f"{num_early} of {len(occurrences)} occurrences have a slot before their turn"
    idle = check_idle(planner, oldest, head)
    both = np.intersect1d(first, idle["key"])
    assert not len(both), f"{len(both)} of {len(idle)} idle rows are in the horizon"
    check_slots(planner, np.concatenate([resident["slot"], idle["slot"]]))
    num_dirty = int(sum(np.count_nonzero(rows["flags"] & DIRTY) for rows in (resident, idle)))
    assert num_dirty == planner.occupancy.num_dirty, (
        f"{num_dirty} dirty rows, but {planner.occupancy.num_dirty} were counted"
    )
    num_tracked = len(first) + len(idle)
    assert num_tracked == directory.num_tracked[0], (
        f"{directory.num_tracked[0]} rows are tracked, but {num_tracked} are known"
    )
    check_queues(ring, resident, [step for step, _ in known])


def check_idle(planner: GroupPlanner, oldest: int, head: int) -> Records:
    """The idle rows: as many as are counted, in the order of last use and key; each key leads to its place."""
    places = np.arange(oldest, head)
    rows: Records = planner.ring.rows[places % len(planner.ring.rows)]
    places, rows = places[rows["slot"] != NONE], rows[rows["slot"] != NONE]
    assert len(rows) == planner.num_idle, f"{len(rows)} idle rows, but {planner.num_idle} are counted"
    order = np.lexsort((rows["key"], rows["last_use"]))
    assert np.array_equal(order, np.arange(len(rows))), f"the line of {len(rows)} idle rows is out of order at {order}"
    for place, key in zip(places.tolist(), rows["key"].tolist(), strict=True):
        said = planner.directory.cells[locate(planner.directory.cells, planner.ring.rows, key)] & LOW
        assert said == place & int(LOW), f"row {key} is idle at {place}, but the directory has it at {said}"
    return rows


def check_slots(planner: GroupPlanner, slots: I32) -> None:
    occupancy = planner.occupancy
    assert occupancy.num_resident <= occupancy.num_slots, (
        f"{occupancy.num_resident} slots in use of {occupancy.num_slots}"
    )
    in_order = np.array_equal(np.sort(slots), np.arange(occupancy.num_resident))
    assert in_order, f"{len(slots)} resident rows do not fill slots 0 to {occupancy.num_resident - 1}"


def check_occurrences(ring: Occurrences, head: int, tail: int, known: list[tuple[int, I64]]) -> Records:
    """The occurrences of the known batches, in order: each leads to the row's next one, the directory to its last one."""
    keys = np.concatenate([np.zeros(0, np.int64), *(keys for _, keys in known)])
    steps = np.repeat([step for step, _ in known], [len(keys) for _, keys in known])
    assert len(keys) == tail - head, f"places {head} to {tail} hold {len(keys)} occurrences"
    found: Records = ring.rows[np.arange(head, tail) % len(ring.rows)]
    assert np.array_equal(found["key"], keys), (
        f"{np.count_nonzero(found['key'] != keys)} of {len(keys)} occurrences are of other rows"
    )
    assert np.array_equal(found["step"], steps), (
        f"{np.count_nonzero(found['step'] != steps)} of {len(keys)} occurrences are of other steps"
    )
    next_place: dict[int, int] = {}
    for place in range(tail - 1, head - 1, -1):
        row = found[place - head]
        right = next_place.get(int(row["key"]), place) - place
        assert row["next_in"] == right, (
            f"row {row['key']} at place {place} is next in {row['next_in']} places, which should be {right}"
        )
        next_place[int(row["key"])] = place
    return found


def check_queues(ring: Occurrences, resident: Records, steps: list[int]) -> None:
    """The queue of a step holds the resident rows next used there, but for pinned ones, in order of last use and key."""
    for step in steps:
        at, last = step % len(ring.first), len(ring.rows) - 1
        queue = ring.queued[(ring.first[at] + np.arange(ring.heads[at], ring.tails[at])) & last]
        found = ring.rows[(ring.first[at] + queue) & last]
        belongs = resident[(resident["step"] == step) & (resident["flags"] & PINNED == 0)]
        right = belongs[np.lexsort((belongs["key"], belongs["last_use"]))]
        assert np.array_equal(found["key"], right["key"]), (
            f"the queue of step {step} holds {len(found)} rows of which {len(right)} belong"
        )
