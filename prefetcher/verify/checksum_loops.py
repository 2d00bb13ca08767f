"""Compiled loops of `--verify`: which rows are checked, their checksums, and the ledger's hash."""

import numpy as np

from rowcast.prefetcher.planner.directory import hash_of
from rowcast.runtime.arrays import FACTOR_1, FACTOR_2, GOLDEN, I32, I64
from rowcast.runtime.compiled import compiled_loop

NOWHERE = -1  # instead of a cell: the row is not in the ledger
FREE = -1  # instead of a key: the cell is empty
SAMPLE_RANGE = 2**32


@compiled_loop
def find_sampled(keys: I64, threshold: int, out: I64) -> int:
    """Sets out[:n] to the positions of the sampled keys, n of them. `threshold` from 0 (none) to SAMPLE_RANGE (all).

    Samples by a hash of only the key, with SplitMix64's constants. It differs from the ledger's hash, so that samples
    spread over its cells."""
    found = 0
    for i in range(len(keys)):
        mixed = (np.uint64(keys[i]) + GOLDEN) * FACTOR_1
        mixed = (mixed ^ (mixed >> np.uint64(29))) * FACTOR_2
        if np.int64(mixed >> np.uint64(32)) < threshold:
            out[found] = i
            found += 1
    return found


@compiled_loop
def row_checksums(words: I32, positions: I64, constants: I64, out: I64) -> None:
    """Sets out[i] to the checksum of words[positions[i]]; see `rowcast.protocol.row_checksum`."""
    for i in range(len(positions)):
        total = np.int64(0)
        for column in range(words.shape[1]):
            total += np.int64(words[positions[i], column]) * constants[column]
        out[i] = total


@compiled_loop
def find_cells(cells: I64, keys: I64, out: I64) -> int:
    """Sets out[i] to the cell of keys[i], or NOWHERE. Returns how many are nowhere. There must be a free cell."""
    mask, missing = np.uint64(len(cells) - 1), 0
    for i in range(len(keys)):
        cell = hash_of(keys[i]) & mask
        while cells[cell] != FREE and cells[cell] != keys[i]:
            cell = (cell + np.uint64(1)) & mask
        if cells[cell] == FREE:
            out[i] = NOWHERE
            missing += 1
        else:
            out[i] = np.int64(cell)
    return missing


@compiled_loop
def enter(cells: I64, keys: I64, out: I64) -> None:
    """Like `find_cells`, but keys that are nowhere get a cell. The caller must have made room."""
    mask = np.uint64(len(cells) - 1)
    for i in range(len(keys)):
        cell = hash_of(keys[i]) & mask
        while cells[cell] != FREE and cells[cell] != keys[i]:
            cell = (cell + np.uint64(1)) & mask
        cells[cell] = keys[i]
        out[i] = np.int64(cell)
