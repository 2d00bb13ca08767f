"""Compiled loops that number rows: over cells, which map a row to its number and are the only record of its key, and
over an index, which has for each position in a group the number + 1 of its row, or 0.

A row's position in its group is mixed by a bijection. Its bits, at the top of a word, are the row's *hash*:

    hash    implied | kept        | 0           as many bits as positions have, then zeros
    cell              kept | number + 1         or EMPTY

The hash's highest 32 bits name the row's *first bucket*; a bucket is one cache line. The row is in it or, if it is
full, in the next bucket with room, fewer than REACH further. A cell leaves out the implied bits. Rows that differ in
them have first buckets at least REACH apart, so the cell's bucket implies these bits, and within a search equal cells
mean equal rows.

Buckets grow by an eighth, in place: no row's first bucket moves to the left. They pass from the size *before* to the
present one a few at a time, from the right, so that growth never stops a step for long:

    buckets    as before, left of the frontier | empty | the others, already where the present size wants them
"""

from typing import NamedTuple

import numpy as np

from rowcast.job.tables import KEY_SHIFT
from rowcast.prefetcher.stores.store import ABSENT, Keys
from rowcast.runtime.arrays import FACTOR_1, FACTOR_2, GOLDEN, I64, U32, U64
from rowcast.runtime.compiled import compiled_loop, compiled_part, prefetch

EMPTY = np.uint64(0)
BUCKET = 8  # cells
REACH = 256  # buckets; at the fullest, one row in 10**30 would need more
BEFORE, SIZE, FRONTIER = range(3)  # in `sizes`; the frontier is 0 unless buckets pass to a new size
GROWTH = 8  # by an eighth
FULL_PERCENT = 76
MOVED_AT_ONCE, MOVED_A_ROW = 64, 2  # buckets, at least; so growth ends well before the next begins
AHEAD = 24  # how many rows ahead the processor prefetches
HIGH, ONE, WORD_BITS = np.uint64(32), np.uint64(1), np.uint64(64)
UNDO_1, UNDO_2, UNDO_3 = (np.uint64(pow(int(factor), -1, 2**64)) for factor in (FACTOR_1, FACTOR_2, GOLDEN))


class Layout(NamedTuple):
    """How the bits of hashes and cells are split."""

    unused: np.uint64  # below a hash
    half: np.uint64  # of a hash, rounded up
    implied: np.uint64
    numbers: np.uint64  # the bits of a cell that hold a number


