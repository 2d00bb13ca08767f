"""Look-ahead: the rows whose next use is farthest leave first, unknown counting as farthest; ties by oldest last use, then smallest key.

Where no batch is known ahead this is LRU: every row is idle, and they stand in that order.
"""

from collections.abc import Iterable

from rowcast.prefetcher.planner.eviction import Residents, Victims, pick
from rowcast.prefetcher.planner.horizon import AHEAD_IN_RING, NONE, PINNED
from rowcast.runtime.arrays import I64
from rowcast.runtime.compiled import compiled_loop, prefetch


def new_policy(first_batches: Iterable[I64]) -> "FarthestNextUse":
    return FarthestNextUse()


class FarthestNextUse:
    per_use = 0

    def first_scores(self, keys: I64) -> None:
        """Rows have no scores."""

    def choose(self, rows: Residents, victims: Victims) -> int:
        return pick_queued(rows, victims, pick_idle(rows, victims))


@compiled_loop
def pick_idle(rows: Residents, victims: Victims) -> int:
    """Picks rows from the head of the line, at most as many as are wanted; returns how many."""
    cells, last, taken = rows.ring.rows, len(rows.ring.rows) - 1, 0
    for place in range(rows.oldest, rows.head):
        if taken == len(victims.keys):
            break
        row = cells[place & last]
        if row["slot"] != NONE and not row["flags"] & PINNED:
            pick(row, place, victims, taken)
            taken += 1
    return taken


@compiled_loop
def pick_queued(rows: Residents, victims: Victims, taken: int) -> int:
    """Fills `victims` up from `taken` with rows whose next use is known, the farthest first."""
    ring, queued, last = rows.ring.rows, rows.ring.queued, len(rows.ring.rows) - 1
    for next_use in range(rows.last_step, rows.step, -1):
        at = next_use & (len(rows.ring.first) - 1)
        first, head, tail = rows.ring.first[at], rows.ring.heads[at], rows.ring.tails[at]
        for i in range(first + head, first + min(tail, head + len(victims.keys) - taken)):
            prefetch(ring, (first + queued[(i + AHEAD_IN_RING) & last]) & last)
            place = first + queued[i & last]
            pick(ring[place & last], place, victims, taken)
            taken += 1
    return taken
