"""Defines the interface of an eviction policy, and removes the rows that it chose.

Rows without a known next use are idle and form one line in the order (last use, key); rows with a known next use are in
the queue of that step, in the same order (horizon.py):

    idle                 7 3 . 9 4 . 5
    queue of step p+1    2 6
    queue of step p+2    8 1

A policy that does not look ahead knows only the batch being planned: all rows are idle.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import NamedTuple, Protocol

import numpy as np

from rowcast.job.eviction_policies import EVICTION_POLICIES
from rowcast.prefetcher.planner.directory import Records
from rowcast.prefetcher.planner.grouping import sort_pairs
from rowcast.prefetcher.planner.horizon import DIRTY, FLAG_BITS, NONE, PINNED, UNUSED, Occurrences
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled, compiled_loop

NEVER = 2**31 - 1  # instead of a step: no known batch uses the row


class Residents(NamedTuple):
    """A group's resident rows while a step is planned, by position. The step's rows may not leave."""

    occurrences: Occurrences
    oldest: int  # the line of idle rows starts here
    head: int  # and ends here, where the step's own rows start
    following: int  # the rows that later known batches use start here
    tail: int  # and end here
    step: int
    last_step: int  # the last known step


class Victims(NamedTuple):
    keys: I64
    positions: I64
    slots: I32
    last_uses: I32
    dirty: I32  # 1 or 0


class EvictionPolicy(Protocol):
    """The policy of one group in one planner. Its choices depend on the batches planned so far and, if it looks ahead,
    on the known batches, never on time.
    """

    scored: bool  # whether it reads scores; otherwise none are kept
    per_use: int  # added to a row's score by every batch that uses it

    def first_scores(self, keys: I64) -> I32 | None:
        """The scores of fetched rows before their first use; None: all are 0. `keys` are ascending."""

    def choose(self, rows: Residents, victims: Victims) -> int:
        """Fills `victims` and returns how many rows it found: fewer than fit only if no more may leave.

        Must not change `rows`.
        """


class LeastScore:
    """The base of policies that score rows: the row with the least score leaves first. Ties: idle rows by oldest last
    use, then smallest key; after them the others, by nearest next use, then smallest key.
    """

    scored = True
    per_use = 0

    def first_scores(self, keys: I64) -> I32 | None:
        return None

    def ranks(self, scores: I64, next_uses: I32) -> I64:
        """Ranks rows that may leave, from 0: the least leaves first. `next_uses` are steps or NEVER."""
        return scores

    def choose(self, rows: Residents, victims: Victims) -> int:
        most = rows.head - rows.oldest + rows.tail - rows.following
        positions, scores, next_uses = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int32)
        count = candidates(rows, positions, scores, next_uses)
        ranks, order = self.ranks(scores[:count], next_uses[:count]), np.arange(count, dtype=np.int32)
        sort_pairs(ranks, order)
        return pick_all(rows.occurrences.rows, positions[order[: len(victims.keys)]], victims)


def new_policy(name: str, first_batches: Iterable[I64]) -> EvictionPolicy:
    """`first_batches`: distinct keys of each of the run's first batches, read only by policies that use them."""
    policy: EvictionPolicy = import_module(EVICTION_POLICIES[name].module).new_policy(first_batches)
    return policy


def new_victims(count: int) -> Victims:
    keys, positions = np.empty(count, np.int64), np.empty(count, np.int64)
    slots, last_uses, dirty = np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.int32)
    return Victims(keys, positions, slots, last_uses, dirty)


@compiled_loop
def candidates(rows: Residents, positions: I64, scores_found: I64, next_uses: I32) -> int:
    """Fills the arrays with the rows that may leave, idle ones first; returns how many."""
    occurrences, last, scores = rows.occurrences, len(rows.occurrences.rows) - 1, rows.occurrences.scores
    last_step, count = len(occurrences.first) - 1, 0
    begin, end = rows.oldest, rows.head
    for step in range(rows.step, rows.last_step + 1):
        if step > rows.step:
            begin = occurrences.first[step & last_step]
            end = occurrences.first[(step + 1) & last_step] if step < rows.last_step else rows.tail
        for position in range(begin, end):
            row = occurrences.rows[position & last]
            positions[count], scores_found[count] = position, scores[position & (len(scores) - 1)]
            next_uses[count] = NEVER if step == rows.step else step
            count += row["slot"] >= 0 and not row["use"] & PINNED
    return count


@compiled_loop
def pick_all(rows: Records, positions: I64, victims: Victims) -> int:
    for i in range(len(positions)):
        pick(rows[positions[i] & (len(rows) - 1)], positions[i], victims, i)
    return len(positions)


@compiled_loop
def pick(row: np.void, position: int, victims: Victims, i: int) -> None:
    victims.keys[i], victims.positions[i], victims.slots[i] = row["key"], position, row["slot"]
    victims.last_uses[i], victims.dirty[i] = row["use"] >> FLAG_BITS, row["use"] & DIRTY


@compiled_loop
def leave(rows: Residents, positions: I64) -> tuple[int, int]:
    """Removes the rows at these positions. Returns how many were idle, and the new start of the line of idle rows."""
    records, last, num_idle = rows.occurrences.rows, len(rows.occurrences.rows) - 1, 0
    for position in positions:
        row = records[position & last]
        row["slot"] = NONE
        num_idle += position < rows.head
        if position >= rows.head:
            row["use"] = rows.step << FLAG_BITS if row["use"] & DIRTY else UNUSED
    leave_queues(rows, len(positions) - num_idle)
    oldest = rows.oldest
    while oldest < rows.head and records[oldest & last]["slot"] < 0:
        oldest += 1
    return num_idle, oldest


@compiled_loop
def leave_queues(rows: Residents, num_left: int) -> None:
    """Removes the `num_left` rows that left from the queues, the farthest first. Removing a queue's head is cheap."""
    occurrences, last = rows.occurrences, len(rows.occurrences.rows) - 1
    queued, last_known = occurrences.queued, len(occurrences.queued) - 1
    for next_use in range(rows.last_step, rows.step, -1):
        at = next_use & (len(occurrences.first) - 1)
        first = occurrences.first[at]
        while num_left and occurrences.heads[at] < occurrences.tails[at]:
            row = queued[(first + occurrences.heads[at]) & last_known]
            if occurrences.rows[(first + row) & last]["slot"] != NONE:
                break
            occurrences.heads[at] += 1
            num_left -= 1
        if not num_left:
            return
        tail = occurrences.heads[at]
        for i in range(tail, occurrences.tails[at]):
            row = queued[(first + i) & last_known]
            if occurrences.rows[(first + row) & last]["slot"] == NONE:
                num_left -= 1
            else:
                queued[(first + tail) & last_known] = row
                tail += 1
        occurrences.tails[at] = tail


@compiled
def in_order(victims: Victims, keys: I64, slots: I32) -> int:
    """Fills `keys` and `slots`: dirty victims, then clean ones, each by ascending key. Returns how many are dirty."""
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
        position = np.uint32(dirty if is_dirty else clean)
        keys[position], slots[position] = by_key[i], of_slots[v]
        dirty += is_dirty
        clean += 1 - is_dirty
    return num_dirty
