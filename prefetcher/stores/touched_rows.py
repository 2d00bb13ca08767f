"""Numbers the rows of a group in the order in which they are first written, so that untouched rows cost nothing.

A hash leads from a row's key to its number. Its cells lie in segments, chosen by the highest bits of the key's hash:

    cell      24 bits of the key's hash | the row's number + 1, 40 bits        or EMPTY
    segment   cells in use, searched one after the other from the one that the hash names | addresses to grow into

A segment that is four fifths full grows by an eighth, so no growth stops a step for long, and cells take at most 12
bytes a row.
"""

import mmap
import threading
from collections.abc import Iterator

import numpy as np

from rowcast.job.tables import KEY_SHIFT
from rowcast.prefetcher.stores.row_numbers import find_numbers
from rowcast.prefetcher.stores.store import ABSENT, Keys
from rowcast.runtime.arrays import I64, U64
from rowcast.runtime.compiled import compiled_loop, prefetch
from rowcast.runtime.errors import RowcastError
from rowcast.runtime.splitmix import FACTOR_1, FACTOR_2, GOLDEN

NUM_SEGMENTS = 1024
SEGMENT_SHIFT, PLACE_SHIFT = np.uint64(54), np.uint64(22)  # the highest 10 bits of a hash, and the 32 bits below them
LOW = np.uint64(2**32 - 1)
EMPTY = np.uint64(0)
NUMBER_BITS, NUMBER, TAG = np.uint64(40), np.uint64(2**40 - 1), np.uint64(2**24 - 1)
ROW_BYTES = 20  # at most, for each touched row: a key, and cells
FIRST_CELLS = 16  # of a segment
NUMBERS_AT_ONCE = 2**16
CELLS_AHEAD, KEYS_AHEAD = 24, 12  # how many rows ahead the processor prefetches
MAP_NORESERVE = 0x4000  # Linux; Python 3.13 is the first to name it


def reserved(num_words: int) -> U64:
    """Returns u64 [num_words] of zeros that take memory page by page as they are written. Raises MemoryError.

    They may exceed the machine's memory. numpy would ask for huge pages: the first write of a row would clear 2 MiB.
    """
    try:
        memory = mmap.mmap(-1, max(1, num_words) * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, OverflowError, ValueError):
        raise MemoryError from None
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint64, num_words)


class TouchedRows:
    """Rows have numbers 0 to `count` - 1. One thread may look rows up while another adds some."""

    def __init__(self, group: str, most: int) -> None:
        """`group`: its name. `most`: how many rows may be added. Raises MemoryError."""
        self.count, self.most = 0, most
        self._group = group
        self.keys: I64 = reserved(most).view(np.int64)  # by number
        room = most // NUM_SEGMENTS
        # twice the mean, as the fullest segment has a few deviations more than it
        self._cells = reserved(NUM_SEGMENTS * (2 * room + 64 * FIRST_CELLS)).reshape(NUM_SEGMENTS, -1)
        self._sizes = np.full(NUM_SEGMENTS, FIRST_CELLS, np.int64)
        self._used = np.zeros(NUM_SEGMENTS, np.int64)
        self._spare = np.empty(FIRST_CELLS, np.uint64)
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes in use: cells and keys."""
        return int(self._sizes.sum() + self.count) * 8

    def of(self, keys: Keys) -> I64:
        """Returns the rows' numbers, ABSENT for rows that were never added."""
        numbers = np.empty(len(keys), np.int64)
        with self._lock:
            find(self._cells, self._sizes, self.keys, keys, numbers)
        return numbers

    def added(self, keys: Keys) -> I64:
        """Returns the rows' numbers; new rows get the next ones. Raises RowcastError, and adds none, beyond `most`."""
        numbers = np.empty(len(keys), np.int64)
        with self._lock:
            num_new = find(self._cells, self._sizes, self.keys, keys, numbers)
            if self.count + num_new > self.most:
                raise RowcastError(
                    f"group {self._group} has {self.count + num_new} trained rows, but this machine's memory holds at "
                    f"most {self.most}; use store.kind mapped, or a machine with more memory"
                )
            added = self._add(keys, numbers, 0) if num_new else len(keys)
            while added < len(keys):
                self._spare = np.empty(2 * len(self._spare), np.uint64)
                added = self._add(keys, numbers, added)
        return numbers

    def found(self, bits: U64, table: int, block: int) -> Iterator[tuple[Keys, I64]]:
        chosen = [
            numbers[self.keys[numbers] >> KEY_SHIFT == table]
            for numbers in find_numbers(bits, 0, self.count, NUMBERS_AT_ONCE)
        ]
        numbers = np.concatenate([np.empty(0, np.int64), *chosen])
        keys = self.keys[numbers]
        order = np.argsort(keys)
        for start in range(0, len(order), block):
            own = order[start : start + block]
            yield keys[own], numbers[own]

    def _add(self, keys: Keys, numbers: I64, start: int) -> int:
        end, self.count = add(
            self._cells, self._sizes, self._used, self._spare, self.keys, keys, numbers, start, self.count
        )
        return end


