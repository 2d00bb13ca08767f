"""Evicts rows by LFU: a row's score is the number of batches that used it since its fill."""

from collections.abc import Iterable

from rowcast.prefetcher.planner.eviction import LeastScore
from rowcast.runtime.arrays import I64


def new_policy(first_batches: Iterable[I64]) -> "UseCounts":
    return UseCounts()


class UseCounts(LeastScore):
    per_use = 1
