"""Groups a batch's look-ups by row, table by table.

A group's look-ups are feature-major, and the features of one table are neighbours; so the look-ups of a table are one
range, the tables follow each other by ascending key, and a table's look-ups keep that range when they are ordered by
row. A look-up is stored as its position in its table's range, which takes two bytes if no table has more than 65,536
look-ups:

    look-ups   | table 0: rows 7 3 7 | table 2: rows 5 5 |
    order      |        1 0 2        |       0 1         |   look-ups of the table by row, in look-up order within a row
    keys       |  0<<48|3   0<<48|7  |     2<<48|5       |   distinct, ascending
    segments   0         1           3                   5   where each distinct row's look-ups start, and the last end

Unpooled features (pooling = "none") end here: each of their look-ups becomes a separate bag, and the start of each
sample's bags is stored beside them. All later code, including the kernels, pools every bag.

A table with few rows is counted row by row, a table with few rows in the batch uses a small hash, and any other is
sorted by digits. Tables are independent, so several threads may divide them: the result does not depend on their
number.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rowcast.job.tables import KEY_SHIFT, GroupSpec
from rowcast.protocol.batch import Lookups
from rowcast.protocol.parts import ids_of_features
from rowcast.protocol.plan import MOST_ORDERED, arrange
from rowcast.runtime.arrays import F32, GOLDEN, I32, I64, U16, U32, U64
from rowcast.runtime.compiled import compiled, compiled_loop, compiled_part
from rowcast.runtime.stages import ThreadPool

Order = U16 | I32
Value = TypeVar("Value", np.int64, np.float32)

MAX_LOOKUPS = 2**31 - 1  # look-ups and bags are int32 in a plan
NARROW_BITS = 16  # of a look-up's position in its table's range, where two bytes hold it
DIGIT_BITS = 12  # 48 is a multiple: a key's table and its row share no digit
MOST_DIGITS = 2**DIGIT_BITS
COUNTED_ROWS = 2  # a table with at most this many rows per look-up is counted row by row
ONE = np.uint32(1)  # indexing with unsigned integers saves the test for negative ones
OUTSIDE, TOO_MANY = -1, -2  # instead of a number of rows
SORTED_AT_ONCE = 2**16  # pairs: 768 KiB of spare arrays, which a nearby cache holds
FEW_ROWS = 1024  # distinct rows of a table in a batch that a hash in the nearest cache holds


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLookups:
    """One group's N look-ups in F * B bags of a batch, feature-major over the group's features."""

    ids: I64  # [N]
    offsets: I32 | None  # [F * B + 1] bag boundaries in ids, or None: every bag holds one look-up
    weights: F32 | None  # [N]
    table_starts: I64  # [T + 1] where each table's look-ups start in ids


@dataclass(kw_only=True, slots=True)  # frozen, it would take twice as long to make: one a group and step
class Grouping:
    """N look-ups of U distinct rows of T tables."""

    keys: I64  # [U] ascending
    order: Order  # [N] look-ups by row, counted from their table's first
    segment_offsets: I32  # [U + 1] where each distinct row's look-ups start in `order`
    table_starts: I64  # [T + 1] where each table's look-ups start
    row_starts: I64  # [T + 1] where each table's distinct rows start
    offsets: I32 | None  # [G + 1] bag boundaries in ids as in GroupPlan, or None: every bag holds one look-up
    weights: F32 | None  # [N]
    sequence_offsets: I32 | None  # [S, B + 1] as in GroupPlan

    @property
    def is_ordered(self) -> bool:
        """Whether `order` is all that the trainer needs: each bag holds one look-up, at a position of two bytes."""
        has_others = (self.offsets is not None) | (self.weights is not None) | (self.sequence_offsets is not None)
        return not has_others and self.order.dtype == np.uint16

    @property
    def num_unique(self) -> int:
        return len(self.keys)

    @property
    def num_lookups(self) -> int:
        return len(self.order)

    @property
    def num_bags(self) -> int:
        return len(self.order) if self.offsets is None else len(self.offsets) - 1

    def bag_order(self, order: I32) -> I32:
        """Returns the bag of each look-up, in `order`."""
        if self.offsets is None:
            return order
        bags = np.empty(len(order), np.int32)
        bags_of(order, self.offsets, bags)
        return bags

    @property
    def nbytes(self) -> int:
        more = [array for array in (self.offsets, self.weights, self.sequence_offsets) if array is not None]
        return sum([array.nbytes for array in (self.keys, self.order, self.segment_offsets, *more)])


class Grouper:
    """Extracts one group's look-ups from batches and groups them. `num_features`: of a batch."""

    def __init__(self, group: GroupSpec, num_features: int, pool: ThreadPool | None = None) -> None:
        self._num_features, self.num_tables = num_features, len(group.tables)
        self._runs = consecutive_runs(group.feature_positions)
        self._feature_starts = np.cumsum([0, *(len(table.features) for table in group.tables)])
        self._unpooled = group.unpooled_features
        self._tables = np.array([table.index for table in group.tables], np.int64)
        self._num_rows = np.array([table.num_embeddings for table in group.tables], np.int64)
        self._pool = pool or ThreadPool()

    def lookups(self, batch: Lookups) -> GroupLookups:
        check_shape(batch, self._num_features)
        runs = [(first * batch.size, end * batch.size) for first, end in self._runs]  # in bags
        table_starts = self._feature_starts * batch.size
        offsets = None
        if batch.offsets is not None:
            offsets = joined_offsets(batch.offsets, runs)
            table_starts = offsets[table_starts].astype(np.int64)
            runs = [(int(batch.offsets[first]), int(batch.offsets[end])) for first, end in runs]  # in look-ups
        weights = None if batch.weights is None else joined(batch.weights, runs)
        ids = joined(batch.ids, runs).view()
        ids.flags.writeable = False  # some readers' are, and loops are compiled for one kind
        return GroupLookups(ids=ids, offsets=offsets, weights=weights, table_starts=table_starts)

    def group(self, lookups: GroupLookups) -> Grouping:
        """Returns the distinct keys, ascending, and where each look-up belongs. The reader has checked the ids."""
        (grouping,) = self.group_each(lookups, [self], np.array([0, len(self._tables)]))
        return grouping

    def group_each(self, lookups: GroupLookups, groupers: Sequence["Grouper"], firsts: I64) -> tuple[Grouping, ...]:
        """`groupers`: of each group whose look-ups these are. `firsts` [groups + 1]: where its tables start among
        these."""
        starts, num_lookups = lookups.table_starts, len(lookups.ids)
        assert starts[-1] == num_lookups, f"{num_lookups} look-ups, but their tables end at {starts[-1]}"
        is_narrow = np.diff(starts).max(initial=0) <= MOST_ORDERED
        order: Order = np.empty(num_lookups, np.uint16) if is_narrow else np.empty(num_lookups, np.int32)
        keys, ends = np.empty(num_lookups, np.int64), np.empty(num_lookups, np.int32)
        num_rows = np.zeros(len(self._tables), np.int64)

        def work(first: int, end: int) -> None:
            group_tables(first, end, lookups.ids, starts, self._tables, self._num_rows, order, keys, ends, num_rows)

        self._pool.share(work, 0, len(starts) - 1, starts=starts)
        for t in np.flatnonzero(num_rows == OUTSIDE).tolist():
            ids = lookups.ids[lookups.table_starts[t] : lookups.table_starts[t + 1]]
            what = f"ids {ids.min()} to {ids.max()} of table {self._tables[t]} with {self._num_rows[t]} rows"
            raise AssertionError(f"{what} passed the reader")
        num_groups, num_unique = len(groupers), int(num_rows.sum())
        closed, segments = np.empty(num_unique, np.int64), np.empty(num_unique + num_groups, np.int32)
        table_starts, row_starts = np.empty((2, len(starts) - 1 + num_groups), np.int64)
        row_bounds = np.zeros(num_groups + 1, np.int64)
        close_up(firsts, starts, num_rows, keys, ends, closed, segments, table_starts, row_starts, row_bounds)
        bounds = [places.tolist() for places in (row_bounds, starts[firsts], firsts, self._feature_starts[firsts])]
        groupings = []
        for g, (grouper, rows, row_range, tables, features) in enumerate(
            zip(groupers, *map(pairwise, bounds), strict=True)
        ):
            offsets, sequence_offsets = grouper.bags(row_range[1] - row_range[0], self._offsets_of(lookups, *features))
            groupings.append(
                Grouping(
                    keys=closed[rows[0] : rows[1]],
                    order=order[row_range[0] : row_range[1]],
                    segment_offsets=segments[rows[0] + g : rows[1] + g + 1],
                    table_starts=table_starts[tables[0] + g : tables[1] + g + 1],
                    row_starts=row_starts[tables[0] + g : tables[1] + g + 1],
                    offsets=offsets,
                    weights=None if lookups.weights is None else lookups.weights[row_range[0] : row_range[1]],
                    sequence_offsets=sequence_offsets,
                )
            )
        return tuple(groupings)

    def _offsets_of(self, lookups: GroupLookups, first: int, end: int) -> I32 | None:
        """Returns the bag boundaries of these features, from 0 on."""
        if lookups.offsets is None:
            return None
        size = (len(lookups.offsets) - 1) // max(int(self._feature_starts[-1]), 1)
        bag_offsets = lookups.offsets[first * size : end * size + 1]
        return bag_offsets - bag_offsets[0] if first else bag_offsets

    def arrange(self, grouping: Grouping, unique_slots: I32) -> tuple[I32, I32]:
        """Returns each look-up's slot [N] and the look-ups by row [N]. `unique_slots` [U]: the distinct rows' slots."""
        slots, order = np.empty(len(grouping.order), np.int32), np.empty(len(grouping.order), np.int32)

        def work(first: int, end: int) -> None:
            row, starts, segments = grouping.row_starts[first], grouping.table_starts, grouping.segment_offsets
            arrange(first, end, row, grouping.order, starts, segments, unique_slots, slots, order)

        self._pool.share(work, 0, len(grouping.table_starts) - 1, starts=grouping.table_starts)
        return slots, order

    def bags(self, num_lookups: int, offsets: I32 | None) -> tuple[I32 | None, I32 | None]:
        """Returns the `offsets` and `sequence_offsets` of a `Grouping`."""
        if not self._unpooled:
            return offsets, None
        num_features = int(self._feature_starts[-1])
        if offsets is None:
            sample_offsets = np.arange(num_lookups // num_features + 1, dtype=np.int32)
            return None, np.tile(sample_offsets, (len(self._unpooled), 1))
        batch_size = (len(offsets) - 1) // num_features
        feature_offsets = [offsets[f * batch_size : (f + 1) * batch_size + 1] for f in range(num_features)]
        sequence_offsets = np.stack([feature_offsets[f] - feature_offsets[f][0] for f in self._unpooled])
        if len(self._unpooled) == num_features:
            return None, sequence_offsets
        return offsets_with_unpooled(feature_offsets, self._unpooled), sequence_offsets


class JointGrouper:
    """Groups the look-ups of all groups in one call, which is faster for small batches."""

    def __init__(self, groups: Sequence[GroupSpec], pool: ThreadPool | None = None) -> None:
        self._groups, self._pool = tuple(groups), pool
        self.features = sorted({position for group in groups for position in group.feature_positions})
        places = {position: place for place, position in enumerate(self.features)}
        groups = [
            replace(group, feature_positions=tuple(places[p] for p in group.feature_positions)) for group in groups
        ]
        positions = tuple(position for group in groups for position in group.feature_positions)
        self.each = [Grouper(group, len(self.features), pool) for group in groups]
        tables = tuple(table for group in groups for table in group.tables)
        joint = replace(groups[0], tables=tables, feature_positions=positions)
        self._all = Grouper(joint, len(self.features), pool)
        self._firsts = np.cumsum([0, *(len(group.tables) for group in groups)])

    def group(self, batch: Lookups) -> tuple[Grouping, ...]:
        """Returns each group's."""
        lookups = self._all.lookups(batch)
        if np.diff(lookups.table_starts).max(initial=0) > MOST_ORDERED:  # groups may differ in the dtype of `order`
            return tuple(grouper.group(grouper.lookups(batch)) for grouper in self.each)
        return self._all.group_each(lookups, self.each, self._firsts)

    def of(self, tables: Collection[int]) -> "JointGrouper":
        """Returns that of some tables, by index. A group may have none of them."""
        if all(table.index in tables for group in self._groups for table in group.tables):
            return self
        return JointGrouper([some_tables(group, tables) for group in self._groups], self._pool)

    def only(self, batch: Lookups) -> Lookups:
        """Returns the look-ups of `features`, which `group` takes. `batch`: of all features of the job."""
        if batch.num_bags == len(self.features) * batch.size:
            return batch
        return ids_of_features(batch, slice(0, batch.size), (), self.features)


def some_tables(group: GroupSpec, tables: Collection[int]) -> GroupSpec:
    features = zip(group.feature_positions, group.feature_tables(), strict=True)
    return replace(
        group,
        tables=tuple(table for table in group.tables if table.index in tables),
        feature_positions=tuple(position for position, table in features if table.index in tables),
    )


def consecutive_runs(positions: tuple[int, ...]) -> list[tuple[int, int]]:
    """Feature positions -> [first, end) runs of neighbours: (0, 1, 4) -> [(0, 2), (4, 5)]."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


def check_shape(batch: Lookups, num_features: int) -> None:
    num_bags, num_lookups = num_features * batch.size, len(batch.ids)
    assert max(num_bags, num_lookups) <= MAX_LOOKUPS, (
        f"{num_bags} bags of {num_lookups} look-ups are more than {MAX_LOOKUPS}"
    )
    assert batch.weights is None or len(batch.weights) == num_lookups, (
        f"{num_lookups} look-ups do not have one weight each"
    )
    if batch.offsets is None:
        assert num_lookups == num_bags, f"{num_lookups} look-ups for {num_bags} single-hot bags"
        return
    assert len(batch.offsets) == num_bags + 1, f"{len(batch.offsets)} offsets for {num_bags} bags"
    first, last = int(batch.offsets[0]), int(batch.offsets[-1])
    assert (first, last) == (0, num_lookups), f"offsets from {first} to {last} for {num_lookups} look-ups"
    smallest = int(np.diff(batch.offsets).min(initial=0))
    assert smallest >= 0, f"a bag of {smallest} look-ups"


def joined(values: npt.NDArray[Value], runs: list[tuple[int, int]]) -> npt.NDArray[Value]:
    parts = [values[start:end] for start, end in runs] or [values[:0]]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def joined_offsets(offsets: I64, runs: list[tuple[int, int]]) -> I32:
    """Returns the offsets of the bags in `runs`, as if they were neighbours."""
    sizes = np.concatenate([offsets[:0], *(np.diff(offsets[first : end + 1]) for first, end in runs)])
    joined = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=joined[1:])
    return joined


def offsets_with_unpooled(feature_offsets: list[I32], unpooled: tuple[int, ...]) -> I32:
    """Joins [B + 1] offsets of each feature, with every look-up of the `unpooled` ones as a bag."""
    starts = [
        np.arange(offsets_of_feature[0], offsets_of_feature[-1], dtype=np.int32)
        if f in unpooled
        else offsets_of_feature[:-1]
        for f, offsets_of_feature in enumerate(feature_offsets)
    ]
    offsets = np.concatenate([*starts, feature_offsets[-1][-1:]])
    assert len(offsets) - 1 <= MAX_LOOKUPS, f"{len(offsets) - 1} bags are more than {MAX_LOOKUPS}"
    return offsets


@compiled
def group_tables(
    first: int,
    end: int,
    ids: I64,
    starts: I64,
    tables: I64,
    table_rows: I64,
    order: Order,
    keys: I64,
    ends: I32,
    num_rows: I64,
) -> None:
    """Groups tables `first` to `end` - 1. A table fills `keys` and the ends of their look-ups from its first look-up
    on; its `num_rows` becomes the number of its distinct rows, or OUTSIDE if an id is not in the table."""
    most = np.int64(0)
    for t in range(first, end):
        most = max(most, starts[t + 1] - starts[t])
    counts = np.empty(max(COUNTED_ROWS * most, MOST_DIGITS), np.uint32)
    packed, spare = np.empty(most, np.uint64), np.empty(most, np.uint64)
    cells, cell_numbers = np.empty(4 * FEW_ROWS, np.int64), np.empty(4 * FEW_ROWS, np.uint16)
    for t in range(first, end):
        a, b = starts[t], starts[t + 1]
        some, by_row, rows, row_ends = ids[a:b], order[a:b], keys[a:b], ends[a:b]
        if not are_below(some, table_rows[t]):
            num_rows[t] = OUTSIDE
            continue
        if table_rows[t] <= COUNTED_ROWS * (b - a):
            num_distinct = count_rows(some, counts[: table_rows[t]], by_row, rows, row_ends)
        else:
            num_distinct = number_rows(some, cells, cell_numbers, spare, rows)
            if num_distinct != TOO_MANY:
                which = numbered(num_distinct)
                sort_pairs(rows[:num_distinct], which)
                count_numbers(spare[: b - a], which, counts[:num_distinct], by_row, row_ends)
            elif b - a <= 2**NARROW_BITS:
                num_distinct = sort_rows(
                    some, table_rows[t], packed[: b - a], spare[: b - a], counts, by_row, rows, row_ends
                )
            else:
                num_distinct = sort_wide(some, by_row, rows, row_ends)
        for u in range(num_distinct):  # rows become keys, and ends within the table's look-ups those within the group's
            rows[u] |= tables[t] << KEY_SHIFT
            row_ends[u] += a
        num_rows[t] = num_distinct


@compiled_loop
def close_up(
    firsts: I64,
    starts: I64,
    num_rows: I64,
    keys: I64,
    ends: I32,
    closed: I64,
    segments: I32,
    table_starts: I64,
    row_starts: I64,
    row_bounds: I64,
) -> None:
    """Fills the last five with each group's arrays of a `Grouping`, one after another, and the groups' first rows."""
    num_distinct = 0
    for g in range(len(firsts) - 1):
        origin, segments[num_distinct + g] = starts[firsts[g]], 0
        for t in range(firsts[g], firsts[g + 1] + 1):
            table_starts[t + g], row_starts[t + g] = starts[t] - origin, num_distinct - row_bounds[g]
            if t < firsts[g + 1]:
                for u in range(starts[t], starts[t] + num_rows[t]):
                    closed[num_distinct], segments[num_distinct + g + 1] = keys[u], ends[u] - origin
                    num_distinct += 1
        row_bounds[g + 1] = num_distinct


@compiled_part
def are_below(ids: I64, num_rows: int) -> bool:
    signs = np.int64(0)
    for i in range(len(ids)):
        signs |= ids[i] | (num_rows - 1 - ids[i])
    return signs >= 0  # type: ignore[return-value]


@compiled_part
def count_rows(ids: I64, counts: U32, order: Order, rows: I64, ends: I32) -> int:
    counts[:] = 0
    for i in range(len(ids)):
        counts[np.uint64(ids[i])] += ONE
    num_distinct = 0
    end = np.uint32(0)
    for row in range(len(counts)):
        count = counts[row]
        if count:
            counts[row] = end
            end += count
            rows[num_distinct], ends[num_distinct] = row, end
            num_distinct += 1
    for i in range(len(ids)):
        position = np.uint64(ids[i])
        order[counts[position]] = i
        counts[position] += ONE
    return num_distinct


@compiled_part
def number_rows(ids: I64, cells: I64, cell_numbers: U16, numbers: U64, rows: I64) -> int:
    """Numbers few distinct rows in the order of their appearance. Returns TOO_MANY if there are more than FEW_ROWS."""
    cells[:] = -1
    mask = np.uint64(len(cells) - 1)
    num_distinct = 0
    for i in range(len(ids)):
        row = ids[i]
        cell = ((np.uint64(row) * GOLDEN) >> np.uint64(32)) & mask
        while (cells[cell] != row) & (cells[cell] != -1):
            cell = (cell + np.uint64(1)) & mask
        if cells[cell] == -1:
            if num_distinct == FEW_ROWS:
                return TOO_MANY
            cells[cell], cell_numbers[cell], rows[num_distinct] = row, num_distinct, row
            num_distinct += 1
        numbers[i] = cell_numbers[cell]
    return num_distinct


@compiled_part
def count_numbers(numbers: U64, which: I32, counts: U32, order: Order, ends: I32) -> None:
    counts[:] = 0
    for i in range(len(numbers)):
        counts[numbers[i]] += ONE
    end = np.uint32(0)
    for u in range(len(which)):
        count = counts[which[u]]
        counts[which[u]] = end
        end += count
        ends[u] = end
    for i in range(len(numbers)):
        order[counts[numbers[i]]] = i
        counts[numbers[i]] += ONE


@compiled_part
def sort_rows(ids: I64, num_rows: int, packed: U64, spare: U64, counts: U32, order: Order, rows: I64, ends: I32) -> int:
    """Sorts (row, look-up) pairs in words of 48 + 16 bits, by as few digits as hold `num_rows`."""
    num_bits = 1
    while num_rows > 1 << num_bits:
        num_bits += 1
    num_digits = -(-num_bits // digit_bits(len(ids)))
    bits = -(-num_bits // num_digits)
    positions, mask = counts[: 1 << bits], np.uint64((1 << bits) - 1)
    sort_first_digit(ids, packed, positions, mask)
    for digit in range(1, num_digits):
        sort_next_digit(packed, spare, positions, np.uint64(NARROW_BITS + digit * bits), mask)
        packed, spare = spare, packed
    num_runs = 0
    before = np.uint64(2**64 - 1)
    for i in range(len(packed)):
        row = packed[i] >> np.uint64(NARROW_BITS)
        order[i] = packed[i]
        num_runs += row != before
        before = row
        rows[np.uint64(num_runs - 1)] = row
        ends[np.uint64(num_runs - 1)] = i + 1
    return num_runs


@compiled_part
def sort_first_digit(ids: I64, packed: U64, positions: U32, mask: np.uint64) -> None:
    positions[:] = 0
    for i in range(len(ids)):
        positions[np.uint64(ids[i]) & mask] += ONE
    starts_of(positions)
    for i in range(len(ids)):
        row = np.uint64(ids[i])
        digit = row & mask
        packed[positions[digit]] = (row << np.uint64(NARROW_BITS)) | np.uint64(i)
        positions[digit] += ONE


@compiled_part
def sort_next_digit(words: U64, sorted_words: U64, positions: U32, shift: np.uint64, mask: np.uint64) -> None:
    positions[:] = 0
    for i in range(len(words)):
        positions[(words[i] >> shift) & mask] += ONE
    starts_of(positions)
    for i in range(len(words)):
        digit = (words[i] >> shift) & mask
        sorted_words[positions[digit]] = words[i]
        positions[digit] += ONE


@compiled_part
def starts_of(counts: U32) -> None:
    start = np.uint32(0)
    for digit in range(len(counts)):
        count = counts[digit]
        counts[digit] = start
        start += count


@compiled
def numbered(count: int) -> I32:
    numbers = np.empty(count, np.int32)
    for i in range(count):
        numbers[i] = i
    return numbers


@compiled
def sort_wide(ids: I64, order: Order, rows: I64, ends: I32) -> int:
    which = numbered(len(ids))
    copy(ids, rows)
    sort_pairs(rows, which)
    copy(which, order)
    num_distinct = 0
    for i in range(len(rows)):
        num_distinct += i == 0 or rows[i] != rows[num_distinct - 1]
        rows[num_distinct - 1] = rows[i]
        ends[num_distinct - 1] = i + 1
    return num_distinct


@compiled_part
def copy(source: Order | I64, target: Order | I64) -> None:
    for i in range(len(source)):  # numba takes longer to compile an assignment of slices than to sort
        target[i] = source[i]


@compiled
def sort_pairs(keys: I64, values: I32) -> None:
    """Sorts both by ascending key (not negative), in place and stable; skips digits in which all keys agree."""
    different = np.int64(0)
    for i in range(len(keys)):
        different |= keys[i] ^ keys[0]
    spare_keys, spare_values = np.empty(len(keys), np.int64), np.empty(len(values), np.int32)
    bits = digit_bits(len(keys))
    positions = np.empty(1 << bits, np.uint32)
    shift: int = np.int64(0)  # type: ignore[assignment]  # a literal 0 would be compiled apart
    moved = False  # the pairs are in the spare arrays
    while different >> shift:
        if (different >> shift) & ((1 << bits) - 1):
            if moved:
                sort_digit(spare_keys, spare_values, keys, values, positions, shift)
            else:
                sort_digit(keys, values, spare_keys, spare_values, positions, shift)
            moved = not moved
        shift += bits
        if shift >= 64:
            break
    if moved:
        copy(spare_keys, keys)
        copy(spare_values, values)


@compiled
def sort_distinct(keys: I64, values: I32) -> None:
    """Like `sort_pairs` for distinct keys, with spare arrays for SORTED_AT_ONCE pairs only.

    Splits the pairs in place by the highest bit in which their keys differ until a range fits.
    """
    begins, ends = np.empty(64, np.int64), np.empty(64, np.int64)  # ranges to do; each split uses a new one of 63 bits
    begins[0], ends[0], count = 0, len(keys), 1
    while count:
        begin, end = begins[count - 1], ends[count - 1]
        if end - begin <= SORTED_AT_ONCE:
            sort_pairs(keys[begin:end], values[begin:end])
            count -= 1
        else:
            ends[count - 1] = begins[count] = split(keys, values, begin, end)
            ends[count] = end
            count += 1


@compiled_part
def split(keys: I64, values: I32, begin: int, end: int) -> int:
    """Moves pairs with the highest differing bit set after the others. Returns where they begin."""
    different, bit = np.int64(0), np.int64(1)
    for i in range(begin, end):
        different |= keys[i] ^ keys[begin]
    while bit <= different >> 1:
        bit <<= 1
    while begin < end:
        if keys[begin] & bit:
            end -= 1
            keys[begin], keys[end] = keys[end], keys[begin]
            values[begin], values[end] = values[end], values[begin]
        else:
            begin += 1
    return begin


@compiled_part
def digit_bits(num_keys: int) -> int:
    return DIGIT_BITS if num_keys > MOST_DIGITS else DIGIT_BITS - 4


@compiled_part
def sort_digit(keys: I64, values: I32, sorted_keys: I64, sorted_values: I32, positions: U32, shift: int) -> None:
    mask, by = np.uint64(len(positions) - 1), np.uint64(shift)
    positions[:] = 0
    for i in range(len(keys)):
        positions[(np.uint64(keys[i]) >> by) & mask] += ONE
    starts_of(positions)
    for i in range(len(keys)):
        digit = (np.uint64(keys[i]) >> by) & mask
        sorted_keys[positions[digit]] = keys[i]
        sorted_values[positions[digit]] = values[i]
        positions[digit] += ONE


@compiled
def bags_of(order: I32, offsets: I32, bags: I32) -> None:
    """Fills `bags` [N] with the bag of look-up order[i]."""
    bag_of_lookup = np.empty(len(order), np.int32)
    for bag in range(len(offsets) - 1):
        bag_of_lookup[offsets[bag] : offsets[bag + 1]] = bag
    for i in range(len(order)):
        bags[i] = bag_of_lookup[order[i]]
