"""Compiled loops that find rows in the files of several versions, and turn them into fp32.

An index has cells: a row's *place* in its file, u32, and a *tag*, 16 bits of the row's hash, 0 for an empty cell. A row
is in the first empty cell from the one that its hash names. So nearly every absent row is recognised without reading
its file.

    global places    newest version | the one before | ... | whole version      a smaller place is newer
    joined index     of all versions but the whole one, made by the reader
    whole index      of the whole version, as it was published
"""

from typing import NamedTuple

import numpy as np

from rowcast.prefetcher.stores.row_loops import Positions
from rowcast.prefetcher.stores.store import ABSENT
from rowcast.protocol.first_values import Initializer, fill_row
from rowcast.runtime.arrays import F32, FACTOR_1, FACTOR_2, GOLDEN, I64, U16, U32, U64, Bytes
from rowcast.runtime.compiled import (
    c_mincore,
    compiled_arithmetic,
    compiled_loop,
    compiled_part,
    load_f32,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    prefetch_at,
)
from rowcast.runtime.mapped_pages import PAGE
from rowcast.serving.row_layout import FP16, INT8, RowLayout

FULL_PERCENT = 76  # of the cells, at most: 7.9 bytes a row
LEAST_CELLS = 8
CELL_BYTES = 6
CHUNKS = 4  # per request: each checks the page that is farthest back in its table
NOWHERE = np.uint64(0)
HALF, TAG = np.uint64(32), np.uint64(0xFFFF)
S30, S27, S31, ONE = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(1)

# how ids become rows (`raw_ids.py`): they are rows; divided; rows if they are in range
AS_IS, REMAINDER, ROW = range(3)
BELOW = 2**32  # hashes that are divided
FOUND, PAGES_MISSING = -1, -2


class Index(NamedTuple):
    places: U32
    tags: U16


class Cells(NamedTuple):
    """An index by addresses."""

    places: np.uint64
    tags: np.uint64
    size: int


class Found(NamedTuple):
    """Where the rows of a table are, and how they are read: the first 15 of its words, before its `Initializer`.

    Look-ups in all tables are one call with a matrix of words: numba takes 1 us for an array, and 20 us for a tuple.
    """

    joined: Cells
    whole: Cells
    starts: np.uint64  # address of i64 [versions + 1]: global places
    addresses: np.uint64  # address of u64 [versions]: the files' first bytes
    num_versions: int
    num_embeddings: int
    layout: RowLayout


def words_of(
    joined: Index, whole: Index, starts: I64, addresses: U64, num_embeddings: int, layout: RowLayout, first: Initializer
) -> U64:
    """Returns u64 [WORDS]. The arrays must outlive it."""
    cells = [
        word
        for index in (joined, whole)
        for word in (index.places.ctypes.data, index.tags.ctypes.data, len(index.tags))
    ]
    numbers = [*cells, starts.ctypes.data, addresses.ctypes.data, len(addresses), num_embeddings, *layout]
    bits = np.array([first.a, first.b]).view(np.uint64).tolist()
    return np.array([*numbers, first.kind, *bits, first.seed, first.table, first.linear], np.uint64)


@compiled_part
def found_of(words: U64) -> Found:
    n = words.view(np.int64)
    return Found(
        Cells(words[0], words[1], n[2]),
        Cells(words[3], words[4], n[5]),
        words[6],
        words[7],
        n[8],
        n[9],
        RowLayout(n[10], n[11], n[12], n[13], n[14]),
    )


@compiled_part
def initializer_of(words: U64) -> Initializer:
    ab = words.view(np.float64)
    linear, first = words[20] != 0, np.uint64(0)
    return Initializer(np.int64(words[15]), ab[16], ab[17], words[18], words[19], linear, first)  # type: ignore[arg-type]


def num_cells(num_rows: int) -> int:
    return 100 * num_rows // FULL_PERCENT + LEAST_CELLS


@compiled_part
def hash_of(row: int) -> np.uint64:
    x = (np.uint64(row) + ONE) * GOLDEN
    x = (x ^ (x >> S30)) * FACTOR_1
    x = (x ^ (x >> S27)) * FACTOR_2
    return x ^ (x >> S31)


@compiled_part
def tag_of(hashed: np.uint64) -> np.uint64:
    tag = hashed & TAG
    return tag if tag != 0 else ONE


@compiled_part
def first_cell(hashed: np.uint64, size: int) -> int:
    return np.int64(((hashed >> HALF) * np.uint64(size)) >> HALF)  # type: ignore[return-value]


@compiled_part
def next_match(cells: Cells, cell: int, tag: np.uint64) -> int:
    """Returns the first cell from `cell` with this tag, or -1."""
    while True:
        own = load_u16(cells.tags, 2 * cell)
        if own == 0:
            return -1
        if own == tag:
            return cell
        cell = cell + 1 if cell + 1 < cells.size else 0


