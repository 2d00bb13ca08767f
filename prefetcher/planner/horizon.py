"""Keeps the known batches, from the next plan's to the horizon, and each distinct row's occurrences in them.

The batches of one plan are a *bundle*. Its distinct rows are entered and planned together: to all that follows here it
is one batch, and "step" means the number of its plan.

A group's occurrences are kept in a circular buffer, batch after batch, by ascending key within a batch. A position is
counted over the whole run; its index in the buffer is the position modulo the buffer's size:

    | batch p-1: 3 4 8 | batch p: 3 7 9 | batch p+1: 3 8 | batch p+2: 7 8 | free ...
    oldest             head                                               tail
    next_in                       3 4 0            0 2             0 0     distance to the row's next occurrence, or 0

The state of a resident row is kept in its next occurrence. So a plan reads its batch's occurrences in sequence and
moves each row's state to the row's next occurrence, in a later batch in the same order of keys: planning never
searches, and rarely misses the processor's cache. A row without a known next use is *idle*: its state stays in its last
occurrence, before the head. So the occurrences from `oldest` to the head, read from left to right, are the line of idle
rows by (last use, key), with gaps where rows have moved.

With many slots, most occurrences are of idle rows, so the large buffer holds only their fields; the other fields of
known batches have smaller buffers. A buffer doubles in place, the large one only if closing its gaps would leave it
more than 5/8 full: so it has room for 1.6 to 3.2 times its rows.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from rowcast.prefetcher.planner.directory import (
    AHEAD,
    EMPTY,
    LOW,
    POSITION_BITS,
    Records,
    exchange,
    expect,
    hash_of,
    locate_position,
    zeros_apart,
)
from rowcast.prefetcher.planner.grouping import sort_pairs
from rowcast.protocol.batch import Scheduled
from rowcast.runtime.arrays import I32, I64, U64
from rowcast.runtime.compiled import compiled, compiled_loop, compiled_part, prefetch, prefetch_to_write

NONE = -1  # no slot or no step; only inside the planner's arrays
DIRTY, FLAG_BITS = 1, 1  # a flag: trained since its fill or the last barrier
UNUSED = NONE << FLAG_BITS
MOST_STEPS = 2**30  # what the flag leaves of an int32
FULLEST = (5, 8)  # fraction of the large buffer in use after closing gaps; above it, the buffer grows
OCCURRENCES_AHEAD = 8  # how many occurrences ahead the processor prefetches
INITIAL_OCCURRENCES = 1024
INITIAL_STEPS = 16
OCCURRENCE = np.dtype(
    [
        ("key", np.int64),
        # below 0: the row's state is not here. NONE once it has left; -2 - step while that step's batch waits for it
        ("slot", np.int32),
        # the last planned step since its fill that touches the row, if not resident: the step that evicted it dirty;
        # in the lowest bit its flag, if resident
        ("use", np.int32),
    ],
    align=True,
)
# that a distinct row of a known batch counts in lookahead.id_bytes: horizons, and so plans, follow from it
OCCURRENCE_BYTES = 36


class NeededRows(Protocol):
    """A batch's rows in one group: `Grouping`, or a rank's version of it."""

    @property
    def keys(self) -> I64:
        """[U] ascending: the distinct rows that must have slots here."""

    @property
    def num_unique(self) -> int: ...

    @property
    def num_lookups(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRows:
    """What a planner keeps of a known batch: not its ids."""

    size: int  # samples over all ranks
    groups: tuple[NeededRows, ...]
    id_bytes: int  # that it counts in lookahead.id_bytes


def id_bytes(groups: Sequence[NeededRows], num_levels: int) -> int:
    """Returns what a known batch with these rows counts in lookahead.id_bytes."""
    return sum([rows.nbytes + rows.num_unique * num_levels * OCCURRENCE_BYTES for rows in groups])


Places = I64 | slice


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """The batches of one plan, which follow each other and are of one kind."""

    plan: int  # its number
    steps: tuple[Scheduled[BatchRows], ...]
    keys: tuple[I64, ...]  # of each group, [U] ascending: the distinct rows of all steps
    places: tuple[tuple[Places, ...], ...]  # of each step and group: where its rows are among these

    @classmethod
    def of(cls, plan: int, steps: Sequence[Scheduled[BatchRows]]) -> "Bundle":
        groups = list(zip(*[[rows.keys for rows in step.batch.groups] for step in steps], strict=True))
        if len(steps) == 1:
            of_groups: list[tuple[I64, Sequence[Places]]] = [(own, [slice(None)]) for (own,) in groups]
        else:
            of_groups = [joined(own) for own in groups]
        keys, places = zip(*of_groups, strict=True)
        return cls(plan=plan, steps=tuple(steps), keys=keys, places=tuple(zip(*places, strict=True)))

    @property
    def first(self) -> Scheduled[BatchRows]:
        return self.steps[0]

    @property
    def last(self) -> Scheduled[BatchRows]:
        return self.steps[-1]

    @property
    def id_bytes(self) -> int:
        return sum(step.batch.id_bytes for step in self.steps)


def joined(ascending: Sequence[I64]) -> tuple[I64, Sequence[Places]]:
    """Returns all distinct keys, ascending, and where those of each array are among them."""
    together = np.concatenate(ascending)
    order = together.argsort(kind="stable")  # merges what ascends: a tenth of np.unique's time
    together = together[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = together[1:] != together[:-1]
    places = np.empty(len(order), np.int64)
    places[order] = np.cumsum(is_new) - 1
    return together[is_new], np.split(places, np.cumsum([len(keys) for keys in ascending[:-1]]))


class Horizon:
    """The known bundles, in order. A plan may be made once `num_ahead` batches and `least_plans` bundles beyond its own
    are known, or the data has ended."""

    def __init__(self, num_ahead: int, least_plans: int) -> None:
        assert num_ahead >= 0, f"a horizon of {num_ahead} batches"
        self.num_ahead, self.least_plans = num_ahead, least_plans
        self.id_bytes = 0  # of the known batches
        self.num_batches = 0
        self._known: deque[Bundle] = deque()
        self.following: int | None = None  # the next step to be added
        self._ended = False

    def check_next(self, step: int) -> None:
        """Asserts that this step may enter now: it follows the last one, and the next plan needs it."""
        assert not self._ended, f"step {step} was added after the end of the data"
        assert self.following in (None, step), f"step {step} was added, but step {self.following} follows"
        assert not self.ready, f"step {step} was added, but the {self.num_batches} known batches are enough"

    def append(self, bundle: Bundle) -> None:
        self._known.append(bundle)
        self.id_bytes += bundle.id_bytes
        self.num_batches += len(bundle.steps)

    def end(self) -> None:
        self._ended = True

    def wants(self, num_open: int) -> int:
        """Returns how many batches surely enter before the next plan. `num_open`: known, and in no bundle yet."""
        if self._ended or self.ready:
            return 0
        num_next = len(self._known[0].steps) if self._known else 1
        missing = self.num_ahead + num_next - self.num_batches - num_open
        return max(1, missing, self.least_plans + 1 - len(self._known))

    @property
    def ready(self) -> bool:
        if self._ended or not self._known:
            return len(self._known) > 0
        num_beyond = self.num_batches - len(self._known[0].steps)
        return num_beyond >= self.num_ahead and len(self._known) > self.least_plans

    @property
    def next(self) -> Bundle:
        assert self.ready, f"{self.num_batches} batches are known, and {self.num_ahead} beyond the next plan are needed"
        return self._known[0]

    def ends_from(self, step: int) -> bool:
        """Whether the oldest bundle is known to end at this step or later."""
        return len(self._known) > 0 and self._known[0].last.step >= step

    @property
    def last_plan(self) -> int:
        return self._known[-1].plan

    def advance(self) -> None:
        bundle = self._known.popleft()
        self.id_bytes -= bundle.id_bytes
        self.num_batches -= len(bundle.steps)


class Occurrences(NamedTuple):
    """A group's occurrences, and each known step's queue of one part: which of its batch's rows in the part's range of
    keys are resident. Sizes are powers of two.

    The queue of a step holds positions counted from the part's first, by (last use, key) ascending: the order in which
    the rows leave. A row joins at the tail and leaves at the head, so a queue is never searched and never goes stale.
    """

    rows: Records  # OCCURRENCE
    scores: I32  # see eviction.py; as many as occurrences, or a single one if the policy has no scores
    next_in: I32  # of the known batches only, like the next
    queued: I32  # the queues; a part's queue of a step starts at its first position there
    first: I64  # the part's first position in the batch, by step; the following are of the part alone, too
    heads: I32  # the queue's head, counted from that position
    tails: I32

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self)

    @property
    def queue_bytes(self) -> int:
        """Those of the part alone."""
        return self.first.nbytes + self.heads.nbytes + self.tails.nbytes


class Revived(NamedTuple):
    """Rows of an entering batch that were idle, as many as its queue's tail."""

    positions: I64  # where they were in the line
    rows: I32  # counted from the batch's first


