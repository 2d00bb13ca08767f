"""The ledger: for each sampled row, the checksum that its store returned or stored last, and the step that wrote it.

A hash with linear probing in plain arrays, at most two thirds full, 21 bytes per cell: 31 to 63 bytes for each sampled
row that the run has touched. It holds no lock; callers must take turns.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowcast.prefetcher.verify.checksum_loops import FREE, NOWHERE, enter, find_cells
from rowcast.runtime.arrays import I32, I64

INITIAL_CELLS = 1024  # a power of two
NEVER_WRITTEN = -1  # in `steps`: the store returned the row before it was ever written


@dataclass(frozen=True, slots=True)
class Entries:
    """What is known of some keys."""

    known: npt.NDArray[np.bool_]  # [n]; where False, the other arrays mean nothing
    checksums: I64  # [n]
    steps: I32  # [n] which step wrote the value, or NEVER_WRITTEN


class Ledger:
    def __init__(self) -> None:
        self.num_rows = 0
        self.num_unread = 0  # rows that were written and not read since
        self._make_cells(INITIAL_CELLS)

    def look_up(self, keys: I64) -> Entries:
        cells = np.empty(len(keys), np.int64)
        find_cells(self._keys, keys, cells)
        return Entries(cells != NOWHERE, self._checksums[cells], self._steps[cells])

    def given(self, keys: I64, checksums: I64) -> None:
        """Notes that the store returned these rows, and adds those that are not in the ledger."""
        missing = ~self.look_up(keys).known
        cells = self._cells(keys)
        self._checksums[cells[missing]] = checksums[missing]
        self._steps[cells[missing]] = NEVER_WRITTEN
        self._mark_unread(cells, to=False)

    def taken(self, keys: I64, checksums: I64, step: int | None) -> None:
        """Notes that these rows of `step` were written; None: a barrier before the first step."""
        cells = self._cells(keys)
        self._checksums[cells] = checksums
        self._steps[cells] = NEVER_WRITTEN if step is None else step
        self._mark_unread(cells, to=True)

    def unread_keys(self) -> I64:
        return np.sort(self._keys[self._unread])

    def _mark_unread(self, cells: I64, *, to: bool) -> None:
        before = int(self._unread[cells].sum())
        self._unread[cells] = to
        self.num_unread += to * len(cells) - before

    def _cells(self, keys: I64) -> I64:
        """Returns the rows' cells, adding missing rows; `keys` are distinct."""
        cells = np.empty(len(keys), np.int64)
        self.num_rows += find_cells(self._keys, keys, cells)
        if 3 * self.num_rows > 2 * len(self._keys):
            self._grow()
        enter(self._keys, keys, cells)
        return cells

    def _grow(self) -> None:
        used = self._keys != FREE
        before = self._keys[used], self._checksums[used], self._steps[used], self._unread[used]
        num_cells = len(self._keys)
        while 3 * self.num_rows > num_cells:
            num_cells *= 2
        self._make_cells(num_cells)
        cells = np.empty(len(before[0]), np.int64)
        enter(self._keys, before[0], cells)
        self._checksums[cells], self._steps[cells], self._unread[cells] = before[1:]

    def _make_cells(self, num_cells: int) -> None:
        self._keys = np.full(num_cells, FREE, np.int64)
        self._checksums = np.zeros(num_cells, np.int64)
        self._steps = np.full(num_cells, NEVER_WRITTEN, np.int32)
        self._unread = np.zeros(num_cells, np.bool_)
