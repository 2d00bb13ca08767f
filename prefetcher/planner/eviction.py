"""Who leaves.

Look-ahead: rows whose next use is farthest, unknown counting as farthest; ties by oldest last use, then smallest key. Rows without a known
next use are idle and stand in one line in the order (last use, key); rows with a known one wait in the queue of that step (horizon.py):

    idle                 7 3 . 9 4 . 5          victims come off this head first,
    queue of step p+2    8 1                    then off the heads of the queues, from the farthest step
    queue of step p+1    2 6                    to the nearest

The other policies look at nothing but the past, so to them every row is idle (their planner's horizon is 0). LRU takes the head of the
line. The rest give each resident row a *worth* and take the least worthy, ties by oldest last use, then smallest key.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from rowcast.prefetcher.planner.directory import Records
from rowcast.prefetcher.planner.grouping import sort_pairs
from rowcast.prefetcher.planner.horizon import DIRTY, NONE, PINNED, Ring
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled, compiled_loop


class Victims(NamedTuple):
    """In the order of choice, then sorted: dirty ones first, each part by ascending key."""

    keys: I64
    places: I64
    slots: I32
    last_uses: I32
    dirty: I32  # 1 or 0


def new_victims(count: int) -> Victims:
    keys, places = np.empty(count, np.int64), np.empty(count, np.int64)
    slots, last_uses, dirty = np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.int32)
    return Victims(keys, places, slots, last_uses, dirty)


class Worth(Protocol):
    """A policy that looks at the past only."""

    per_use: int  # added to a row's worth by every batch that uses it

    def of(self, keys: I64) -> I32:
        """The worth of rows that come, before their first use; `keys` are ascending."""


class Frequency:
    """LFU: the batches that used a row since its fill."""

    per_use = 1

    def of(self, keys: I64) -> I32:
        return np.zeros(len(keys), np.int32)


class Hotness:
    """A static hot set, as frequency-ordered caches have it: a row is worth the batches among some first ones that use it, for good."""

    per_use = 0

    def __init__(self, batches: Iterable[I64]) -> None:
        """`batches`: the distinct keys of each."""
        self._keys, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *batches]), return_counts=True)
        self._counts = counts.astype(np.int32)

    def of(self, keys: I64) -> I32:
        worth = np.zeros(len(keys), np.int32)
        _, ours, theirs = np.intersect1d(self._keys, keys, assume_unique=True, return_indices=True)
        worth[theirs] = self._counts[ours]
        return worth


@compiled_loop
def take_idle(ring: Ring, oldest: int, head: int, victims: Victims) -> tuple[int, int]:
    """Takes rows off the head of the line, the oldest first, as many as there are up to all that are wanted.

    Returns how many, and where the line begins now. Pinned rows are passed over and stay at its head."""
    last = len(ring.rows) - 1
    taken, place, begin = 0, oldest, NONE
    while taken < len(victims.keys) and place < head:
        row = ring.rows[place & last]
        if row["slot"] != NONE:
            if not row["flags"] & PINNED:
                take(row, place, victims, taken)
                taken += 1
            elif begin == NONE:
                begin = place
        place += 1
    return taken, place if begin == NONE else begin


@compiled_loop
def take_queued(ring: Ring, step: int, farthest: int, victims: Victims, taken: int) -> int:
    """Fills `victims` up from `taken` with rows whose next use is known, the farthest first, none of `step` itself."""
    last = len(ring.rows) - 1
    for next_use in range(farthest, step, -1):
        at = next_use & (len(ring.first) - 1)
        while taken < len(victims.keys) and ring.heads[at] < ring.tails[at]:
            place = ring.first[at] + ring.queued[(ring.first[at] + ring.heads[at]) & last]
            ring.heads[at] += 1
            row = ring.rows[place & last]
            take(row, place, victims, taken)
            row["last_use"] = step if row["flags"] & DIRTY else NONE
            row["flags"] = 0
            taken += 1
    return taken


@compiled
def take_least_worthy(ring: Ring, oldest: int, head: int, victims: Victims) -> int:
    """Takes exactly the rows that are wanted out of the line. The caller made sure that so many are not pinned."""
    worth, offsets = np.empty(head - oldest, np.int64), np.empty(head - oldest, np.int32)
    count = weigh(ring.rows, oldest, head, worth, offsets)
    sort_pairs(worth[:count], offsets[:count])
    take_some(ring.rows, oldest, offsets[:count], victims)
    return min(count, len(victims.keys))


@compiled_loop
def weigh(rows: Records, oldest: int, head: int, worth: I64, offsets: I32) -> int:
    """Fills `worth` and `offsets`, places from the oldest on, of the idle rows that may leave; returns how many."""
    last, count = len(rows) - 1, 0
    for place in range(oldest, head):
        row = rows[place & last]
        worth[count], offsets[count] = row["worth"], place - oldest
        count += row["slot"] != NONE and not row["flags"] & PINNED
    return count


@compiled_loop
def take_some(rows: Records, oldest: int, offsets: I32, victims: Victims) -> None:
    for i in range(min(len(offsets), len(victims.keys))):
        place = oldest + offsets[i]
        take(rows[place & (len(rows) - 1)], place, victims, i)


@compiled_loop
def take(row: np.void, place: int, victims: Victims, i: int) -> None:
    victims.keys[i], victims.places[i], victims.slots[i] = row["key"], place, row["slot"]
    victims.last_uses[i], victims.dirty[i] = row["last_use"], row["flags"] & DIRTY
    row["slot"] = NONE


@compiled
def in_order(victims: Victims, keys: I64, slots: I32) -> int:
    """Fills `keys` and `slots`: dirty victims first, each part by ascending key. Returns how many are dirty."""
    by_key, which = victims.keys.copy(), np.arange(len(keys)).astype(np.int32)
    sort_pairs(by_key, which)
    return dirty_first(victims, which, keys, slots)


@compiled_loop
def dirty_first(victims: Victims, which: I32, keys: I64, slots: I32) -> int:
    num_dirty = 0
    for i in range(len(which)):
        num_dirty += victims.dirty[i]
    dirty, clean = 0, num_dirty
    for v in which:
        place = dirty if victims.dirty[v] else clean
        keys[place], slots[place] = victims.keys[v], victims.slots[v]
        dirty += victims.dirty[v]
        clean += 1 - victims.dirty[v]
    return num_dirty
