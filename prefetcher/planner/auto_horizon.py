"""How far ahead ids are read where the job file says "auto": while more would change what is fetched, within a budget of bytes.

A plan that took victims and left no idle row had nothing to guess: it knew when every row that stayed is needed again, and knowing more
would have changed nothing. One that left idle rows chose among rows of which it did not know that, so the horizon grows. While a group
still has free slots there is nothing to evict, and the horizon prepares for when there is: it grows by 8 batches a plan, to about eight
times the plans in which the cache is filled once, which fetched not one row more than the bound on 18 logs (docs/experiments.md).

Only the plans and the budget decide, never time: two runs over the same data have the same horizon at every step.
"""

from rowcast.prefetcher.planner.group_planner import GroupPlanner

WHILE_FILLING = 8  # batches a plan
SHARE = 16  # of the horizon, a plan, while there is something to guess


class AutoHorizon:
    """`least`: batches known beyond the one being planned at the start. `id_bytes`: what the known batches may take, as they count it."""

    def __init__(self, least: int, id_bytes: int) -> None:
        self.num_batches = least
        self._budget_bytes = id_bytes

    def grow(self, groups: tuple[GroupPlanner, ...], known_bytes: int, num_known: int) -> int:
        """After a plan; `known_bytes` of the `num_known` batches that are known now. Returns the new horizon."""
        wanted = self.num_batches + max(self._wanted(group) for group in groups)
        if wanted * known_bytes <= self._budget_bytes * num_known:
            self.num_batches = wanted
        return self.num_batches

    def _wanted(self, group: GroupPlanner) -> int:
        if group.num_slots >= group.group.num_rows:
            return 0
        if group.occupancy.num_free:
            return WHILE_FILLING
        return 1 + self.num_batches // SHARE if group.guessed else 0
