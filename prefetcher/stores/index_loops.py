"""Compiled loops over an index: for each position in a group, the number + 1 of the row, or 0 if it has none."""

import numpy as np

from rowcast.job.tables import KEY_SHIFT
from rowcast.prefetcher.stores.store import ABSENT, Keys
from rowcast.runtime.arrays import I64, U32, U64
from rowcast.runtime.compiled import compiled_loop


@compiled_loop
def find_in_index(index: U32, shifts: I64, keys: Keys, numbers: I64) -> int:
    """Sets the number of each key. Returns how many are absent. `shifts` [tables]: from a key to its row's position."""
    num_absent = 0
    for i in range(len(keys)):
        numbers[i] = np.int64(index[keys[i] + shifts[keys[i] >> KEY_SHIFT]]) - 1
        num_absent += numbers[i] == ABSENT
    return num_absent


@compiled_loop
def add_to_index(index: U32, shifts: I64, keys: Keys, numbers: I64, count: int) -> int:
    """Numbers the absent keys. Returns how many rows have a number now."""
    for i in range(len(keys)):
        if numbers[i] == ABSENT:
            numbers[i] = count
            count += 1
            index[keys[i] + shifts[keys[i] >> KEY_SHIFT]] = count
    return count


@compiled_loop
def select_in_index(index: U32, bits: U64, start: int, end: int, positions: I64, numbers: I64) -> tuple[int, int]:
    """Fills `positions` and `numbers` with the rows at [start, end) whose bit is set, ascending, until they are full.
    Returns how many there are, and where to continue."""
    found, at = 0, start
    while at < end and found < len(positions):
        number = np.int64(index[at]) - 1
        if number != ABSENT and bits[number >> 6] >> np.uint64(number & 63) & np.uint64(1):
            positions[found], numbers[found] = at, number
            found += 1
        at += 1
    return found, at
