"""Maps each tracked row's key to the position of its last occurrence (horizon.py), in a hash.

A row is tracked while it is resident or in a batch of the horizon, so memory grows with slots and horizon, never with
the tables. The hash uses linear probing. It is searched once for each distinct row when a batch enters the horizon, and
once when a row leaves; a plan follows positions instead.

    cell    31 bits of the key's hash | low 32 bits of the position        or EMPTY

The lowest bits of the hash decide where the search for a key begins. The key itself is in the occurrence, which is
needed next anyway, so a direct hit costs one memory access for the cell and one for the occurrence.
"""

import math
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rowcast.runtime.arrays import GOLDEN, I64, U64
from rowcast.runtime.compiled import compiled_loop, compiled_part, prefetch

Records = npt.NDArray[np.void]
Value = TypeVar("Value", np.int32, np.int64)

NOWHERE = -1  # instead of a position: the row was not tracked
EMPTY = np.uint64(2**64 - 1)
LOW, POSITION_BITS = np.uint64(2**32 - 1), np.uint64(32)
INITIAL_CELLS = 2048
CELLS_A_ROW = 2.5  # at least
CELL_BYTES = 8
LINE_BYTES = 64
MOST_CELLS = 2**31  # as many as 31 bits of a hash distinguish
MOST_ROWS = int(MOST_CELLS / CELLS_A_ROW)  # that can be tracked
AHEAD = 24  # how many cells or rows ahead the processor prefetches


class Directory(NamedTuple):
    """The rows of one part. Compiled loops change the arrays but cannot grow them, so the caller makes room first.

    Loops take the arrays, not the tuple: passing the tuple makes a call for a single row several times as expensive.
    """

    cells: U64  # a power of two of them, at most two fifths in use
    num_tracked: I64  # [1]


def new_directory(num_cells: int = INITIAL_CELLS) -> Directory:
    """`num_cells` must be a power of two."""
    return Directory(np.full(num_cells, EMPTY), zeros_apart(1, np.int64))


def zeros_apart(size: int, dtype: type[Value]) -> npt.NDArray[Value]:
    """Returns zeros that share no cache line with another array: threads write to small arrays next to each other."""
    spare = LINE_BYTES // np.dtype(dtype).itemsize
    return np.zeros(size + 2 * spare, dtype)[spare:-spare]


def with_room(directory: Directory, num_new: int) -> Directory:
    num_cells = cells_for(int(directory.num_tracked[0]) + num_new, len(directory.cells))
    if num_cells == len(directory.cells):
        return directory
    grown = new_directory(num_cells)
    copy_cells(directory.cells, grown.cells)
    grown.num_tracked[0] = directory.num_tracked[0]
    return grown


def cells_for(num_rows: int, num_cells: int = INITIAL_CELLS) -> int:
    """The cells of a directory with `num_cells` that has grown until it has room for `num_rows`."""
    assert num_rows <= MOST_ROWS, f"{num_rows} rows, but {MOST_ROWS} can be tracked"
    while num_cells < CELLS_A_ROW * num_rows:
        num_cells *= 2
    return num_cells


def most_cells(num_rows: int, num_parts: int) -> int:
    """Returns the most cells of all parts' directories. Of several parts, each may have doubled just now."""
    return cells_for(num_rows) if num_parts == 1 else num_parts * INITIAL_CELLS + math.ceil(2 * CELLS_A_ROW * num_rows)


@compiled_part
def hash_of(key: int) -> np.uint64:
    """Returns 31 bits. Folding first mixes in the table, which is in the high bits."""
    folded = np.uint64(key) ^ (np.uint64(key) >> np.uint64(32))
    return (folded * GOLDEN) >> np.uint64(33)


@compiled_loop
def locate(cells: U64, rows: Records, key: int) -> np.uint64:
    """Returns the cell of a tracked row, or the empty cell for it. `rows` are the occurrences."""
    mask, last = np.uint64(len(cells) - 1), np.uint64(len(rows) - 1)
    tag = hash_of(key)
    cell = tag & mask
    while cells[cell] != EMPTY:
        if cells[cell] >> POSITION_BITS == tag and rows[cells[cell] & LOW & last]["key"] == key:
            break
        cell = (cell + np.uint64(1)) & mask
    return cell


@compiled_loop
def exchange(cells: U64, num_tracked: I64, rows: Records, key: int, position: int) -> np.uint64:
    """Sets the position of a row and returns its previous cell: EMPTY if the row was not tracked until now."""
    cell = locate(cells, rows, key)
    before = cells[cell]
    num_tracked[0] += before == EMPTY
    cells[cell] = (hash_of(key) << POSITION_BITS) | (np.uint64(position) & LOW)
    return before  # type: ignore[no-any-return]


@compiled_part
def locate_position(cells: U64, key: int, position: int) -> np.uint64:
    mask, tag = np.uint64(len(cells) - 1), hash_of(key)
    held = (tag << POSITION_BITS) | (np.uint64(position) & LOW)
    cell = tag & mask
    while cells[cell] != held:
        cell = (cell + np.uint64(1)) & mask
    return cell


@compiled_loop
def forget(cells: U64, num_tracked: I64, key: int, position: int) -> None:
    """Stops tracking a row. Later cells of its cluster move up, so that no search ends too early."""
    mask = np.uint64(len(cells) - 1)
    hole = locate_position(cells, key, position)
    cell = (hole + np.uint64(1)) & mask
    while cells[cell] != EMPTY:
        begin = (cells[cell] >> POSITION_BITS) & mask
        if ((cell - begin) & mask) >= ((cell - hole) & mask):
            cells[hole] = cells[cell]
            hole = cell
        cell = (cell + np.uint64(1)) & mask
    cells[hole] = EMPTY
    num_tracked[0] -= 1


@compiled_loop
def forget_before(position: int, cells: U64, num_tracked: I64, keys: I64, positions: I64) -> None:
    for i in range(len(keys)):
        expect(cells, keys, i + AHEAD)
        if positions[i] < position:
            forget(cells, num_tracked, keys[i], positions[i])


@compiled_part
def expect(cells: U64, keys: I64, i: int) -> None:
    if i < len(keys):
        prefetch(cells, np.int64(hash_of(keys[i]) & np.uint64(len(cells) - 1)))


@compiled_loop
def copy_cells(old: U64, new: U64) -> None:
    mask = np.uint64(len(new) - 1)
    for i in range(len(old)):
        if old[i] != EMPTY:
            cell = (old[i] >> POSITION_BITS) & mask
            while new[cell] != EMPTY:
                cell = (cell + np.uint64(1)) & mask
            new[cell] = old[i]
