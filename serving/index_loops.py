"""Compiled loops that find rows in the files of several versions, and turn them into fp32.

An index has cells: a row's *place* in its file, u32, and a *tag*, 16 bits of the row's hash, 0 for an empty cell. A row
is in the first empty cell from the one that its hash names. So nearly every row that is not there is known without a
look at its file.

    global places    newest version | the one before | ... | whole version      a smaller place is newer
    joined index     of all versions but the whole one, made by the reader
    whole index      of the whole version, as it was published
"""

from typing import NamedTuple

import numpy as np

from rowcast.prefetcher.stores.first_values import Initializer, fill_row
from rowcast.prefetcher.stores.pages_ahead import PAGE
from rowcast.prefetcher.stores.store import ABSENT
from rowcast.runtime.arrays import F32, I64, U16, U32, U64, Bytes
from rowcast.runtime.compiled import c_memcpy, c_mincore, compiled_arithmetic, compiled_loop
from rowcast.runtime.splitmix import FACTOR_1, FACTOR_2, GOLDEN
from rowcast.serving.row_layout import FP16, INT8, KEY_BYTES, RowLayout

FULL_PERCENT = 76  # of the cells, at most: 7.9 bytes a row
LEAST_CELLS = 8
CELL_BYTES = 6
CHUNKS = 4  # of a request; of each, the page that lies farthest back is looked at
HALF, TAG = np.uint64(32), np.uint64(0xFFFF)
S30, S27, S31, ONE = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(1)


class Index(NamedTuple):
    places: U32
    tags: U16


class Found(NamedTuple):
    """Where the rows of a table are."""

    joined: Index
    whole: Index
    starts: I64  # [versions + 1] of global places
    addresses: U64  # [versions] of the files' first bytes


def num_cells(num_rows: int) -> int:
    return 100 * num_rows // FULL_PERCENT + LEAST_CELLS


@compiled_loop
def hash_of(row: int) -> np.uint64:
    x = (np.uint64(row) + ONE) * GOLDEN
    x = (x ^ (x >> S30)) * FACTOR_1
    x = (x ^ (x >> S27)) * FACTOR_2
    return x ^ (x >> S31)


@compiled_loop
def tag_of(hashed: np.uint64) -> np.uint64:
    tag = hashed & TAG
    return tag if tag != 0 else ONE


@compiled_loop
def first_cell(hashed: np.uint64, size: int) -> int:
    return np.int64(((hashed >> HALF) * np.uint64(size)) >> HALF)  # type: ignore[return-value]


@compiled_loop
def next_match(index: Index, cell: int, tag: np.uint64) -> int:
    """Returns the first cell from `cell` with this tag, or -1."""
    while index.tags[cell] != 0:
        if index.tags[cell] == tag:
            return cell
        cell = cell + 1 if cell + 1 < len(index.tags) else 0
    return -1


@compiled_loop
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
def address_of(found: Found, place: int, stride: int) -> np.uint64:
    version = 0
    while place >= found.starts[version + 1]:
        version += 1
    return found.addresses[version] + np.uint64((place - found.starts[version]) * stride)  # type: ignore[no-any-return]


@compiled_loop
def exact_in(index: Index, shift: int, found: Found, row: int, stride: int, key: I64) -> int:
    """Returns the row's global place, or ABSENT. `shift`: from the index's places to global ones."""
    hashed = hash_of(row)
    size = len(index.tags)
    cell = next_match(index, first_cell(hashed, size), tag_of(hashed))
    while cell >= 0:
        place = shift + int(index.places[cell])
        c_memcpy(key.ctypes.data, address_of(found, place, stride), KEY_BYTES)
        if key[0] == row:
            return place
        cell = next_match(index, cell + 1 if cell + 1 < size else 0, tag_of(hashed))
    return ABSENT


