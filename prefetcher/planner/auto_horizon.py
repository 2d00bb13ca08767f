"""Grows the horizon, within a budget of bytes, while knowing more batches would change the fetched rows.

A plan that evicted rows and left no idle row guessed nothing: it knew the next use of every remaining row, and knowing
more would have changed nothing. A plan that left idle rows chose among rows without a known next use, so the horizon
grows. While a group has free slots there is nothing to evict yet, and the horizon grows by 8 batches per plan in
preparation, to about eight times the plans that fill the cache once. On 18 logs this fetched exactly as many rows as
the bound (docs/log/planner.md).

All levels count, so the horizon grows until none has anything to guess.

Only the plans and the budget decide, never time: two runs over the same data have the same horizon at every step.
"""

from collections.abc import Sequence

from rowcast.prefetcher.planner.group_planner import GroupPlanner

WHILE_FILLING = 8  # batches per plan
SHARE = 16  # the horizon grows by 1/16 per plan while plans guess


class AutoHorizon:
    """`least`: batches known beyond the one being planned at the start. `id_bytes`: the budget for known batches."""

    def __init__(self, least: int, id_bytes: int) -> None:
        self.num_batches = least
        self._budget_bytes = id_bytes

    def grow(self, groups: Sequence[GroupPlanner], known_bytes: int, num_known: int) -> int:
        """Returns the new horizon after a plan. `groups`: of every level. `known_bytes`: bytes of the `num_known`
        batches known now."""
        proposed = self.num_batches + max(self._growth(group) for group in groups)
        if proposed * known_bytes <= self._budget_bytes * num_known:
            self.num_batches = proposed
        return self.num_batches

    def _growth(self, group: GroupPlanner) -> int:
        if group.num_slots >= group.group.num_rows:
            return 0
        if group.occupancy.num_free:
            return WHILE_FILLING
        return 1 + self.num_batches // SHARE if group.guessed else 0