def layout_for(num_rows: int, most: int) -> Layout:
    """`num_rows`: rows of the group. `most`: how many of them may be numbered."""
    bits, number_bits = max(2, (num_rows - 1).bit_length()), most.bit_length()
    implied = max(0, bits + number_bits - 64)
    return Layout(np.uint64(64 - bits), np.uint64(-(-bits // 2)), np.uint64(implied), np.uint64(2**number_bits - 1))


@compiled_loop
def hash_of(position: int, layout: Layout) -> np.uint64:
    used = ~np.uint64(0) << layout.unused
    mixed = (np.uint64(position) << layout.unused) * FACTOR_1
    mixed = (mixed ^ ((mixed >> layout.half) & used)) * FACTOR_2
    return (mixed ^ ((mixed >> layout.half) & used)) * GOLDEN


@compiled_loop
def position_of(hashed: np.uint64, layout: Layout) -> int:
    used = ~np.uint64(0) << layout.unused
    mixed = hashed * UNDO_3
    mixed = (mixed ^ ((mixed >> layout.half) & used)) * UNDO_2
    mixed = (mixed ^ ((mixed >> layout.half) & used)) * UNDO_1
    return np.int64(mixed >> layout.unused)  # type: ignore[return-value]


@compiled_loop
def bucket_in(hashed: np.uint64, size: int) -> int:
    return np.int64(((hashed >> HIGH) * np.uint64(size)) >> HIGH)  # type: ignore[return-value]


@compiled_part
def bucket_of(hashed: np.uint64, before: int, size: int, frontier: int) -> int:
    old, new = bucket_in(hashed, before), bucket_in(hashed, size)
    return old if old < frontier else new


@compiled_part
def is_full(cells: U64, bucket: int) -> bool:
    return cells[bucket * BUCKET + BUCKET - 1] != EMPTY  # type: ignore[no-any-return]


@compiled_part
def number_in(cells: U64, bucket: int, kept: np.uint64, numbers: np.uint64) -> np.uint64:
    """Returns the number + 1 of the row whose cell has these kept bits, or 0."""
    number = EMPTY
    for cell in range(bucket * BUCKET, bucket * BUCKET + BUCKET):
        other = cells[cell] ^ kept
        number |= other if other <= numbers else EMPTY
    return number


@compiled_loop
def find(cells: U64, sizes: I64, layout: Layout, shifts: I64, keys: Keys, numbers: I64) -> int:
    """Sets the number of each key. Returns how many are absent. `shifts` [tables]: from a key to its row's position."""
    before, size, frontier, num_absent = sizes[BEFORE], sizes[SIZE], sizes[FRONTIER], 0
    for i in range(-AHEAD, len(keys)):
        if i + AHEAD < len(keys):
            key = keys[i + AHEAD]
            hashed = hash_of(key + shifts[key >> KEY_SHIFT], layout)
            numbers[i + AHEAD] = np.int64(hashed)
            prefetch(cells, bucket_of(hashed, before, size, frontier) * BUCKET)
        if i >= 0:
            hashed = np.uint64(numbers[i])
            bucket, kept = bucket_of(hashed, before, size, frontier), hashed << layout.implied
            number = number_in(cells, bucket, kept, layout.numbers)
            while number == 0 and is_full(cells, bucket):
                bucket += 1
                number = number_in(cells, bucket, kept, layout.numbers)
            numbers[i] = np.int64(number) - 1
            num_absent += number == 0
    return num_absent


@compiled_loop
def add(
    cells: U64, sizes: I64, layout: Layout, spare: U64, shifts: I64, keys: Keys, numbers: I64, count: int, most: int
) -> int:
    """Numbers the absent keys. Returns how many rows have a number now. `most`: buckets."""
    for i in range(len(keys)):
        if numbers[i] != ABSENT:
            continue
        hashed = hash_of(keys[i] + shifts[keys[i] >> KEY_SHIFT], layout)
        count += 1
        place(cells, bucket_of(hashed, sizes[BEFORE], sizes[SIZE], sizes[FRONTIER]), hashed, np.uint64(count), layout)
        numbers[i] = count - 1
        if sizes[FRONTIER] == 0 and 100 * count >= FULL_PERCENT * BUCKET * sizes[SIZE] and sizes[SIZE] < most:
            sizes[FRONTIER] = sizes[SIZE]
            sizes[SIZE] = min(most, sizes[SIZE] + sizes[SIZE] // GROWTH)
            move(cells, sizes, layout, spare)
        elif sizes[FRONTIER] and (count % (MOVED_AT_ONCE // MOVED_A_ROW) == 0 or is_full(cells, sizes[FRONTIER] - 1)):
            move(cells, sizes, layout, spare)
    return count


@compiled_part
def place(cells: U64, moved: int, hashed: np.uint64, number: np.uint64, layout: Layout) -> None:
    bucket = moved
    while is_full(cells, bucket):
        bucket += 1
        assert bucket < moved + REACH
    cell = bucket * BUCKET
    while cells[cell] != EMPTY:
        cell += 1
    cells[cell] = (hashed << layout.implied) | number


@compiled_part
def move(cells: U64, sizes: I64, layout: Layout, spare: U64) -> None:
    """Moves the rows left of the frontier to their buckets in the present size, through `spare`.

    The frontier stays right of a bucket that is not full, so no row's search crosses it."""
    end = sizes[FRONTIER] if sizes[FRONTIER] < sizes[BEFORE] else sizes[BEFORE] + REACH
    start, moved = max(0, sizes[FRONTIER] - MOVED_AT_ONCE), 0
    while start > 0 and is_full(cells, start - 1):
        start -= 1
    assert (end - start) * BUCKET <= len(spare)
    for bucket in range(start, end):
        for cell in range(bucket * BUCKET, bucket * BUCKET + BUCKET):
            if cells[cell] != EMPTY:
                spare[moved, 0] = hash_in(cells[cell], bucket, sizes[BEFORE], layout)
                spare[moved, 1] = cells[cell] & layout.numbers
                cells[cell] = EMPTY
                moved += 1
    for i in range(moved):
        place(cells, bucket_in(spare[i, 0], sizes[SIZE]), spare[i, 0], spare[i, 1], layout)
    sizes[FRONTIER] = start
    if start == 0:
        sizes[BEFORE] = sizes[SIZE]


@compiled_loop
def hash_in(cell: np.uint64, bucket: int, size: int, layout: Layout) -> np.uint64:
    """Returns the hash of the row whose cell is in this bucket."""
    kept = (cell & ~layout.numbers) >> layout.implied
    if layout.implied == 0:
        return kept
    shift, top = np.int64(layout.implied), WORD_BITS - layout.implied
    # the largest implied bits of a row whose first bucket is this one or further left
    implied = min((1 << shift) - 1, (((bucket + 1) << shift) - 1) // size)
    hashed = (np.uint64(implied) << top) | kept
    return hashed if bucket_in(hashed, size) <= bucket else hashed - (ONE << top)


@compiled_loop
def select(
    cells: U64,
    sizes: I64,
    layout: Layout,
    part: tuple[int, int],
    bits: U64,
    positions: tuple[int, int],
    out: I64,
    count: int,
) -> int:
    """Appends to the `count` positions in `out` those of a range whose row's bit is set. Takes only rows whose hash has
    its highest 32 bits in the range `part`. Returns the new count."""
    before, size, frontier = sizes[BEFORE], sizes[SIZE], sizes[FRONTIER]
    low, high = np.uint64(part[0]) << HIGH, np.uint64(part[1] - 1) << HIGH
    bucket, last = bucket_of(low, before, size, frontier), bucket_of(high, before, size, frontier)
    while bucket <= last or (bucket * BUCKET < len(cells) and is_full(cells, bucket - 1)):
        for cell in range(bucket * BUCKET, bucket * BUCKET + BUCKET):
            if cells[cell] == EMPTY:
                break
            number = np.int64(cells[cell] & layout.numbers) - 1
            if bits[number >> 6] >> np.uint64(number & 63) & ONE == 0:
                continue
            hashed = hash_in(cells[cell], bucket, before if bucket < frontier else size, layout)
            position = position_of(hashed, layout)
            if low >> HIGH <= hashed >> HIGH <= high >> HIGH and positions[0] <= position < positions[1]:
                out[count] = position
                count += 1
        bucket += 1
    return count


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
    count, at = 0, start
    while at < end and count < len(positions):
        number = np.int64(index[at]) - 1
        if number != ABSENT and bits[number >> 6] >> np.uint64(number & 63) & np.uint64(1):
            positions[count], numbers[count] = at, number
            count += 1
        at += 1
    return count, at