def new_occurrences(
    num_occurrences: int = INITIAL_OCCURRENCES, num_steps: int = INITIAL_STEPS, *, scored: bool = False
) -> Occurrences:
    """Both must be powers of two."""
    next_in, queued = np.zeros(num_occurrences, np.int32), np.zeros(num_occurrences, np.int32)
    heads, tails = zeros_apart(num_steps, np.int32), zeros_apart(num_steps, np.int32)
    return Occurrences(
        rows=np.zeros(num_occurrences, OCCURRENCE),
        scores=np.zeros(num_occurrences if scored else 1, np.int32),
        next_in=next_in,
        queued=queued,
        first=zeros_apart(num_steps, np.int64),
        heads=heads,
        tails=tails,
    )


def occurrences_bytes(num_idle: int, num_known: int, *, scored: bool) -> int:
    """Returns the bytes of a ring that has held `num_idle` idle rows and `num_known` occurrences at once."""
    used, of_all = FULLEST
    num_places = enlarged(INITIAL_OCCURRENCES, -(-of_all * (num_idle + num_known) // used))
    known_bytes = 2 * np.dtype(np.int32).itemsize * enlarged(INITIAL_OCCURRENCES, num_known)
    return num_places * (OCCURRENCE.itemsize + (np.dtype(np.int32).itemsize if scored else 0)) + known_bytes


def enlarged(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size


def should_close(size: int, oldest: int, head: int, num_idle: int, tail: int, num_new: int) -> bool:
    """Returns whether the ring is full and closing its gaps makes room for `num_new` occurrences."""
    used, of_all = FULLEST
    return tail - oldest + num_new > size and of_all * (num_idle + tail - head + num_new) <= used * size


def make_room(occurrences: Occurrences, oldest: int, head: int, tail: int, num_new: int) -> None:
    """Makes room for `num_new` more occurrences, in place: no view of the arrays may be kept."""
    rows, scores, next_in, queued, *_ = occurrences
    for array, begin in ((rows, oldest), (scores, oldest), (next_in, head), (queued, head)):
        before, size = len(array), enlarged(len(array), tail - begin + num_new)
        if size > before > 1:
            array.resize(size, refcheck=False)
            spread(array, before, begin, tail)


def with_steps(occurrences: Occurrences, first: int, last: int) -> Occurrences:
    """Returns the same buffer, or one with queues for steps `first` to `last`; existing queues do not change."""
    size = len(occurrences.first)
    while size <= last - first:
        size *= 2
    if size == len(occurrences.first):
        return occurrences
    steps = np.arange(first, last)
    firsts, heads, tails = zeros_apart(size, np.int64), zeros_apart(size, np.int32), zeros_apart(size, np.int32)
    firsts[steps % size] = occurrences.first[steps % len(occurrences.first)]
    heads[steps % size] = occurrences.heads[steps % len(occurrences.first)]
    tails[steps % size] = occurrences.tails[steps % len(occurrences.first)]
    return occurrences._replace(first=firsts, heads=heads, tails=tails)


def with_own_queues(occurrences: Occurrences) -> Occurrences:
    """Returns the same ring for another part, with empty queues."""
    size = len(occurrences.first)
    return occurrences._replace(
        first=zeros_apart(size, np.int64), heads=zeros_apart(size, np.int32), tails=zeros_apart(size, np.int32)
    )


@compiled_loop
def spread(array: Records | I32, before: int, begin: int, end: int) -> None:
    """Moves these positions of a ring that had `before` entries to their indices in the larger one."""
    for position in range(begin, end):
        old, new = position & (before - 1), position & (len(array) - 1)
        if new != old:
            array[new] = array[old]


@compiled_loop
def enter(
    step: int,
    keys: I64,
    head: int,
    position: int,
    cells: U64,
    num_tracked: I64,
    occurrences: Occurrences,
    revived: Revived,
) -> int:
    """Tracks a part of the batch of `step` from `position` on; `keys` are its distinct rows, ascending. The caller has
    made room.

    Idle rows of the batch stop being idle: `revived` is filled with them, for `queue_revived`. Returns their number.
    """
    rows, next_in, at = occurrences.rows, occurrences.next_in, step & (len(occurrences.first) - 1)
    last, last_known = len(rows) - 1, len(next_in) - 1
    occurrences.first[at], occurrences.heads[at], occurrences.tails[at] = position, 0, 0
    num_idle = 0
    for u in range(len(keys)):
        expect(cells, keys, u + AHEAD)
        expect_occurrence(cells, rows, keys, u + OCCURRENCES_AHEAD)
        found = exchange(cells, num_tracked, rows, keys[u], position + u)
        row = rows[(position + u) & last]
        row["key"], row["slot"], row["use"] = keys[u], NONE - 1 - step, UNUSED
        next_in[(position + u) & last_known] = 0
        if found != EMPTY:
            distance = np.int64((np.uint64(position + u) - found) & LOW)
            before = int(position + u - distance)
            if before >= head:
                next_in[before & last_known] = distance
            else:
                move_state(rows, occurrences.scores, before, position + u)
                revived.positions[num_idle], revived.rows[num_idle] = before, u
                num_idle += 1
    occurrences.tails[at] = num_idle
    return num_idle


@compiled
def queue_revived(step: int, occurrences: Occurrences, revived: Revived) -> None:
    """Queues the formerly idle rows of a batch that has just entered, in the order that they had in the line."""
    at, last_known = step & (len(occurrences.first) - 1), len(occurrences.queued) - 1
    count = occurrences.tails[at]
    sort_pairs(revived.positions[:count], revived.rows[:count])
    for i in range(count):
        occurrences.queued[(occurrences.first[at] + i) & last_known] = revived.rows[i]


@compiled_part
def expect_occurrence(cells: U64, rows: Records, keys: I64, i: int) -> None:
    """Prefetches the occurrence of keys[i] that its first cell points to."""
    if i < len(keys):
        held = cells[hash_of(keys[i]) & np.uint64(len(cells) - 1)]
        if held != EMPTY:
            prefetch(rows, np.int64(held & LOW) & (len(rows) - 1))


@compiled_part
def move_state(rows: Records, scores: I32, before: int, after: int) -> None:
    """Moves a row's state between its occurrences at two positions."""
    source, target = rows[before & (len(rows) - 1)], rows[after & (len(rows) - 1)]
    target["slot"], target["use"] = source["slot"], source["use"]
    if is_scored(scores):
        scores[after & (len(scores) - 1)] = scores[before & (len(scores) - 1)]
    source["slot"] = NONE


@compiled_part
def is_scored(scores: I32) -> bool:
    """Without scores there is one element. Parts must not write to it: their threads would share its cache line."""
    return len(scores) > 1


@compiled_loop
def use_rows(
    step: int, train: bool, per_use: int, position: int, occurrences: Occurrences, unique_slots: I32
) -> tuple[int, int]:
    """Uses a part of the batch at `position`, whose rows are all resident. Each row's state moves to its next
    occurrence and joins that step's queue, or stays as an idle row's. Returns how many rows became dirty, and how many
    idle."""
    rows, scores, next_in = occurrences.rows, occurrences.scores, occurrences.next_in
    last, last_known, last_step = len(rows) - 1, len(next_in) - 1, len(occurrences.first) - 1
    num_dirtied = num_idle = 0
    for u in range(len(unique_slots)):
        ahead = position + u + AHEAD
        prefetch_to_write(rows, (ahead + next_in[ahead & last_known]) & last)
        row = rows[(position + u) & last]
        unique_slots[u] = row["slot"]
        num_dirtied += train and not row["use"] & DIRTY
        row["use"] = (step << FLAG_BITS) | (row["use"] & DIRTY) | (DIRTY if train else 0)
        if is_scored(scores):
            scores[(position + u) & (len(scores) - 1)] += per_use
        distance = next_in[(position + u) & last_known]
        if distance == 0:
            num_idle += 1
            continue
        following = position + u + distance
        at = (NONE - 1 - rows[following & last]["slot"]) & last_step
        move_state(rows, scores, position + u, following)
        queued_at = (occurrences.first[at] + occurrences.tails[at]) & last_known
        occurrences.queued[queued_at] = following - occurrences.first[at]
        occurrences.tails[at] += 1
    return num_dirtied, num_idle


@compiled_loop
def correct_cells(rows: Records, cells: U64, oldest: int, head: int, least: int, above: int) -> None:
    """Sets the positions that `close_gaps` will give to the idle rows with keys from `least` to below `above`."""
    last, free = len(rows) - 1, head
    for position in range(head - 1, oldest - 1, -1):
        ahead = rows[(position - AHEAD) & last]
        if ahead["slot"] >= 0 and least <= ahead["key"] < above:
            prefetch(cells, np.int64(hash_of(ahead["key"]) & np.uint64(len(cells) - 1)))
        row = rows[position & last]
        if row["slot"] >= 0:
            free -= 1
            if free != position and least <= row["key"] < above:
                cells[locate_position(cells, row["key"], position)] = (hash_of(row["key"]) << POSITION_BITS) | (
                    np.uint64(free) & LOW
                )


@compiled_loop
def close_gaps(rows: Records, scores: I32, oldest: int, head: int) -> int:
    """Moves idle rows up to the head, keeping their order. Returns the new oldest position."""
    last, free = len(rows) - 1, head
    for position in range(head - 1, oldest - 1, -1):
        row = rows[position & last]
        if row["slot"] >= 0:
            free -= 1
            if free != position:
                rows[free & last]["key"] = row["key"]
                move_state(rows, scores, position, free)
    return free


@compiled_loop
def take_dirty(rows: Records, oldest: int, tail: int, keys: I64, slots: I32) -> int:
    """Marks the dirty rows as clean and writes them to `keys` and `slots`. Returns their number."""
    last, found = len(rows) - 1, 0
    for position in range(oldest, tail):
        row = rows[position & last]
        if row["slot"] >= 0 and row["use"] & DIRTY:
            row["use"] &= ~DIRTY
            if found < len(keys):
                keys[found], slots[found] = row["key"], row["slot"]
            found += 1
    return found
