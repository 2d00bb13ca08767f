"""Defines the eviction policies of `job/schema.py` and their interface, and removes the rows that a policy chose.

Rows without a known next use are idle and form one line in the order (last use, key); rows with a known next use are in
the queue of that step, in the same order (horizon.py):

    idle                 7 3 . 9 4 . 5
    queue of step p+1    2 6
    queue of step p+2    8 1

The line is the group's; each part of it, a range of keys, has queues of its own. So a policy that takes rows from the
heads of queues gives only their number, and each part takes its own.

A policy that does not look ahead knows only the batch being planned: all rows are idle.
"""

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol

import numpy as np

from rowcast.job.schema import EVICTION_POLICIES
from rowcast.prefetcher.planner.directory import AHEAD, Records
from rowcast.prefetcher.planner.grouping import copy, numbered, sort_pairs
from rowcast.prefetcher.planner.horizon import DIRTY, FLAG_BITS, NONE, UNUSED, Occurrences
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled, compiled_loop, compiled_part, prefetch_to_write


class Residents(NamedTuple):
    """A group's resident rows while a step is planned, by position. The step's rows may not leave."""

    occurrences: Occurrences  # with the queues of one part
    oldest: int  # the line of idle rows starts here
    head: int  # and ends here, where the step's own rows start
    step: int
    last_step: int  # the last known step


class Victims(NamedTuple):
    """Rows that leave, by part: part k's are the first counts[k] of row k."""

    bounds: I64  # [K + 1] part k's keys are from bounds[k] to below bounds[k + 1]
    counts: I64  # [K]
    positions: I64  # [K, V]


class Choice(NamedTuple):
    """What a policy takes besides the victims that it picked."""

    queued: I64  # [K, S] how many of part k leave the head of the queue of step last_step - s
    oldest: int  # no idle row before this position remains


class Left(NamedTuple):
    """The rows that left a part."""

    keys: I64
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

    def choose(self, parts: Sequence[Residents], victims: Victims, num_victims: int) -> Choice:
        """Chooses `num_victims` rows, or fewer only if no more may leave: adds some to `victims`, and takes the others
        from the heads of queues.

        `parts`: the residents, with each part's queues. Must not change them.
        """


class LeastScore:
    """The base of policies that score rows and do not look ahead: the row with the least score leaves first. Ties: by
    oldest last use, then smallest key.
    """

    scored = True
    per_use = 0

    def __init__(self, first_batches: Iterable[I64]) -> None:
        pass

    def first_scores(self, keys: I64) -> I32 | None:
        return None

    def choose(self, parts: Sequence[Residents], victims: Victims, num_victims: int) -> Choice:
        rows = parts[0]
        positions, scores = np.empty((2, rows.head - rows.oldest), np.int64)
        count = candidates(rows, positions, scores)
        order = np.arange(count, dtype=np.int32)
        sort_pairs(scores[:count], order)
        pick_all(rows.occurrences.rows, positions[order[:num_victims]], victims)
        return Choice(np.zeros((len(parts), 0), np.int64), rows.oldest)


class StaticCounts(LeastScore):
    """A static hot set: a row's score is the number of the run's first batches that use it."""

    def __init__(self, first_batches: Iterable[I64]) -> None:
        self._keys, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *first_batches]), return_counts=True)
        self._counts = counts.astype(np.int32)

    def first_scores(self, keys: I64) -> I32:
        at, scores = np.searchsorted(self._keys, keys), np.zeros(len(keys), np.int32)
        counted = at < len(self._keys)
        counted[counted] = self._keys[at[counted]] == keys[counted]
        scores[counted] = self._counts[at[counted]]
        return scores


class UseCounts(LeastScore):
    """LFU: a row's score is the number of batches that used it since its fill."""

    per_use = 1


def new_policy(name: str, first_batches: Iterable[I64]) -> EvictionPolicy:
    """`first_batches`: distinct keys of each of the run's first batches, read only by policies that use them."""
    module, _, factory = EVICTION_POLICIES[name].factory.partition(":")
    policy: EvictionPolicy = getattr(import_module(module), factory)(first_batches)
    return policy


