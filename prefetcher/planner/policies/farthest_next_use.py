"""Evicts rows by look-ahead: the row whose next use is farthest leaves first.

An unknown next use counts as farthest. Ties: oldest last use, then smallest key. If no batch is known ahead this is
LRU: every row is idle, in that order.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from rowcast.prefetcher.planner.eviction import Choice, Residents, Victims, pick
from rowcast.prefetcher.planner.horizon import FLAG_BITS, Occurrences
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled_loop, compiled_part


def new_policy(first_batches: Iterable[I64]) -> "FarthestNextUse":
    return FarthestNextUse()


class FarthestNextUse:
    scored = False
    per_use = 0

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