@compiled_part
def place_in(cells: Cells, cell: int) -> int:
    return np.int64(load_u32(cells.places, 4 * cell))  # type: ignore[return-value]


@compiled_part
def put(index: Index, row: int, place: int) -> None:
    hashed = hash_of(row)
    cell = first_cell(hashed, len(index.tags))
    while index.tags[cell] != 0:
        cell = cell + 1 if cell + 1 < len(index.tags) else 0
    index.tags[cell], index.places[cell] = tag_of(hashed), place


@compiled_loop
def put_all(index: Index, rows: I64, places: I64) -> None:
    for i in range(len(rows)):
        put(index, rows[i], places[i])


@compiled_loop
def is_index(index: Index, num_rows: int) -> bool:
    """Returns whether there is a cell for each row, with a place below `num_rows`; so some cell is empty."""
    count = 0
    for i in range(len(index.tags)):
        if index.tags[i] != 0:
            count += 1
            if index.places[i] >= num_rows:
                return False
    return count == num_rows


@compiled_part
def address_of(lookup: Found, place: int) -> np.uint64:
    version = 0
    while place >= load_i64(lookup.starts, 8 * version + 8):
        version += 1
    start = load_i64(lookup.starts, 8 * version)
    address = np.uint64(load_i64(lookup.addresses, 8 * version))
    return address + np.uint64((place - start) * lookup.layout.stride)


@compiled_part
def key_at(lookup: Found, place: int) -> int:
    return load_i64(address_of(lookup, place), 0)  # type: ignore[no-any-return]


@compiled_part
def start_of_whole(lookup: Found) -> int:
    return load_i64(lookup.starts, 8 * (lookup.num_versions - 1))  # type: ignore[no-any-return]


@compiled_part
def exact_in(cells: Cells, shift: int, lookup: Found, row: int) -> int:
    """Returns the row's global place, or ABSENT. `shift`: from the cells' places to global ones."""
    hashed = hash_of(row)
    cell = next_match(cells, first_cell(hashed, cells.size), tag_of(hashed))
    while cell >= 0:
        place = shift + place_in(cells, cell)
        if key_at(lookup, place) == row:
            return place
        cell = next_match(cells, cell + 1 if cell + 1 < cells.size else 0, tag_of(hashed))
    return ABSENT


@compiled_part
def exact(lookup: Found, row: int) -> int:
    place = exact_in(lookup.joined, 0, lookup, row)
    return place if place != ABSENT else exact_in(lookup.whole, start_of_whole(lookup), lookup, row)


@compiled_loop
def join(joined: Index, words: U64, first: int, rows: I64) -> None:
    """Adds rows with global places from `first` on, unless a newer version has them."""
    lookup = found_of(words)
    for i in range(len(rows)):
        if exact_in(lookup.joined, 0, lookup, rows[i]) == ABSENT:
            put(joined, rows[i], first + i)


@compiled_part
def candidates(lookup: Found, rows: I64, places: I64) -> int:
    """Sets the global place at which each row may be, by tags alone, or ABSENT. Returns the last of these places."""
    joined, whole, start = lookup.joined, lookup.whole, start_of_whole(lookup)
    farthest = ABSENT
    for i in range(len(rows)):
        hashed = hash_of(rows[i])
        prefetch_at(joined.tags, 2 * first_cell(hashed, joined.size))
        prefetch_at(whole.tags, 2 * first_cell(hashed, whole.size))
        prefetch_at(whole.places, 4 * first_cell(hashed, whole.size))
    for i in range(len(rows)):
        hashed = hash_of(rows[i])
        tag = tag_of(hashed)
        cell = next_match(joined, first_cell(hashed, joined.size), tag)
        place = ABSENT
        if cell >= 0:
            place = place_in(joined, cell)
        else:
            cell = next_match(whole, first_cell(hashed, whole.size), tag)
            if cell >= 0:
                place = start + place_in(whole, cell)
        places[i] = place
        if place != ABSENT:
            prefetch_at(address_of(lookup, place), 0)
        farthest = max(farthest, place)
    return farthest


@compiled_part
def is_missing(address: np.uint64, state: Bytes) -> bool:
    """Returns whether the page of an address is out of memory. Overwrites `state` u8 [1]."""
    page = address // np.uint64(PAGE) * np.uint64(PAGE)
    return c_mincore(page, PAGE, state.ctypes.data) == 0 and state[0] & 1 == 0  # type: ignore[no-any-return]


@compiled_part
def confirm(lookup: Found, rows: I64, places: I64) -> None:
    """Confirms candidates: compares keys, and searches on where a tag misled."""
    for i in range(len(rows)):
        if places[i] != ABSENT and key_at(lookup, places[i]) != rows[i]:
            places[i] = exact(lookup, rows[i])


@compiled_loop
def places_of(words: U64, rows: I64, places: I64) -> None:
    """Sets the global place of each row, or ABSENT."""
    lookup = found_of(words)
    candidates(lookup, rows, places)
    confirm(lookup, rows, places)