def new_victims(bounds: I64, most: int) -> Victims:
    num_parts = len(bounds) - 1  # memory that no victim is written to is never touched
    return Victims(bounds, np.zeros(num_parts, np.int64), np.empty((num_parts, most), np.int64))


@compiled_loop
def candidates(rows: Residents, positions: I64, scores_found: I64) -> int:
    """Fills the arrays with the idle rows; returns how many."""
    records, scores, count = rows.occurrences.rows, rows.occurrences.scores, 0
    for position in range(rows.oldest, rows.head):
        positions[count], scores_found[count] = position, scores[position & (len(scores) - 1)]
        count += records[position & (len(records) - 1)]["slot"] >= 0
    return count


@compiled_loop
def pick_all(rows: Records, positions: I64, victims: Victims) -> None:
    k: int = np.int64(0)  # type: ignore[assignment]  # a literal 0 would be compiled apart
    for position in positions:
        k = pick(rows[position & (len(rows) - 1)], position, victims, k)


@compiled_part
def pick(row: np.void, position: int, victims: Victims, k: int) -> int:
    """Adds a row to its part. Returns the part; the search begins at `k`, mostly the part of the row before."""
    while row["key"] < victims.bounds[k]:
        k -= 1
    while row["key"] >= victims.bounds[k + 1]:
        k += 1
    victims.positions[k, victims.counts[k]] = position
    victims.counts[k] += 1
    return k


@compiled_loop
def take_queued(rows: Residents, counts: I64, positions: I64, taken: int) -> int:
    """Moves the heads of a part's queues to its victims, `taken` until now: counts[s] of step last_step - s. Returns
    how many victims it has."""
    queued, last_known = rows.occurrences.queued, len(rows.occurrences.queued) - 1
    for s in range(len(counts)):
        at = (rows.last_step - s) & (len(rows.occurrences.first) - 1)
        first, head = rows.occurrences.first[at], rows.occurrences.heads[at]
        for i in range(first + head, first + head + counts[s]):
            positions[taken] = first + queued[i & last_known]
            taken += 1
        rows.occurrences.heads[at] += counts[s]
    return taken


@compiled_loop
def leave(rows: Residents, positions: I64, left: Left) -> int:
    """Removes the rows of a part at these positions, which have left their queues, and fills `left` with them. Returns
    how many were idle."""
    records, last, num_idle = rows.occurrences.rows, len(rows.occurrences.rows) - 1, 0
    for i in range(len(positions)):
        if i + AHEAD < len(positions):
            prefetch_to_write(records, positions[i + AHEAD] & last)
        row = records[positions[i] & last]
        left.keys[i], left.slots[i] = row["key"], row["slot"]
        left.last_uses[i], left.dirty[i] = row["use"] >> FLAG_BITS, row["use"] & DIRTY
        row["slot"] = NONE
        num_idle += positions[i] < rows.head
        if positions[i] >= rows.head:
            row["use"] = rows.step << FLAG_BITS if row["use"] & DIRTY else UNUSED
    return num_idle


@compiled_loop
def oldest_idle(rows: Residents, oldest: int) -> int:
    """Returns where the line of idle rows starts, at `oldest` or after it."""
    records, last = rows.occurrences.rows, len(rows.occurrences.rows) - 1
    while oldest < rows.head and records[oldest & last]["slot"] < 0:
        oldest += 1
    return oldest


@compiled
def in_order(left: Left, keys: I64, slots: I32) -> int:
    """Fills `keys` and `slots`: dirty victims, then clean ones, each by ascending key. Returns how many are dirty."""
    by_key, which = np.empty(len(keys), np.int64), numbered(len(keys))
    copy(left.keys, by_key)
    sort_pairs(by_key, which)
    return dirty_first(by_key, which, left.slots, left.dirty, keys, slots)


@compiled_part
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


