"""Divides a compiled loop among threads by whole items, so that no result depends on the number of threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from rowcast.runtime.arrays import I32

MIN_FLOATS = 2**16  # the least work that is worth waking a thread for


class ThreadPool:
    """The caller's thread and more threads. One caller at a time."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._others = ThreadPoolExecutor(num_threads - 1, "kernels") if num_threads > 1 else None

    def share(
        self,
        work: Callable[[int, int], Any],
        first: int,
        end: int,
        item_floats: int,
        starts: I32 | None = None,
    ) -> None:
        """Calls work(from, to) for ranges that cover the items from `first` to `end` - 1. Returns when all are done.

        starts: for items of different sizes, the start of each item, and the end of the last item. item_floats: floats
        per unit of size.
        """
        num_parts = end - first if starts is None else int(starts[end]) - int(starts[first])
        num_shares = min(self._num_threads, num_parts * item_floats // MIN_FLOATS)
        if self._others is None or num_shares < 2:
            work(first, end)
            return
        ranges = pairwise(cuts(first, end, num_shares, starts))
        first_range = next(ranges)
        running = [self._others.submit(work, *other_range) for other_range in ranges]
        work(*first_range)
        for task in running:
            task.result()


def cuts(first: int, end: int, num_shares: int, starts: I32 | None) -> list[int]:
    """Returns the start of each range, and the end of the last; ranges have about the same size."""
    if starts is None:
        return [first + (end - first) * share // num_shares for share in range(num_shares + 1)]
    shares = np.linspace(starts[first], starts[end], num_shares + 1)[1:-1]
    return [first, *(first + np.searchsorted(starts[first:end], shares)).tolist(), end]
