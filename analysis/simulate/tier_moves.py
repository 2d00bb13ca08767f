"""What enters and leaves the memory tier of a store over a recording, and how much of it comes from the cold tier.

A row that was never trained lies nowhere, so bringing it into memory reads nothing. Once a step has trained it, it is
in memory or in the cold tier, as every trained row is home before it leaves memory.
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
        """What the plan of a step changes, before `train`. Returns the rows of each group that the cold tier gives."""
        from_cold = []
        for index, (group, trained) in enumerate(zip(tier, self._trained, strict=True)):
            keys = group.fetch.keys
            from_cold.append(keys[trained.of(keys) != ABSENT])
            self.moves.entered[position, index] = len(keys)
            self.moves.from_cold[position, index] = len(from_cold[-1])
            self.moves.left[position, index] = len(group.evict)
        return from_cold

    def train(self, keys: Sequence[I64]) -> None:
        """The step trains these rows of each group."""
        for trained, own in zip(self._trained, keys, strict=True):
            trained.added(own)
