"""Compiled loops over arrays of records, and over bits of rows.

Bits are packed 64 to a word; that of row r is bit r % 64 of word r // 64.
"""

from collections.abc import Callable

import numpy as np

from rowcast.job.tables import aligned
from rowcast.runtime.arrays import I64, U64
from rowcast.runtime.compiled import (
    STORES_PAST_CACHES,
    compiled_loop,
    end_stores,
    prefetch,
    prefetch_to_write,
    store_line,
)

Words = U64  # of records [n, record_bytes / 8]; of a store's rows [rows, stored_bytes / 8]; of bits [ceil(rows / 64)]
Positions = I64

BITS = 64  # per word

ROWS_AHEAD = 8  # how many rows ahead the processor prefetches
ROWS_AHEAD_TO_STORE = 16  # the same where only a row's first line is prefetched
ROWS_AHEAD_TO_PASS = 12  # the same where rows pass the caches
LEAST_TO_PASS = 2**25  # bytes that are read at once: fewer may still be in a cache when the trainer needs them
LINE_WORDS = 8  # per cache line
LINE_BYTES = 8 * LINE_WORDS
LEAST_LINES = 3  # per record: shorter ones are stored faster through the caches (docs/log/stores.md)


def stored_bytes(record_bytes: int) -> int:
    """Returns the bytes of a record in a store's memory: whole cache lines if they can be stored past the caches. The
    last line ends in zeros. The same on every machine, because the rows that fit a memory tier decide plans."""
    return aligned(record_bytes, LINE_BYTES) if record_bytes > LEAST_LINES * LINE_BYTES else record_bytes


@compiled_loop
def gather(words: Words, positions: Positions, out: Words) -> int:
    """Sets out[i] = words[positions[i]], and leaves rows with a negative position. Returns how many these are."""
    width, stored, flat = out.shape[1], words.shape[1], words.reshape(-1)
    num_absent = 0
    for i in range(len(positions)):
        if i + ROWS_AHEAD < len(positions) and positions[i + ROWS_AHEAD] >= 0:
            for word in range(0, width, LINE_WORDS):
                prefetch(flat, positions[i + ROWS_AHEAD] * stored + word)
        row = positions[i]
        if row < 0:
            num_absent += 1
            continue
        for word in range(width):
            out[i, word] = words[row, word]
    return num_absent


@compiled_loop
def gather_lines(words: Words, positions: Positions, out: Words) -> int:
    """Does what `gather` does. The rows are more than the caches hold, so they pass them."""
    width, flat, target = words.shape[1], words.reshape(-1), out.reshape(-1)
    num_absent = 0
    for i in range(len(positions)):
        if i + ROWS_AHEAD_TO_PASS < len(positions) and positions[i + ROWS_AHEAD_TO_PASS] >= 0:
            for word in range(0, width, LINE_WORDS):
                prefetch(flat, positions[i + ROWS_AHEAD_TO_PASS] * width + word)
        row = positions[i]
        if row < 0:
            num_absent += 1
            continue
        for word in range(0, width, LINE_WORDS):
            store_line(target, i * width + word, flat, row * width + word, LINE_WORDS)
    end_stores()
    return num_absent


Gather = Callable[[Words, Positions, Words], int]
Scatter = Callable[[Words, Positions, Words], None]


def gather_for(out: Words) -> Gather:
    """Returns the faster loop for this target. Fewer rows stay in the caches, where the trainer finds them."""
    return gather_lines if out.nbytes >= LEAST_TO_PASS and is_whole_lines(out) else gather


def scatter_for(words: Words) -> Scatter:
    """Returns the faster loop for these rows of a store."""
    return scatter_lines if is_whole_lines(words) and words.shape[1] >= LEAST_LINES * LINE_WORDS else scatter


def is_whole_lines(words: Words) -> bool:
    """Whether each row is some whole cache lines that this processor can store past its caches."""
    return STORES_PAST_CACHES and words.shape[1] % LINE_WORDS == 0 and words.ctypes.data % LINE_BYTES == 0


@compiled_loop
def scatter(source: Words, positions: Positions, words: Words) -> None:
    """Sets words[positions[i]] = source[i]; passes over negative positions."""
    width, stored, flat = source.shape[1], words.shape[1], words.reshape(-1)
    for i in range(len(positions)):
        if i + ROWS_AHEAD < len(positions):
            for word in range(0, width, LINE_WORDS):
                prefetch_to_write(flat, positions[i + ROWS_AHEAD] * stored + word)
        row = positions[i]
        if row < 0:
            continue
        for word in range(width):
            words[row, word] = source[i, word]


@compiled_loop
def scatter_lines(source: Words, positions: Positions, words: Words) -> None:
    """Does what `scatter` does. The rows of a piece are needed again much later, so they pass the caches."""
    width, stored, flat, new = source.shape[1], words.shape[1], words.reshape(-1), source.reshape(-1)
    for i in range(len(positions)):
        if i + ROWS_AHEAD_TO_STORE < len(positions):
            prefetch_to_write(flat, positions[i + ROWS_AHEAD_TO_STORE] * stored)
        row = positions[i]
        if row < 0:
            continue
        for word in range(0, width, LINE_WORDS):
            store_line(flat, row * stored + word, new, i * width + word, width - word)
    end_stores()


@compiled_loop
def set_bits(bits: Words, rows: Positions) -> None:
    for i in range(len(rows)):
        bits[rows[i] >> 6] |= np.uint64(1) << np.uint64(rows[i] & 63)


@compiled_loop
def find_rows(rows: Positions, bits: Words, without: Words, out: Positions) -> int:
    """Fills `out` with the positions, in `rows`, of the rows whose bit is set in `bits` and not in `without`. Returns
    how many."""
    found = 0
    for i in range(len(rows)):
        word, bit = rows[i] >> 6, np.uint64(1) << np.uint64(rows[i] & 63)
        if bits[word] & bit != 0 and without[word] & bit == 0:
            out[found] = i
            found += 1
    return found


@compiled_loop
def clear_bits(bits: Words, rows: Positions) -> None:
    for i in range(len(rows)):
        bits[rows[i] >> 6] &= ~(np.uint64(1) << np.uint64(rows[i] & 63))


@compiled_loop
def clear_all_bits(bits: Words) -> None:
    """Clears all bits. Writes only nonzero words: the others may have no memory yet."""
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
