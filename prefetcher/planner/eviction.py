"""Which rows leave: what every eviction policy promises, and what becomes of the rows that it chose.

Rows without a known next use are idle and stand in one line in the order (last use, key); rows with a known one wait in the queue of that
step, in the same order (horizon.py):

    idle                 7 3 . 9 4 . 5
    queue of step p+1    2 6
    queue of step p+2    8 1

A policy that does not look ahead knows no batch but the one that is planned, so to it every row is idle.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import NamedTuple, Protocol

import numpy as np

from rowcast.job.eviction_policies import EVICTION_POLICIES
from rowcast.prefetcher.planner.directory import Records
from rowcast.prefetcher.planner.grouping import sort_pairs
from rowcast.prefetcher.planner.horizon import DIRTY, NONE, PINNED, Occurrences
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled, compiled_loop

NEVER = 2**31 - 1  # instead of a step: no batch that is known uses the row


class Residents(NamedTuple):
    """A group's rows while a step is planned, by where their state lies in the ring. Those of the step itself may not leave."""

    ring: Occurrences
    oldest: int  # the line of idle rows is from here
    head: int  # to here, where the step's own rows begin
    following: int  # the rows that known later batches use are from here
    tail: int  # to here
    step: int
    last_step: int  # that is known


class Victims(NamedTuple):
    keys: I64
    places: I64
    slots: I32
    last_uses: I32
    dirty: I32  # 1 or 0


class EvictionPolicy(Protocol):
    """For one group, under one planner. What it answers is a function of the batches planned so far and, where it looks ahead, of those
    known, never of time.
    """

    per_use: int  # added to a row's score by every batch that uses it

    def first_scores(self, keys: I64) -> I32 | None:
        """The scores of rows that are fetched, before their first use; None: all are 0. `keys` are ascending."""

    def choose(self, rows: Residents, victims: Victims) -> int:
        """Fills `victims` and returns how many rows it found, which is less than there is room for only where no more may leave.

        Changes nothing else: `rows` are read only.
        """


class LeastScore:
    """The base of policies whose rows have a score: the least one leaves first. Ties: idle rows by oldest last use, then smallest key;
    after them the others, by nearest next use, then smallest key.
    """

    per_use = 0

    def first_scores(self, keys: I64) -> I32 | None:
        return None

    def ranks(self, scores: I64, next_uses: I32) -> I64:
        """For rows that may leave, whose next use is a step or NEVER: the least rank leaves first. Not negative."""
        return scores

    def choose(self, rows: Residents, victims: Victims) -> int:
        most = rows.head - rows.oldest + rows.tail - rows.following
        places, scores, next_uses = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int32)
        count = candidates(rows, places, scores, next_uses)
        ranks, order = self.ranks(scores[:count], next_uses[:count]), np.arange(count, dtype=np.int32)
        sort_pairs(ranks, order)
        return pick_all(rows.ring.rows, places[order[: len(victims.keys)]], victims)


def new_policy(name: str, first_batches: Iterable[I64]) -> EvictionPolicy:
    """`first_batches`: the distinct keys of each of the run's first batches, taken only if the policy looks at them."""
    policy: EvictionPolicy = import_module(EVICTION_POLICIES[name].module).new_policy(first_batches)
    return policy


def new_victims(count: int) -> Victims:
    keys, places = np.empty(count, np.int64), np.empty(count, np.int64)
    slots, last_uses, dirty = np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.int32)
    return Victims(keys, places, slots, last_uses, dirty)


@compiled_loop
def candidates(rows: Residents, places: I64, scores: I64, next_uses: I32) -> int:
    """Fills the arrays with the rows that may leave, idle ones first; returns how many."""
    last, count = len(rows.ring.rows) - 1, 0
    for begin, end in ((rows.oldest, rows.head), (rows.following, rows.tail)):
        for place in range(begin, end):
            row = rows.ring.rows[place & last]
            places[count], scores[count] = place, row["score"]
            next_uses[count] = NEVER if place < rows.head else row["step"]
            count += row["slot"] != NONE and not row["flags"] & PINNED
    return count


@compiled_loop
def pick_all(rows: Records, places: I64, victims: Victims) -> int:
    for i in range(len(places)):
        pick(rows[places[i] & (len(rows) - 1)], places[i], victims, i)
    return len(places)


@compiled_loop
def pick(row: np.void, place: int, victims: Victims, i: int) -> None:
    victims.keys[i], victims.places[i], victims.slots[i] = row["key"], place, row["slot"]
    victims.last_uses[i], victims.dirty[i] = row["last_use"], row["flags"] & DIRTY


@compiled_loop
def leave(rows: Residents, places: I64) -> tuple[int, int]:
    """The rows at these places leave. Returns how many were idle, and where the line of idle rows begins now."""
    ring, last, num_idle = rows.ring.rows, len(rows.ring.rows) - 1, 0
    for place in places:
        row = ring[place & last]
        row["slot"] = NONE
        num_idle += place < rows.head
        if place >= rows.head:
            row["last_use"] = rows.step if row["flags"] & DIRTY else NONE
            row["flags"] = 0
    leave_queues(rows, len(places) - num_idle)
    oldest = rows.oldest
    while oldest < rows.head and ring[oldest & last]["slot"] == NONE:
        oldest += 1
    return num_idle, oldest


@compiled_loop
def leave_queues(rows: Residents, num_left: int) -> None:
    """Takes the `num_left` rows that left out of the queues, the farthest first. What leaves a queue's head costs nothing more."""
    ring, last = rows.ring, len(rows.ring.rows) - 1
    for next_use in range(rows.last_step, rows.step, -1):
        at = next_use & (len(ring.first) - 1)
        first = ring.first[at]
        while num_left and ring.heads[at] < ring.tails[at]:
            if ring.rows[(first + ring.queued[(first + ring.heads[at]) & last]) & last]["slot"] != NONE:
                break
            ring.heads[at] += 1
            num_left -= 1
        if not num_left:
            return
        tail = ring.heads[at]
        for i in range(tail, ring.tails[at]):
            row = ring.queued[(first + i) & last]
            if ring.rows[(first + row) & last]["slot"] == NONE:
                num_left -= 1
            else:
                ring.queued[(first + tail) & last] = row
                tail += 1
        ring.tails[at] = tail


@compiled
def in_order(victims: Victims, keys: I64, slots: I32) -> int:
    """Fills `keys` and `slots`: dirty victims first, each part by ascending key. Returns how many are dirty."""
    by_key, which = victims.keys.copy(), np.arange(len(keys)).astype(np.int32)
    sort_pairs(by_key, which)
    return dirty_first(by_key, which, victims.slots, victims.dirty, keys, slots)


@compiled_loop
def dirty_first(by_key: I64, which: I32, of_slots: I32, of_dirty: I32, keys: I64, slots: I32) -> int:
    num_dirty = 0
    for i in range(len(of_dirty)):
        num_dirty += of_dirty[i]
    dirty, clean = 0, num_dirty
    for i in range(len(which)):
        v = np.uint32(which[i])
        is_dirty = of_dirty[v]
        place = np.uint32(dirty if is_dirty else clean)
        keys[place], slots[place] = by_key[i], of_slots[v]
        dirty += is_dirty
        clean += 1 - is_dirty
    return num_dirty
