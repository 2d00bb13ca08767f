"""The compiled loops over an array of records and its marks.

A mark is one byte a row. The rows with a given bit are looked for eight at a time: `lanes` is the u64 view of the marks, which are
padded to whole lanes.

    0                   never written; what the array holds there means nothing
    PRESENT             written
    PRESENT | CHANGED   written since the last checkpoint
"""

import numpy as np

from rowcast.runtime.arrays import I64, U64, Bytes
from rowcast.runtime.compiled import compiled_loop, prefetch

Words = U64  # [rows, record_bytes / 8]; lanes [ceil(rows / 8)]
Marks = Bytes  # [rows, padded to a multiple of 8]
Positions = I64

PRESENT, CHANGED = 1, 2
LANE_ROWS = 8

ROWS_AHEAD = 8  # asked for before they are copied
LINE_WORDS = 8  # of a cache line
EACH_ROW = 0x0101010101010101  # times a mark: that mark in every row of a lane
CHANGED_LANE = np.uint64(EACH_ROW * CHANGED)


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
    """words[positions[i]] = source[i], and marks the rows present and changed."""
    for i in range(len(positions)):
        row = positions[i]
        marks[row] = PRESENT | CHANGED
        for word in range(source.shape[1]):
            words[row, word] = source[i, word]


@compiled_loop
def find_marked(marks: Marks, lanes: Words, lane: np.uint64, start: int, end: int, out: Positions) -> tuple[int, int]:
    """Writes the rows of [start, end) that have the mark into `out`, ascending, until it is full. `lane`: the mark in each row of a lane.

    Returns how many there are, and where to go on.
    """
    found, row = 0, start
    mark = np.uint8(lane & np.uint64(255))
    while row < end and found < len(out):
        if row % LANE_ROWS == 0 and lanes[row // LANE_ROWS] & lane == 0:
            row += LANE_ROWS
            continue
        if marks[row] & mark:
            out[found] = row
            found += 1
        row += 1
    return found, min(row, end)


@compiled_loop
def count_marked(marks: Marks, mark: int) -> int:
    found = 0
    for row in range(len(marks)):
        found += (marks[row] & mark) != 0
    return found


@compiled_loop
def settle_marks(lanes: Words) -> None:
    """No row has changed any more. Only lanes with changed rows are written: the others may have no memory yet."""
    for i in range(len(lanes)):
        if lanes[i] & CHANGED_LANE:
            lanes[i] &= ~CHANGED_LANE
