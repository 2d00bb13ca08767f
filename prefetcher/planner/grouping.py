"""Groups a batch's look-ups by row, table by table, in a small hash that stays in the processor's cache.

A group's look-ups stand feature-major, and the features of one table stand together; so the look-ups of a table are one range, the
tables follow each other by ascending key, and a table's look-ups keep that range when they are ordered by row:

    look-ups   | table 0: rows 7 3 7 | table 2: rows 5 5 |
    keys       |  0<<48|3   0<<48|7  |     2<<48|5       |   distinct, ascending
    inverse    |        1 0 1        |       2 2         |   look-up -> its distinct row
    by row     |        1 0 2        |       3 4         |   look-ups, in look-up order within a row
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from prefetcher.compiled import compiled
from protocol.batch import Batch
from protocol.tables import KEY_SHIFT, GroupSpec

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Value = TypeVar("Value", np.int64, np.float32)

SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: consecutive numbers land far apart
DIGIT_BITS = 8
MAX_LOOKUPS = 2**31 - 1  # look-ups and bags are int32 in a plan


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLookups:
    """One group's N look-ups in F * B bags of a batch, feature-major over the group's features."""

    ids: I64  # [N]
    offsets: I32 | None  # [F * B + 1] bag boundaries in ids, or None: every bag holds one look-up
    weights: F32 | None  # [N]
    table_starts: I64  # [T + 1] where each table's look-ups start in ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """N look-ups of U distinct rows."""

    keys: I64  # [U] ascending
    inverse: I32  # [N] look-up -> its distinct row
    segment_offsets: I32  # [U + 1] where each distinct row's look-ups start when they are ordered by row


class Grouper:
    """Cuts one group's look-ups out of batches and groups them. `num_features` counts the features of all groups."""

    def __init__(self, group: GroupSpec, num_features: int) -> None:
        self._num_features = num_features
        self._runs = consecutive_runs(group.feature_positions)
        self._feature_starts = np.cumsum([0, *(len(table.features) for table in group.tables)])
        self._tables = np.array([table.index for table in group.tables], np.int64)
        self._num_rows = np.array([table.num_embeddings for table in group.tables], np.int64)

    def lookups(self, batch: Batch) -> GroupLookups:
        check_shape(batch, self._num_features)
        runs = [(first * batch.size, end * batch.size) for first, end in self._runs]  # in bags
        table_starts = self._feature_starts * batch.size
        offsets = None
        if batch.offsets is not None:
            offsets = joined_offsets(batch.offsets, runs)
            table_starts = offsets[table_starts].astype(np.int64)
            runs = [(int(batch.offsets[first]), int(batch.offsets[end])) for first, end in runs]  # in look-ups
        weights = None if batch.weights is None else joined(batch.weights, runs)
        return GroupLookups(ids=joined(batch.ids, runs), offsets=offsets, weights=weights, table_starts=table_starts)

    def group(self, lookups: GroupLookups) -> Grouping:
        """The distinct keys, ascending, and where each look-up belongs. Ids must lie in their tables: they were checked at the edge."""
        self._check_ids(lookups)
        num_lookups = len(lookups.ids)
        inverse = np.empty(num_lookups, np.int32)
        keys = np.empty(num_lookups, np.int64)
        ends = np.empty(num_lookups, np.int32)
        num_unique = group_tables(lookups.ids, lookups.table_starts, self._tables, self._num_rows, inverse, keys, ends)
        segment_offsets = np.zeros(num_unique + 1, np.int32)
        segment_offsets[1:] = ends[:num_unique]
        return Grouping(keys=keys[:num_unique].copy(), inverse=inverse, segment_offsets=segment_offsets)

    def _check_ids(self, lookups: GroupLookups) -> None:
        starts = lookups.table_starts.tolist()
        assert starts[-1] == len(lookups.ids), f"{len(lookups.ids)} look-ups, but their tables end at {starts[-1]}"
        for table, num_rows, start, end in zip(self._tables, self._num_rows, starts[:-1], starts[1:], strict=True):
            ids = lookups.ids[start:end]
            low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
            assert 0 <= low <= high < num_rows, f"ids {low} to {high} of table {table} with {num_rows} rows passed the reader"


