"""Evicts rows by a fixed score: the number of the run's first batches that use the row (a static hot set)."""

from collections.abc import Iterable

import numpy as np

from rowcast.prefetcher.planner.eviction import LeastScore
from rowcast.runtime.arrays import I32, I64


def new_policy(first_batches: Iterable[I64]) -> "StaticCounts":
    return StaticCounts(first_batches)


class StaticCounts(LeastScore):
    def __init__(self, first_batches: Iterable[I64]) -> None:
        self._keys, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *first_batches]), return_counts=True)
        self._counts = counts.astype(np.int32)

    def first_scores(self, keys: I64) -> I32:
        at, scores = np.searchsorted(self._keys, keys), np.zeros(len(keys), np.int32)
        counted = at < len(self._keys)
        counted[counted] = self._keys[at[counted]] == keys[counted]
        scores[counted] = self._counts[at[counted]]
        return scores