class FarthestNextUse:
    """Look-ahead: the row whose next use is farthest leaves first.

    An unknown next use counts as farthest. Ties: oldest last use, then smallest key. If no batch is known ahead this is
    LRU: every row is idle, in that order.
    """

    scored = False
    per_use = 0

    def __init__(self, first_batches: Iterable[I64]) -> None:
        pass

    def first_scores(self, keys: I64) -> None:
        """Returns None: rows have no scores."""

    def choose(self, parts: Sequence[Residents], victims: Victims, num_victims: int) -> Choice:
        rows = parts[0]
        oldest = pick_idle(rows, victims, num_victims)
        first, heads, tails = (
            np.stack([getattr(own.occurrences, name) for own in parts]) for name in ("first", "heads", "tails")
        )
        queued = np.zeros((len(parts), rows.last_step - rows.step), np.int64)
        searched = np.empty((3, len(parts)), np.int64)
        count_farthest(rows, first, heads, tails, num_victims - victims.counts.sum(), queued, searched)
        return Choice(queued, oldest)


@compiled_loop
def pick_idle(rows: Residents, victims: Victims, num_victims: int) -> int:
    """Picks rows from the head of the line, `num_victims` at most. Returns where the first one that remains may be."""
    records, last, taken = rows.occurrences.rows, len(rows.occurrences.rows) - 1, 0
    k: int = np.int64(0)  # type: ignore[assignment]  # a literal 0 would be compiled apart
    for position in range(rows.oldest, rows.head):
        if taken == num_victims:
            return position
        row = records[position & last]
        leaves = row["slot"] >= 0
        k = pick(row, position, victims, k)
        victims.counts[k] -= not leaves  # no branch: the processor cannot predict where the gaps are
        taken += leaves
    return rows.head


@compiled_loop
def count_farthest(
    rows: Residents, first: I64, heads: I32, tails: I32, num_left: int, counts: I64, searched: I64
) -> None:
    """Divides `num_left` victims among the queues, the farthest first. `first`, `heads` and `tails` [K, steps]: of each
    part. Fills `counts` as in `Choice`; uses `searched` [3, K]."""
    for s in range(counts.shape[1]):
        if not num_left:
            break
        at, size = (rows.last_step - s) & (heads.shape[1] - 1), 0
        for k in range(len(counts)):
            counts[k, s] = tails[k, at] - heads[k, at]
            size += counts[k, s]
        if size > num_left:
            for k in range(len(counts)):
                searched[0, k], searched[1, k] = 0, counts[k, s]
            find_oldest(rows, first[:, at], heads[:, at], searched, num_left)
            for k in range(len(counts)):
                counts[k, s] = searched[0, k]
        num_left -= min(size, num_left)


@compiled_part
def find_oldest(rows: Residents, first: I64, heads: I32, counts: I64, num_left: int) -> None:
    """Divides `num_left` victims of one queue by (last use, key). counts[1]: the rows of each part. Fills counts[0]:
    the victims of each part; uses counts[2]."""
    low, high = 0, rows.step
    while low < high:  # rows last used before `low` are too few, those up to `high` are enough
        middle, size = (low + high) // 2, 0
        for k in range(len(first)):
            counts[2, k] = used_until(
                rows.occurrences, first[k], first[k] + heads[k], counts[0, k], counts[1, k], middle
            )
            size += counts[2, k]
        enough = 1 if size >= num_left else 0
        for k in range(len(first)):
            counts[enough, k] = counts[2, k]
        low, high = (low, middle) if enough else (middle + 1, high)
    for k in range(len(first)):
        num_left -= counts[0, k]
    for k in range(len(first)):
        more = min(num_left, counts[1, k] - counts[0, k])
        counts[0, k] += more
        num_left -= more


@compiled_part
def used_until(occurrences: Occurrences, first: int, begin: int, low: int, high: int, last_use: int) -> int:
    """Returns how many rows of a queue that begins at `begin` were last used at `last_use` or before: from `low` to
    `high`."""
    rows, queued = occurrences.rows, occurrences.queued
    while low < high:
        middle = (low + high) // 2
        row = rows[(first + queued[(begin + middle) & (len(queued) - 1)]) & (len(rows) - 1)]
        if row["use"] >> FLAG_BITS <= last_use:
            low = middle + 1
        else:
            high = middle
    return low
