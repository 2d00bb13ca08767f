"""What is known: the batches from the next plan's to the horizon, and where each distinct row occurs in them.

Each group's occurrences stand in a ring, batch after batch, by ascending key within a batch. A place is counted over the whole run, its
cell is the place modulo the ring's size:

    | batch p-1: 3 4 8 | batch p: 3 7 9 | batch p+1: 3 8 | batch p+2: 7 8 | free ...
    oldest             head                                               tail
    next_in      3 0 6            3 4 0            0 2             0 0     places to the row's next occurrence; 0: none is known

The state of a resident row stands in its next occurrence. So a plan reads its batch's occurrences one after the other and hands each
row's state on to the next one, which lies in a later batch's part of the ring in the same order of keys: planning never looks anything up
and hardly ever leaves the processor's cache. A row without a known next use is *idle*: its state stays in its last occurrence, before the
head. So the part of the ring from `oldest` to the head, read from left to right, is the line of idle rows by (last use, key), with
gaps where rows have moved on.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from rowcast.prefetcher.planner.directory import (
    AHEAD,
    EMPTY,
    LOW,
    PLACE_BITS,
    Records,
    exchange,
    expect,
    hash_of,
    locate_place,
)
from rowcast.prefetcher.planner.grouping import Grouping, Lookups, sort_pairs
from rowcast.protocol.batch import Kind
from rowcast.runtime.arrays import I32, I64, U64
from rowcast.runtime.compiled import compiled, compiled_loop, prefetch

NONE = -1  # no slot, no step: only inside the planner's arrays
DIRTY, PINNED = 1, 2  # flags: trained since its fill or the last barrier; never leaves
AHEAD_IN_RING = 8  # occurrences asked for before their use
INITIAL_PLACES = 1024
INITIAL_STEPS = 16
OCCURRENCE = np.dtype(
    [
        ("key", np.int64),
        ("next_in", np.int32),
        ("step", np.int32),
        ("slot", np.int32),  # NONE: the row's state is not here
        # last planned step that touches the row since its fill; not resident: that evicted it dirty
        ("last_use", np.int32),
        ("flags", np.int32),  # not resident: PINNED or nothing
        ("score", np.int32),  # see eviction.py
    ],
    align=True,
)


PLACE_BYTES = OCCURRENCE.itemsize + 4


class ScheduledLookups(Protocol):
    """A batch with its place in the run, as in `rowcast.protocol.batch.ScheduledBatch`."""

    @property
    def step(self) -> int: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def train_step(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def batch(self) -> Lookups: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownBatch:
    scheduled: ScheduledLookups
    groups: tuple[Grouping, ...]
    slots_needed: tuple[int, ...]  # by each group: its distinct rows, and the pinned ones

    @property
    def id_bytes(self) -> int:
        """What is kept of the batch's look-ups and rows while it is known, before rounding."""
        return sum(grouping.nbytes + grouping.num_unique * PLACE_BYTES for grouping in self.groups)


class Horizon:
    """The known batches, in step order without gaps. Step p may be planned when p to p + `num_batches` are known or the data has ended."""

    def __init__(self, num_batches: int) -> None:
        assert num_batches >= 0, f"a horizon of {num_batches} batches"
        self.num_batches = num_batches
        self.id_bytes = 0  # of the known batches
        self._known: deque[KnownBatch] = deque()
        self._following: int | None = None
        self._ended = False

    def check_next(self, step: int) -> None:
        """The step that may enter now: the following one, and no further ahead than the next plan may know."""
        assert not self._ended, f"step {step} was added after the end of the data"
        assert self._following in (None, step), f"step {step} was added where step {self._following} follows"
        assert self.wants > 0, (
            f"step {step} was added where {len(self._known)} batches are known and {self.num_batches + 1} are enough"
        )

    def append(self, batch: KnownBatch) -> None:
        self.check_next(batch.scheduled.step)
        self._known.append(batch)
        self.id_bytes += batch.id_bytes
        self._following = batch.scheduled.step + 1

    def end(self) -> None:
        self._ended = True

    @property
    def wants(self) -> int:
        """Batches still missing before the next plan may be made."""
        return 0 if self._ended else max(0, self.num_batches + 1 - len(self._known))

    @property
    def ready(self) -> bool:
        return self.wants == 0 and len(self._known) > 0

    @property
    def next(self) -> KnownBatch:
        assert self.ready, f"{len(self._known)} batches are known of the {self.num_batches + 1} that a plan needs"
        return self._known[0]

    @property
    def last_step(self) -> int:
        return self._known[-1].scheduled.step

    @property
    def num_known(self) -> int:
        return len(self._known)

    @property
    def batches(self) -> tuple[KnownBatch, ...]:
        return tuple(self._known)

    def advance(self) -> None:
        self.id_bytes -= self._known.popleft().id_bytes