@compiled_loop
def exact(found: Found, row: int, stride: int, key: I64) -> int:
    place = exact_in(found.joined, 0, found, row, stride, key)
    if place == ABSENT:
        place = exact_in(found.whole, found.starts[len(found.starts) - 2], found, row, stride, key)
    return place


@compiled_loop
def join(found: Found, first: int, rows: I64, stride: int, key: I64) -> None:
    """Adds rows with global places from `first` on, unless a newer version has them."""
    for i in range(len(rows)):
        if exact_in(found.joined, 0, found, rows[i], stride, key) == ABSENT:
            put(found.joined, rows[i], first + i)


@compiled_loop
def candidates(found: Found, stride: int, rows: I64, places: I64, state: Bytes) -> bool:
    """Sets the global place at which each row may be, by tags alone, or ABSENT.

    Returns whether one of the pages that lie farthest back is not in memory. Overwrites `state` u8 [1].
    """
    whole = found.starts[len(found.starts) - 2]
    chunk = (len(rows) + CHUNKS - 1) // CHUNKS
    farthest, is_missing = ABSENT, False
    for i in range(len(rows)):
        hashed = hash_of(rows[i])
        tag = tag_of(hashed)
        cell = next_match(found.joined, first_cell(hashed, len(found.joined.tags)), tag)
        place = ABSENT
        if cell >= 0:
            place = int(found.joined.places[cell])
        else:
            cell = next_match(found.whole, first_cell(hashed, len(found.whole.tags)), tag)
            if cell >= 0:
                place = whole + int(found.whole.places[cell])
        places[i] = place
        farthest = max(farthest, place)
        if (i + 1) % chunk == 0 or i + 1 == len(rows):
            if farthest != ABSENT and not is_missing:
                page = address_of(found, farthest, stride) // np.uint64(PAGE) * np.uint64(PAGE)
                is_missing = c_mincore(page, PAGE, state.ctypes.data) == 0 and state[0] & 1 == 0
            farthest = ABSENT
    return is_missing


@compiled_loop
def confirm(found: Found, stride: int, rows: I64, places: I64, key: I64) -> None:
    """Makes candidates sure: compares keys, and looks on where a tag misled. `key`: i64 [1], overwritten."""
    for i in range(len(rows)):
        if places[i] != ABSENT:
            c_memcpy(key.ctypes.data, address_of(found, places[i], stride), KEY_BYTES)
            if key[0] != rows[i]:
                places[i] = exact(found, rows[i], stride, key)


@compiled_arithmetic
def decode(layout: RowLayout, address: np.uint64, halves: F32, u8: Bytes, u16: U16, f32: F32, out: F32) -> None:
    """`u8`, `u16`, `f32`: views of one scratch of a row's size."""
    c_memcpy(u8.ctypes.data, address, layout.stride)
    if layout.kind == INT8:
        scale, bias = f32[2], f32[3]
        for column in range(layout.dim):
            out[column] = bias + scale * np.float32(u8[layout.values_at + column])
    elif layout.kind == FP16:
        for column in range(layout.dim):
            out[column] = halves[u16[layout.values_at // 2 + column]]
    else:
        for column in range(layout.dim):
            out[column] = f32[layout.values_at // 4 + column]
    if layout.linear_at != 0:
        out[layout.dim] = f32[layout.linear_at // 4]


@compiled_loop
def fill(
    found: Found,
    layout: RowLayout,
    initializer: Initializer,
    halves: F32,
    rows: I64,
    places: I64,
    key: I64,
    u8: Bytes,
    u16: U16,
    f32: F32,
    out: F32,
) -> int:
    """Fills out f32 [n, width] from candidates, and untrained rows with first values. Returns how many are trained."""
    confirm(found, layout.stride, rows, places, key)
    num_trained = 0
    for i in range(len(rows)):
        if places[i] == ABSENT:
            fill_row(initializer, rows[i], out[i])
        else:
            decode(layout, address_of(found, places[i], layout.stride), halves, u8, u16, f32, out[i])
            num_trained += 1
    return num_trained


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
