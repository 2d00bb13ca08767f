"""Where rows go in the files of a version: those that changed first, each part in the order it had before.

before    c a e | b d           two versions, newest first; b and e change, f is new, d is gone
now       e b f | c a           whole: what changed, then the rest
          e b f                 changed: nothing else
"""

from collections import deque

import numpy as np

from rowcast.prefetcher.stores.store import ABSENT
from rowcast.runtime.arrays import I64, U32, Bytes
from rowcast.runtime.compiled import compiled_loop

STAYS, CHANGED = 1, 2  # 0: it is gone or outdated


class Order:
    """Gives each row of one table its place: note all rows, `settle`, then ask for places in the same order.

    It takes 5 bytes for each row of the version before. `found` keeps blocks of `before`, 8 bytes a row, so that a
    changed version looks each row up once.
    """

    def __init__(self, num_before: int) -> None:
        """`num_before`: rows of all versions before, with those that are outdated."""
        self._marks = np.zeros(num_before, np.uint8)
        self._places = np.empty(0, np.uint32)
        self.found = deque[I64]()
        self._num_new = 0
        self._first_new = 0
        self.num_rows = 0

    def changed(self, before: I64) -> None:
        """`before`: where rows that changed were, or ABSENT."""
        self._marks[before[before != ABSENT]] = CHANGED

    def stays(self, before: I64) -> None:
        """`before`: of any rows of the version. Those that are new count here."""
        known = before[before != ABSENT]
        self._marks[known] = np.maximum(self._marks[known], STAYS)
        self._num_new += len(before) - len(known)

    def settle(self) -> None:
        self._places = np.empty(len(self._marks), np.uint32)
        self._first_new = number(self._marks, CHANGED, 0, self._places)
        self.num_rows = number(self._marks, STAYS, self._first_new + self._num_new, self._places)

    def places(self, before: I64) -> I64:
        """Returns the rows' places; new rows get theirs in the order of the calls."""
        out = np.empty(len(before), np.int64)
        is_new = before == ABSENT
        out[~is_new] = self._places[before[~is_new]]
        count = int(is_new.sum())
        out[is_new] = np.arange(self._first_new, self._first_new + count)
        self._first_new += count
        return out


@compiled_loop
def number(marks: Bytes, mark: int, first: int, places: U32) -> int:
    """Numbers what has the mark from `first` on; returns the next number."""
    for i in range(len(marks)):
        if marks[i] == mark:
            places[i] = first
            first += 1
    return first