@compiled_loop
def hash_of(key: int) -> np.uint64:
    mixed = np.uint64(key) * GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * FACTOR_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * FACTOR_2
    return mixed ^ (mixed >> np.uint64(31))


@compiled_loop
def first_cell(hashed: np.uint64, sizes: I64) -> tuple[int, int]:
    """Returns the segment of a hash, and the cell in it where a search begins."""
    segment: int = np.int64(hashed >> SEGMENT_SHIFT)  # type: ignore[assignment]
    cell: int = np.int64((((hashed >> PLACE_SHIFT) & LOW) * np.uint64(sizes[segment])) >> np.uint64(32))  # type: ignore[assignment]
    return segment, cell


@compiled_loop
def number_in(cell: np.uint64) -> int:
    return np.int64(cell & NUMBER) - 1  # type: ignore[return-value]


@compiled_loop
def candidate(cells: U64, sizes: I64, key: int) -> int:
    """Returns the number in the first cell with this key's tag, or ABSENT."""
    hashed = hash_of(key)
    segment, cell = first_cell(hashed, sizes)
    while cells[segment, cell] != EMPTY:
        if cells[segment, cell] >> NUMBER_BITS == hashed & TAG:
            return number_in(cells[segment, cell])
        cell = cell + 1 if cell + 1 < sizes[segment] else 0
    return ABSENT


@compiled_loop
def locate(cells: U64, sizes: I64, keys_of: I64, key: int) -> int:
    """Returns the number of a row, or ABSENT."""
    hashed = hash_of(key)
    segment, cell = first_cell(hashed, sizes)
    while cells[segment, cell] != EMPTY:
        if cells[segment, cell] >> NUMBER_BITS == hashed & TAG:
            number = number_in(cells[segment, cell])
            if keys_of[number] == key:
                return number
        cell = cell + 1 if cell + 1 < sizes[segment] else 0
    return ABSENT


@compiled_loop
def find(cells: U64, sizes: I64, keys_of: I64, keys: Keys, numbers: I64) -> int:
    """Sets the number of each key. Returns how many are absent."""
    flat, stride, num_absent = cells.reshape(-1), cells.shape[1], 0
    for i in range(-CELLS_AHEAD, len(keys)):
        if i + CELLS_AHEAD < len(keys):
            segment, cell = first_cell(hash_of(keys[i + CELLS_AHEAD]), sizes)
            prefetch(flat, segment * stride + cell)
        if 0 <= i + KEYS_AHEAD < len(keys):
            numbers[i + KEYS_AHEAD] = candidate(cells, sizes, keys[i + KEYS_AHEAD])
            prefetch(keys_of, max(0, numbers[i + KEYS_AHEAD]))
        if i >= 0 and numbers[i] != ABSENT and keys_of[numbers[i]] != keys[i]:
            numbers[i] = locate(cells, sizes, keys_of, keys[i])
        num_absent += i >= 0 and numbers[i] == ABSENT
    return num_absent


@compiled_loop
def add(
    cells: U64, sizes: I64, used: I64, spare: U64, keys_of: I64, keys: Keys, numbers: I64, start: int, count: int
) -> tuple[int, int]:
    """Numbers the absent keys from `start` on. Returns where to continue, as `spare` was too small, and the count."""
    for i in range(start, len(keys)):
        if numbers[i] != ABSENT:
            continue
        hashed = hash_of(keys[i])
        segment, _ = first_cell(hashed, sizes)
        if 5 * (used[segment] + 1) > 4 * sizes[segment]:
            if used[segment] > len(spare):
                return i, count
            grow(cells, segment, sizes, spare, keys_of)
        place(cells, sizes, hashed, count)
        used[segment] += 1
        keys_of[count] = keys[i]
        numbers[i] = count
        count += 1
    return len(keys), count


@compiled_loop
def place(cells: U64, sizes: I64, hashed: np.uint64, number: int) -> None:
    segment, cell = first_cell(hashed, sizes)
    while cells[segment, cell] != EMPTY:
        cell = cell + 1 if cell + 1 < sizes[segment] else 0
    cells[segment, cell] = ((hashed & TAG) << NUMBER_BITS) | np.uint64(number + 1)


@compiled_loop
def grow(cells: U64, segment: int, sizes: I64, spare: U64, keys_of: I64) -> None:
    """Moves a segment's cells to where a size that is an eighth larger wants them; `spare` holds them meanwhile."""
    moved = 0
    for cell in range(sizes[segment]):
        if cells[segment, cell] != EMPTY:
            spare[moved] = cells[segment, cell]
            cells[segment, cell] = EMPTY
            moved += 1
    sizes[segment] = min(cells.shape[1], sizes[segment] + max(sizes[segment] // 8, FIRST_CELLS))
    for i in range(moved):
        number = number_in(spare[i])
        if i + CELLS_AHEAD < moved:
            prefetch(keys_of, number_in(spare[i + CELLS_AHEAD]))
        place(cells, sizes, hash_of(keys_of[number]), number)
