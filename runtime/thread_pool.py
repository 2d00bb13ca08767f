"""Divides work among threads by whole items, so that no result depends on the number of threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import numpy as np

from rowcast.runtime.arrays import I32, I64

Part = TypeVar("Part")
Result = TypeVar("Result")


class ThreadPool:
    """The caller's thread and more threads, which several callers may share."""

    def __init__(self, num_threads: int = 1, *, name: str = "shares", least: int = 1) -> None:
        """`least`: the size of an item range that is worth waking a thread for."""
        self.num_threads, self._least = num_threads, least
        self._others = ThreadPoolExecutor(num_threads - 1, name) if num_threads > 1 else None

    def over(self, parts: Sequence[Part], work: Callable[[Part], Result]) -> list[Result]:
        """Returns work(part) for each part. The first is this thread's."""
        if self._others is None or len(parts) <= 1:
            return list(map(work, parts))
        running = [self._others.submit(work, part) for part in parts[1:]]
        return [work(parts[0]), *(task.result() for task in running)]

    def share(
        self,
        work: Callable[[int, int], Result],
        first: int,
        end: int,
        item_size: int = 1,
        starts: I32 | I64 | None = None,
    ) -> list[Result]:
        """Returns work(from, to) of ranges that cover the items from `first` to `end` - 1.

        starts: for items of different sizes, the start of each item, and the end of the last item. item_size: per unit
        of `starts`, or per item."""
        num_units = end - first if starts is None else int(starts[end]) - int(starts[first])
        num_shares = max(1, min(self.num_threads, num_units * item_size // self._least))
        ranges = [own for own in pairwise(cuts(first, end, num_shares, starts)) if own[0] < own[1]]
        return self.over(ranges, lambda own: work(*own))


def cuts(first: int, end: int, num_shares: int, starts: I32 | I64 | None) -> list[int]:
    """Returns the start of each range, and the end of the last; ranges have about the same size."""
    if starts is None:
        return [first + (end - first) * share // num_shares for share in range(num_shares + 1)]
    shares = np.linspace(starts[first], starts[end], num_shares + 1)[1:-1]
    return [first, *(first + np.searchsorted(starts[first:end], shares)).tolist(), end]
