"""The compiled loops over an array of records and its marks, and over bits of rows.

A mark is one byte a row: 0 where it was never written and what the array holds means nothing, PRESENT where it was. A bit is one of 64 in
a word; that of row r is bit r % 64 of word r // 64.
"""

import numpy as np
import numpy.typing as npt

from rowcast.runtime.compiled import compiled_loop, prefetch

Words = npt.NDArray[np.uint64]  # [rows, record_bytes / 8]; of bits [ceil(rows / 64)]
Marks = npt.NDArray[np.uint8]  # [rows]
Positions = npt.NDArray[np.int64]

PRESENT = 1
BITS = 64  # of a word

ROWS_AHEAD = 8  # asked for before they are copied
LINE_WORDS = 8  # of a cache line


@compiled_loop
def gather(words: Words, marks: Marks, positions: Positions, out: Words) -> int:
    """out[i] = words[positions[i]] for every row present. Returns how many are absent: their out[i] is left as it was."""
    width, flat = words.shape[1], words.reshape(-1)
    num_absent = 0
    for i in range(len(positions)):
        if i + ROWS_AHEAD < len(positions):
            prefetch(marks, positions[i + ROWS_AHEAD])
            for word in range(0, width, LINE_WORDS):
                prefetch(flat, positions[i + ROWS_AHEAD] * width + word)
        row = positions[i]
        if marks[row] == 0:
            num_absent += 1
            continue
        for word in range(width):
            out[i, word] = words[row, word]
    return num_absent


@compiled_loop
def scatter(source: Words, positions: Positions, words: Words, marks: Marks) -> None:
    """words[positions[i]] = source[i], and marks the rows present."""
    for i in range(len(positions)):
        row = positions[i]
        marks[row] = PRESENT
        for word in range(source.shape[1]):
            words[row, word] = source[i, word]


@compiled_loop
def set_bits(bits: Words, rows: Positions) -> None:
    for i in range(len(rows)):
        bits[rows[i] >> 6] |= np.uint64(1) << np.uint64(rows[i] & 63)


@compiled_loop
def clear_bits(bits: Words, rows: Positions) -> None:
    for i in range(len(rows)):
        bits[rows[i] >> 6] &= ~(np.uint64(1) << np.uint64(rows[i] & 63))


@compiled_loop
def clear_all_bits(bits: Words) -> None:
    """Only words with bits are written: the others may have no memory yet."""
    for i in range(len(bits)):
        if bits[i]:
            bits[i] = 0


@compiled_loop
def count_bits(bits: Words) -> int:
    found = 0
    for i in range(len(bits)):
        word = bits[i]
        while word:
            word &= word - np.uint64(1)
            found += 1
    return found


@compiled_loop
def find_bits(bits: Words, start: int, end: int, out: Positions) -> tuple[int, int]:
    """Writes the rows of [start, end) whose bit is set into `out`, ascending, until it is full. Returns how many there are, and where to
    go on.
    """
    found, row = 0, start
    while row < end and found < len(out):
        left = bits[row >> 6] >> np.uint64(row & 63)
        if left == 0:
            row += BITS - (row & 63)
            continue
        if left & np.uint64(255) == 0:
            row += 8
            continue
        if left & np.uint64(1):
            out[found] = row
            found += 1
        row += 1
    return found, min(row, end)
