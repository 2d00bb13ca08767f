"""Makes `slots` and `bag_order` of a plan from its `order`, if every bag holds one look-up.

    order             1 0 2 | 0 1     look-ups by row, counted from their table's first
    starts            0       3   5   of the tables
    segment_offsets   0 1 3       5   of the rows
    unique_slots      8 4 6
    bag_order         1 0 2   3 4     start of the table + order
    slots             4 8 4   6 6     of the look-ups 0, 1, ...

Each table's part of `order` must be a permutation; otherwise some slots would be left unset. A table has at most
MOST_ORDERED look-ups, so two bytes hold each.
"""

from itertools import accumulate

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.runtime.arrays import I32, I64, U16, Bytes
from rowcast.runtime.compiled import arrays_of, compiled_loop

MOST_ORDERED = 2**16
u16_at, i32_at = arrays_of(np.uint16), arrays_of(np.int32)


def table_starts(group: GroupSpec, batch_size: int) -> I64:
    """Returns [T + 1]: where each table's look-ups start, if every bag holds one."""
    return np.array(list(accumulate((batch_size * len(table.features) for table in group.tables), initial=0)), np.int64)


@compiled_loop
def arrange(
    first: int,
    end: int,
    row: int,
    order: U16 | I32,
    starts: I64,
    segment_offsets: I32,
    unique_slots: I32,
    slots: I32,
    bag_order: I32,
) -> None:
    """Writes both arrays of the tables first to end - 1; `row` is the first one's first row."""
    for t in range(first, end):
        start = np.uint64(starts[t])
        k = starts[t]
        while k < starts[t + 1]:
            stop = min(np.int64(segment_offsets[row + 1]), starts[t + 1])
            slot = unique_slots[row]
            for j in range(k, stop):
                i = start + np.uint64(order[j])
                slots[i] = slot
                bag_order[j] = i
            k = stop
            row += segment_offsets[row + 1] == stop


@compiled_loop
def arrange_each(places: I64, starts: I64) -> None:
    """Arranges several groups. A row of `places` [*, 9] holds where the group's tables begin in `starts` and how many
    there are, its numbers of look-ups and distinct rows, and the addresses of the last five arrays of `arrange`, with
    `order` first."""
    for k in range(len(places)):
        first, num_tables, size, num_unique = places[k, 0], places[k, 1], places[k, 2], places[k, 3]
        arrange(
            0,
            num_tables,
            0,
            u16_at(places[k, 4], size),
            starts[first : first + num_tables + 1],
            i32_at(places[k, 5], num_unique + 1),
            i32_at(places[k, 6], num_unique),
            i32_at(places[k, 7], size),
            i32_at(places[k, 8], size),
        )


@compiled_loop
def first_not_permuted(order: U16, starts: I64, marks: Bytes) -> int:
    """Returns the first table whose part of `order` is no permutation, or -1. `marks`: [MOST_ORDERED], any values."""
    for t in range(len(starts) - 1):
        size = starts[t + 1] - starts[t]
        if size > len(marks):
            return t
        marks[:] = 0
        for k in range(starts[t], starts[t + 1]):
            marks[np.uint32(order[k])] = 1
        found = 0
        for i in range(size):
            found += marks[i]
        if found != size:
            return t
    return -1


@compiled_loop
def first_not_ordered(words: U16, places: I64, starts: I64, marks: Bytes) -> int:
    """Returns the first of `starts` whose table's part of an `order` is no permutation, or -1. A row of `places` [*, 4]
    holds the first item of a group's `order` in `words`, its items, and which of `starts` are the group's."""
    for k in range(len(places)):
        first, size, begin, end = places[k, 0], places[k, 1], places[k, 2], places[k, 3]
        table = first_not_permuted(words[first : first + size], starts[begin:end], marks)
        if table >= 0:
            return int(begin + table)
    return -1


@compiled_loop
def first_not_rising(words: I32, places: I64) -> int:
    """Returns the first of the places whose values do not begin with 0, or fall, or do not end with theirs; or -1. A
    row of `places` [*, 3] holds the first item in `words`, the items, and the last value."""
    for k in range(len(places)):
        first, last = places[k, 0], places[k, 0] + places[k, 1] - 1
        is_right = words[first] == 0 and words[last] == places[k, 2]
        for i in range(first, last):
            is_right &= words[i] <= words[i + 1]
        if not is_right:
            return k
    return -1