class Occurrences(NamedTuple):
    """The occurrences, a power of two of places, and the queue of each known step: which of its batch's rows are resident.

    The queue of a step holds places of its batch, counted from the batch's first, by (last use, key) ascending: the order in which they
    leave. A row joins at the tail and leaves at the head, so a queue is never searched and never goes stale.
    """

    rows: Records  # OCCURRENCE
    queued: I32  # the queues; that of a step begins at its batch's first place
    first: I64  # by step modulo a power of two: its batch's first place
    heads: I32  # of its queue, counted from its batch's first place
    tails: I32


class Woken(NamedTuple):
    """Rows of a batch that were idle when it entered, as many as its queue's tail says."""

    places: I64  # where they stood in the line
    rows: I32  # counted from the batch's first


def new_ring(num_places: int = INITIAL_PLACES, num_steps: int = INITIAL_STEPS) -> Occurrences:
    """Both must be powers of two."""
    rows, queued = np.empty(num_places, OCCURRENCE), np.empty(num_places, np.int32)
    return Occurrences(
        rows, queued, np.zeros(num_steps, np.int64), np.zeros(num_steps, np.int32), np.zeros(num_steps, np.int32)
    )


def with_places(ring: Occurrences, oldest: int, tail: int, num_new: int) -> Occurrences:
    """The same ring, or one with more places and the same occurrences, in which `num_new` more fit."""
    size = len(ring.rows)
    while size < tail - oldest + num_new:
        size *= 2
    if size == len(ring.rows):
        return ring
    grown = ring._replace(rows=np.empty(size, OCCURRENCE), queued=np.empty(size, np.int32))
    copy_places(ring, grown, oldest, tail)
    return grown


def with_steps(ring: Occurrences, first: int, last: int) -> Occurrences:
    """The same ring, or one in which steps `first` to `last` have queues, with those of `first` to `last` - 1 as they were."""
    size = len(ring.first)
    while size <= last - first:
        size *= 2
    if size == len(ring.first):
        return ring
    steps = np.arange(first, last)
    firsts, heads, tails = np.zeros(size, np.int64), np.zeros(size, np.int32), np.zeros(size, np.int32)
    firsts[steps % size] = ring.first[steps % len(ring.first)]
    heads[steps % size] = ring.heads[steps % len(ring.first)]
    tails[steps % size] = ring.tails[steps % len(ring.first)]
    return ring._replace(first=firsts, heads=heads, tails=tails)


@compiled_loop
def copy_places(old: Occurrences, new: Occurrences, oldest: int, tail: int) -> None:
    for place in range(oldest, tail):
        new.rows[place & (len(new.rows) - 1)] = old.rows[place & (len(old.rows) - 1)]
        new.queued[place & (len(new.rows) - 1)] = old.queued[place & (len(old.rows) - 1)]