@compiled_arithmetic
def decode(layout: RowLayout, address: np.uint64, halves: F32, out: F32) -> None:
    if layout.kind == INT8:
        scale, bias = load_f32(address, 8), load_f32(address, 12)
        for column in range(layout.dim):
            out[column] = bias + scale * np.float32(load_u8(address, layout.values_at + column))
    elif layout.kind == FP16:
        for column in range(layout.dim):
            out[column] = halves[load_u16(address, layout.values_at + 2 * column)]
    else:
        for column in range(layout.dim):
            out[column] = load_f32(address, layout.values_at + 4 * column)
    if layout.linear_at != 0:
        out[layout.dim] = load_f32(address, layout.linear_at)


@compiled_part
def to_rows(rule: int, num_embeddings: int, ids: I64) -> bool:
    """Turns ids into rows, in place. Returns False, and changes nothing, if that takes more than a division."""
    if rule != AS_IS:
        below = BELOW if rule == REMAINDER else num_embeddings
        for i in range(len(ids)):
            if not 0 <= ids[i] < below:
                return False
    if rule == REMAINDER:
        for i in range(len(ids)):
            ids[i] %= num_embeddings
    return True


@compiled_loop
def look_up(
    rules: I64, state: Bytes, tables: U64, bounds: I64, halves: F32, ids: I64, places: I64, trained: I64, out: F32
) -> int:
    """Looks up several features: `tables` u64 [features, WORDS], ids[bounds[f] : bounds[f + 1]] by rules[f].

    Turns `ids` into rows. Returns FOUND after `fill`, PAGES_MISSING after `candidates` of all, or the first feature
    whose ids are no rows by its rule alone. `state` u8 [1] is overwritten.
    """
    chunk = max(1, (len(ids) + CHUNKS - 1) // CHUNKS)
    is_short, num_seen, back, address = False, 0, 0.0, NOWHERE
    for f in range(len(tables)):
        lookup = found_of(tables[f])
        if not to_rows(rules[f], lookup.num_embeddings, ids[bounds[f] : bounds[f + 1]]):
            return f
        rules[f] = AS_IS
        num_rows = load_i64(lookup.starts, 8 * lookup.num_versions)
        for begin in range(bounds[f], bounds[f + 1], chunk):
            end = min(begin + chunk, bounds[f + 1])
            place = candidates(lookup, ids[begin:end], places[begin:end])
            if place != ABSENT and (place + 1) / num_rows > back:
                back, address = (place + 1) / num_rows, address_of(lookup, place)
            num_seen += end - begin
            if num_seen >= chunk:
                is_short = is_short or (address != NOWHERE and is_missing(address, state))
                num_seen, back, address = 0, 0.0, NOWHERE
    if is_short or (address != NOWHERE and is_missing(address, state)):
        return PAGES_MISSING
    fill(tables, bounds, halves, ids, places, trained, out)
    return FOUND


@compiled_loop
def fill(tables: U64, bounds: I64, halves: F32, rows: I64, places: I64, trained: I64, out: F32) -> None:
    """Fills `out`, for each feature f32 [n, width], from candidates, and untrained rows with first values.

    Sets how many rows of each are trained.
    """
    begin = 0
    for f in range(len(tables)):
        lookup, initializer = found_of(tables[f]), initializer_of(tables[f])
        confirm(lookup, rows[bounds[f] : bounds[f + 1]], places[bounds[f] : bounds[f + 1]])
        width, trained[f] = lookup.layout.dim + (lookup.layout.linear_at != 0), 0
        for i in range(bounds[f], bounds[f + 1]):
            if places[i] == ABSENT:
                fill_row(initializer, rows[i], out[begin : begin + width])
            else:
                decode(lookup.layout, address_of(lookup, places[i]), halves, out[begin : begin + width])
                trained[f] += 1
            begin += width


@compiled_arithmetic
def pool(rows: F32, offsets: I64, weights: F32, is_mean: bool, out: F32) -> None:
    """Fills out f32 [bags, width]: 0 + row + row ..., in the order of the look-ups, as in training. `weights` f32 [n],
    or [0]: none."""
    for bag in range(len(out)):
        out[bag] = 0.0
        for i in range(offsets[bag], offsets[bag + 1]):
            for column in range(out.shape[1]):
                value = rows[i, column] * weights[i] if len(weights) else rows[i, column]
                out[bag, column] += value
        if is_mean:
            count = np.float32(max(1, offsets[bag + 1] - offsets[bag]))
            for column in range(out.shape[1]):
                out[bag, column] /= count


@compiled_loop
def touch(file: Bytes, offset: int, stride: int, numbers: Positions) -> int:
    """Waits for the pages that `ask_for` has requested, and maps them. The result is meaningless; it keeps the compiler
    from dropping the reads."""
    total = 0
    for i in range(len(numbers)):
        begin = offset + numbers[i] * stride
        for at in range(begin, begin + stride, PAGE):
            total += file[at]
        total += file[begin + stride - 1]
    return total
