"""Counts the rows that enter and leave a store's memory tier over a recording, and those from the cold tier.

An untrained row is stored nowhere, so bringing it into memory reads nothing. Once a step has trained it, it is in
memory or in the cold tier, as every trained row is home before it leaves memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.planner.group_planner import GroupMoves
from rowcast.prefetcher.stores.store import ABSENT
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.runtime.arrays import I64


@dataclass(frozen=True, kw_only=True, slots=True)
class TierMoves:
    entered: I64  # [P, G] rows that enter memory
    from_cold: I64  # [P, G] of these, from the cold tier; the others were never trained
    left: I64  # [P, G]


class TierCounter:
    def __init__(self, groups: Sequence[GroupSpec], num_steps: int, most_rows: Sequence[int]) -> None:
        """`most_rows`: of each group, no fewer than all steps touch. It takes memory only for rows that are touched."""
        entered, from_cold, left = (np.zeros((num_steps, len(groups)), np.int64) for _ in range(3))
        self.moves = TierMoves(entered=entered, from_cold=from_cold, left=left)
        self._trained = [TouchedRows(group, most) for group, most in zip(groups, most_rows, strict=True)]

    def note(self, position: int, tier: Sequence[GroupMoves]) -> list[I64]:
        """Applies a step's plan, before `train`. Returns the rows of each group from the cold tier."""
        from_cold = []
        for index, (group, trained) in enumerate(zip(tier, self._trained, strict=True)):
            keys = group.fetch_keys
            from_cold.append(keys[trained.of(keys) != ABSENT])
            self.moves.entered[position, index] = len(keys)
            self.moves.from_cold[position, index] = len(from_cold[-1])
            self.moves.left[position, index] = len(group.evict_keys)
        return from_cold

    def train(self, keys: Sequence[I64]) -> None:
        """Notes that the step trains these rows of each group."""
        for trained, own in zip(self._trained, keys, strict=True):
            trained.added(own)