def consecutive_runs(positions: tuple[int, ...]) -> list[tuple[int, int]]:
    """Feature positions -> [first, end) runs of neighbours: (0, 1, 4) -> [(0, 2), (4, 5)]."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


def check_shape(batch: Batch, num_features: int) -> None:
    num_bags, num_lookups = num_features * batch.size, len(batch.ids)
    assert max(num_bags, num_lookups) <= MAX_LOOKUPS, f"{num_bags} bags of {num_lookups} look-ups are more than {MAX_LOOKUPS}"
    assert batch.weights is None or len(batch.weights) == num_lookups, f"{num_lookups} look-ups do not have one weight each"
    if batch.offsets is None:
        assert num_lookups == num_bags, f"{num_lookups} look-ups for {num_bags} single-hot bags"
        return
    assert len(batch.offsets) == num_bags + 1, f"{len(batch.offsets)} offsets for {num_bags} bags"
    first, last = int(batch.offsets[0]), int(batch.offsets[-1])
    assert (first, last) == (0, num_lookups), f"offsets from {first} to {last} for {num_lookups} look-ups"
    smallest = int(np.diff(batch.offsets).min(initial=0))
    assert smallest >= 0, f"a bag of {smallest} look-ups"


def joined(values: npt.NDArray[Value], runs: list[tuple[int, int]]) -> npt.NDArray[Value]:
    """A view where one run is all there is."""
    pieces = [values[start:end] for start, end in runs]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def joined_offsets(offsets: I64, runs: list[tuple[int, int]]) -> I32:
    """Offsets of the bags in `runs`, as if nothing stood between them."""
    sizes = np.concatenate([np.diff(offsets[first : end + 1]) for first, end in runs])
    joined = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=joined[1:])
    return joined


@compiled
def hash_size(num_rows: int) -> int:
    """A power of two that leaves every second place free."""
    size = 2
    while size < 2 * num_rows:
        size *= 2
    return size


@compiled
def group_tables(ids: I64, table_starts: I64, tables: I64, num_rows: I64, inverse: I32, keys: I64, ends: I32) -> int:
    """Fills `inverse` [N] and, for the U distinct rows returned, `keys` and the end of their look-ups; all hold N entries."""
    most = 0
    for t in range(len(tables)):
        most = max(most, min(table_starts[t + 1] - table_starts[t], num_rows[t]))
    spots = np.empty(hash_size(most), np.int32)
    rank = np.empty(most, np.int32)
    num_unique = 0
    for t in range(len(tables)):
        start, end = table_starts[t], table_starts[t + 1]
        size = hash_size(min(end - start, num_rows[t]))
        rows, counts = keys[num_unique:], ends[num_unique:]
        found = number_rows(ids[start:end], num_rows[t] <= size, spots[:size], inverse[start:end], rows, counts)
        order = np.arange(found).astype(np.int32)
        sort_pairs(rows[:found], order)
        rank_rows(order, rank, counts, start)
        for i in range(start, end):
            inverse[i] = num_unique + rank[inverse[i]]
        for u in range(found):
            rows[u] |= tables[t] << KEY_SHIFT
        num_unique += found
    return num_unique


@compiled
def number_rows(ids: I64, direct: bool, spots: I32, inverse: I32, rows: I64, counts: I32) -> int:
    """Numbers distinct rows as they appear and counts their look-ups. `direct`: every row has a spot of its own."""
    spots[:] = -1
    mask = len(spots) - 1
    found = 0
    for i in range(len(ids)):
        row = ids[i]
        spot = row if direct else np.int64((np.uint64(row) * SPREAD) >> np.uint64(32)) & mask
        while spots[spot] >= 0 and rows[spots[spot]] != row:
            spot = (spot + 1) & mask
        if spots[spot] < 0:
            spots[spot] = found
            rows[found] = row
            counts[found] = 0
            found += 1
        inverse[i] = spots[spot]
        counts[spots[spot]] += 1
    return found


@compiled
def rank_rows(order: I32, rank: I32, counts: I32, start: int) -> None:
    """Order of appearance -> ascending order; counts become the ends of look-ups, which begin at `start`."""
    ends = np.empty(len(order), np.int32)
    end = start
    for u in range(len(order)):
        rank[order[u]] = u
        end += counts[order[u]]
        ends[u] = end
    counts[: len(order)] = ends


@compiled
def sort_pairs(keys: I64, values: I32) -> None:
    """Sorts both by ascending key (not negative), in place and stable; digits in which no two keys differ cost nothing."""
    different = np.int64(0)
    for i in range(len(keys)):
        different |= keys[i] ^ keys[0]
    spare_keys, spare_values = np.empty_like(keys), np.empty_like(values)
    shift = 0
    while different >> shift:
        if (different >> shift) & (2**DIGIT_BITS - 1):
            sort_digit(keys, values, spare_keys, spare_values, shift)
            keys[:] = spare_keys
            values[:] = spare_values
        shift += DIGIT_BITS
        if shift >= 64:
            break


@compiled
def sort_digit(keys: I64, values: I32, sorted_keys: I64, sorted_values: I32, shift: int) -> None:
    places = np.zeros(2**DIGIT_BITS + 1, np.int64)
    for i in range(len(keys)):
        places[((keys[i] >> shift) & (2**DIGIT_BITS - 1)) + 1] += 1
    for digit in range(2**DIGIT_BITS):
        places[digit + 1] += places[digit]
    for i in range(len(keys)):
        digit = (keys[i] >> shift) & (2**DIGIT_BITS - 1)
        sorted_keys[places[digit]] = keys[i]
        sorted_values[places[digit]] = values[i]
        places[digit] += 1


@compiled
def order_by_row(inverse: I32, segment_offsets: I32, unique_slots: I32, slots: I32, order: I32) -> None:
    """Fills `slots` [N], the slot of each look-up, and `order` [N], the look-ups by row, stable."""
    place = segment_offsets[:-1].copy()
    for i in range(len(inverse)):
        u = inverse[i]
        slots[i] = unique_slots[u]
        order[place[u]] = i
        place[u] += 1


@compiled
def bags_of(order: I32, offsets: I32, bags: I32) -> None:
    """Fills `bags` [N]: the bag that holds look-up order[i]."""
    bag_of_lookup = np.empty(len(order), np.int32)
    for bag in range(len(offsets) - 1):
        bag_of_lookup[offsets[bag] : offsets[bag + 1]] = bag
    for i in range(len(order)):
        bags[i] = bag_of_lookup[order[i]]
