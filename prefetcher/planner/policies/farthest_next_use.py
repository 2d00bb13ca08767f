"""Evicts rows by look-ahead: the row whose next use is farthest leaves first.

An unknown next use counts as farthest. Ties: oldest last use, then smallest key. If no batch is known ahead this is
LRU: every row is idle, in that order.
"""

from collections.abc import Iterable

from rowcast.prefetcher.planner.eviction import Residents, Victims, pick
from rowcast.prefetcher.planner.horizon import OCCURRENCES_AHEAD, PINNED
from rowcast.runtime.arrays import I64
from rowcast.runtime.compiled import compiled_loop, prefetch


def new_policy(first_batches: Iterable[I64]) -> "FarthestNextUse":
    return FarthestNextUse()


class FarthestNextUse:
    scored = False
    per_use = 0

    def first_scores(self, keys: I64) -> None:
        """Returns None: rows have no scores."""

    def choose(self, rows: Residents, victims: Victims) -> int:
        return pick_queued(rows, victims, pick_idle(rows, victims))


@compiled_loop
def pick_idle(rows: Residents, victims: Victims) -> int:
    """Picks rows from the head of the line until `victims` is full. Returns how many."""
    records, last, taken = rows.occurrences.rows, len(rows.occurrences.rows) - 1, 0
    for position in range(rows.oldest, rows.head):
        if taken == len(victims.keys):
            break
        row = records[position & last]
        if row["slot"] >= 0 and not row["use"] & PINNED:
            pick(row, position, victims, taken)
            taken += 1
    return taken


@compiled_loop
def pick_queued(rows: Residents, victims: Victims, taken: int) -> int:
    """Fills `victims` from `taken` on with rows whose next use is known, the farthest first."""
    records, queued = rows.occurrences.rows, rows.occurrences.queued
    last, last_known = len(records) - 1, len(queued) - 1
    for next_use in range(rows.last_step, rows.step, -1):
        at = next_use & (len(rows.occurrences.first) - 1)
        first, head, tail = rows.occurrences.first[at], rows.occurrences.heads[at], rows.occurrences.tails[at]
        for i in range(first + head, first + min(tail, head + len(victims.keys) - taken)):
            prefetch(records, (first + queued[(i + OCCURRENCES_AHEAD) & last_known]) & last)
            position = first + queued[i & last_known]
            pick(records[position & last], position, victims, taken)
            taken += 1
    return taken