@compiled_loop
def enter(
    step: int,
    keys: I64,
    head: int,
    place: int,
    pinned: I64,
    cells: U64,
    num_tracked: I64,
    ring: Occurrences,
    woken: Woken,
) -> tuple[int, int]:
    """Tracks the batch of `step` from `place` on; `keys` are its distinct rows, ascending. Room was made everywhere.

    Idle rows of the batch are idle no longer: `woken` is filled with those that `queue_woken` has to queue. Returns how many rows of
    the batch are pinned, and how many were idle.
    """
    rows, last, at = ring.rows, len(ring.rows) - 1, step & (len(ring.first) - 1)
    ring.first[at], ring.heads[at], ring.tails[at] = place, 0, 0
    num_idle = num_pinned = 0
    for u in range(len(keys)):
        expect(cells, keys, u + AHEAD)
        expect_occurrence(cells, rows, keys, u + AHEAD_IN_RING)
        found = exchange(cells, num_tracked, rows, keys[u], place + u)
        row = rows[(place + u) & last]
        row["key"], row["next_in"], row["step"] = keys[u], 0, step
        row["slot"], row["last_use"], row["flags"] = NONE, NONE, 0
        if found == EMPTY:
            row["flags"] = PINNED if contains(pinned, keys[u]) else 0
        else:
            next_in = np.int64((np.uint64(place + u) - found) & LOW)
            before = rows[(place + u - next_in) & last]
            before["next_in"] = next_in
            row["flags"] = before["flags"] & PINNED
            if place + u - next_in < head:
                hand_on(before, row)
                num_idle += 1
                if not row["flags"] & PINNED:
                    woken.places[ring.tails[at]], woken.rows[ring.tails[at]] = place + u - next_in, u
                    ring.tails[at] += 1
        num_pinned += (row["flags"] & PINNED) != 0
    return num_pinned, num_idle


@compiled
def queue_woken(step: int, ring: Occurrences, woken: Woken) -> None:
    """The idle rows of a batch that has just entered stand in its queue as they stood in the line."""
    at, last = step & (len(ring.first) - 1), len(ring.rows) - 1
    count = ring.tails[at]
    sort_pairs(woken.places[:count], woken.rows[:count])
    for i in range(count):
        ring.queued[(ring.first[at] + i) & last] = woken.rows[i]


@compiled_loop
def expect_occurrence(cells: U64, rows: Records, keys: I64, i: int) -> None:
    """Has the processor bring the occurrence of keys[i], as far as its first cell tells, into its cache."""
    if i < len(keys):
        held = cells[hash_of(keys[i]) & np.uint64(len(cells) - 1)]
        if held != EMPTY:
            prefetch(rows, np.int64(held & LOW) & (len(rows) - 1))


@compiled_loop
def contains(ascending: I64, key: int) -> bool:
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low < len(ascending) and ascending[low] == key


@compiled_loop
def hand_on(before: np.void, row: np.void) -> None:
    """Moves the state of a resident row to its next occurrence."""
    row["slot"], row["last_use"], row["flags"], row["score"] = (
        before["slot"],
        before["last_use"],
        before["flags"],
        before["score"],
    )
    before["slot"] = NONE


@compiled_loop
def use_rows(step: int, train: bool, per_use: int, place: int, ring: Occurrences, unique_slots: I32) -> tuple[int, int]:
    """The batch at `place`, all of whose rows are resident now, is used: each row's state goes on to its next occurrence, whose queue it
    joins, or stays as that of an idle row. Returns how many rows became dirty, and how many idle."""
    rows, last, last_step = ring.rows, len(ring.rows) - 1, len(ring.first) - 1
    num_dirtied = num_idle = 0
    for u in range(len(unique_slots)):
        ahead = place + u + AHEAD_IN_RING
        prefetch(rows, (ahead + rows[ahead & last]["next_in"]) & last)
        row = rows[(place + u) & last]
        unique_slots[u] = row["slot"]
        num_dirtied += train and not row["flags"] & DIRTY
        row["flags"] |= DIRTY if train else 0
        row["last_use"] = step
        row["score"] += per_use
        if row["next_in"] == 0:
            num_idle += 1
            continue
        following = place + u + row["next_in"]
        after = rows[following & last]
        hand_on(row, after)
        if not row["flags"] & PINNED:
            at = after["step"] & last_step
            ring.queued[(ring.first[at] + ring.tails[at]) & last] = following - ring.first[at]
            ring.tails[at] += 1
    return num_dirtied, num_idle


@compiled_loop
def close_gaps(rows: Records, cells: U64, oldest: int, head: int) -> int:
    """Moves idle rows up to the head, in their order. Returns the new oldest place."""
    last, free = len(rows) - 1, head
    for place in range(head - 1, oldest - 1, -1):
        row = rows[place & last]
        if row["slot"] != NONE:
            free -= 1
            if free != place:
                cells[locate_place(cells, row["key"], place)] = (hash_of(row["key"]) << PLACE_BITS) | (
                    np.uint64(free) & LOW
                )
                rows[free & last] = row
                row["slot"] = NONE
    return free
