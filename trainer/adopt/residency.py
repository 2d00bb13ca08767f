"""Which rows of a group are in which slots: a hash whose memory follows the slots, not the rows of the tables.

A cell holds a slot, and the slot's row is its key. So a row that leaves its slot needs no removal: its cell no longer
fits it. Once half of the cells are taken, all are emptied and those of today's rows are filled again.
"""

import numpy as np

from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled_loop

EMPTY = -1
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio


class Residency:
    def __init__(self, num_slots: int) -> None:
        bits = (4 * num_slots).bit_length()
        self._shift, self._num_taken = np.uint64(64 - bits), 0
        self._cells: I32 = np.full(2**bits, EMPTY, np.int32)
        self.row_in: I64 = np.full(num_slots, -1, np.int64)
        self.is_trained = np.zeros(num_slots, np.bool_)  # the row in each slot, since it came
        self.coming: I64 = np.full(num_slots, -1, np.int64)  # the newest step's row in each slot

    def slots(self, rows: I64) -> I64:
        """Returns -1 for rows in none."""
        found = np.empty(len(rows), np.int64)
        find_slots(self._cells, self._shift, self.row_in, rows, found)
        return found

    def fill(self, slots: I64) -> I64:
        """Notes that the rows that are coming are in these slots now, and returns them."""
        rows = self.coming[slots]
        self.row_in[slots], self.is_trained[slots] = rows, False
        if 2 * (self._num_taken + len(slots)) > len(self._cells):
            self._cells[:], self._num_taken = EMPTY, 0
            slots = np.flatnonzero(self.row_in >= 0)
        self._num_taken += add_slots(self._cells, self._shift, self.row_in, slots)
        return rows


def try_slots() -> None:
    """Compiles all loops."""
    own = Residency(num_slots=1)
    own.coming[0] = 3
    own.slots(own.fill(np.zeros(1, np.int64)))


@compiled_loop
def find_slots(cells: I32, shift: np.uint64, row_in: I64, rows: I64, found: I64) -> None:
    for i in range(len(rows)):
        cell = np.int64((np.uint64(rows[i]) * MULTIPLIER) >> shift)
        while cells[cell] != EMPTY and row_in[cells[cell]] != rows[i]:
            cell = (cell + 1) & (len(cells) - 1)
        found[i] = cells[cell]


@compiled_loop
def add_slots(cells: I32, shift: np.uint64, row_in: I64, slots: I64) -> int:
    """Returns how many cells were taken."""
    num_taken = 0
    for slot in slots:
        cell = np.int64((np.uint64(row_in[slot]) * MULTIPLIER) >> shift)
        while cells[cell] != EMPTY and row_in[cells[cell]] != row_in[slot]:
            cell = (cell + 1) & (len(cells) - 1)
        num_taken += cells[cell] == EMPTY
        cells[cell] = slot
    return num_taken
