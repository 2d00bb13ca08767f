"""Makes the arrays of a plan that follow from others, so that they are not sent.

Chunks of the look-ups of long rows are cut on the host when the plan arrives; a device sums them in parallel. `slots`
and `bag_order` are made from `order` where the plan is.

look-ups of a long row    | 0 1 2 ... 127 | 128 ... 255 | 256 257 |      CHUNK_LOOKUPS per chunk
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rowcast.job.tables import GroupSpec
from rowcast.protocol.arrange import arrange_each, table_starts
from rowcast.protocol.plan import ARRAY_ALIGNMENT
from rowcast.runtime.arrays import I32, I64
from rowcast.runtime.compiled import compiled_loop, compiled_part

CHUNK_LOOKUPS = 128  # a row with more look-ups in a step is a long row
ARRAY_ITEMS = ARRAY_ALIGNMENT // 4
SPARE_ITEMS = (4 + 1) * ARRAY_ITEMS  # of a group, before its arrays and for the first row that may be long

A = TypeVar("A")  # a numpy array on the host, a tensor on the device


class Chunks(NamedTuple, Generic[A]):
    """P chunks of the look-ups of K long rows; all but the last chunk of a row have CHUNK_LOOKUPS look-ups."""

    long_rows: A  # i32 [K] the long rows, as positions in unique_slots
    chunk_offsets: A  # i32 [K + 1] start of each long row's chunks
    chunk_rows: A  # i32 [P] the long row of each chunk, as a position in long_rows


def cut_long_rows(segment_offsets: I32) -> Chunks[I32]:
    """Returns the chunks. `segment_offsets` i32 [U + 1]: start and end of each row's look-ups."""
    places = [(0, len(segment_offsets) - 1, 0, 0)]
    room = most_chunk_items(int(segment_offsets[-1])) + SPARE_ITEMS
    items, found = derived_items(segment_offsets, places, room)
    return Chunks(*(items[first:end] for first, end in found[0, :-1].tolist()))


def derived_items(words: I32, places: Sequence[tuple[int, ...]], room: int) -> tuple[I32, I64]:
    """Returns the chunks of several groups and their fetch_slots as i64, each array from a multiple of ARRAY_ITEMS; and
    where these four arrays of each group begin and end, [groups, 4, 2].

    places: of each group, where its segment_offsets begin in `words`, its rows, where its fetch_slots begin, and how
    many these are. room: at least as many items as all take."""
    items, found = np.zeros(room, np.int32), np.empty((len(places), len(Chunks._fields) + 1, 2), np.int64)
    return items[: derive_each(words, np.array(places, np.int64), CHUNK_LOOKUPS, items, found)], found


@compiled_loop
def derive_each(words: I32, places: I64, longest: int, items: I32, found: I64) -> int:
    end = 0
    for k in range(len(places)):
        segments, fetch, size = places[k, 0], places[k, 2], places[k, 3]
        begin, num_long, num_chunks = end, 0, 0
        for row in range(places[k, 1]):
            items[begin + num_long] = row
            num_long += words[segments + row + 1] - words[segments + row] > longest
        found[k, 0, 0], found[k, 0, 1] = begin, begin + num_long
        offsets = after(begin + num_long)
        items[offsets] = 0
        for i in range(num_long):
            row = segments + items[begin + i]
            num_chunks += -(-(words[row + 1] - words[row]) // longest)
            items[offsets + 1 + i] = num_chunks
        found[k, 1, 0], found[k, 1, 1] = offsets, offsets + num_long + 1
        rows = after(offsets + num_long + 1)
        for i in range(num_long):
            for chunk in range(items[offsets + i], items[offsets + 1 + i]):
                items[rows + chunk] = i
        found[k, 2, 0], found[k, 2, 1] = rows, rows + num_chunks
        slots = after(rows + num_chunks)
        for i in range(size):
            items[slots + 2 * i], items[slots + 2 * i + 1] = words[fetch + i], 0
        found[k, 3, 0], found[k, 3, 1] = slots, slots + 2 * size
        end = after(slots + 2 * size)
    return end


@compiled_part
def after(end: int) -> int:
    """Where the array after the one that ends there begins."""
    return (end + ARRAY_ITEMS - 1) // ARRAY_ITEMS * ARRAY_ITEMS


def most_chunk_items(num_lookups: int) -> int:
    """Returns an upper bound of the number of items in a group's three arrays."""
    long_rows = num_lookups // (CHUNK_LOOKUPS + 1)
    return long_rows + (long_rows + 1) + (num_lookups // CHUNK_LOOKUPS + long_rows)


class Arranger:
    """Makes `slots` and `bag_order` of all groups in one compiled call on a CPU."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._groups = groups
        starts = [table_starts(group, 1) for group in groups]
        self._starts = np.concatenate(starts)
        self._firsts = list(accumulate(map(len, starts), initial=0))

    def arrange(self, batch_size: int, plans: Sequence[tuple[int, ...]]) -> None:
        """Writes `slots` and `bag_order`, i32 [N], of each plan: the group's number, its look-ups, its distinct rows,
        and the addresses on the host of its `order`, u16 [N], checked, `segment_offsets` and `unique_slots`, as in
        `LookupArrays`, and of the two."""
        places = [(self._firsts[g], len(self._groups[g].tables), *own) for g, *own in plans]
        arrange_each(np.array(places, np.int64).reshape(-1, 9), self._starts * batch_size)


def arrange_in_torch(
    group: GroupSpec, order: Tensor, segment_offsets: Tensor, unique_slots: Tensor, slots: Tensor, bag_order: Tensor
) -> None:
    """Does the same for one group in a few operations of torch, without a wait for the device."""
    batch_size = len(order) // group.num_features
    by_feature = bag_order.view(group.num_features, batch_size)
    by_feature.copy_(order.view_as(by_feature))
    by_feature.add_(first_features(tuple(table_starts(group, 1).tolist()), order.device)[:, None], alpha=batch_size)
    positions = torch.arange(len(order), dtype=torch.int32, device=order.device)
    rows = torch.searchsorted(segment_offsets[1:], positions, right=True, out_int32=True)
    slots.index_copy_(0, bag_order.long(), unique_slots.index_select(0, rows))


@cache
def first_features(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns i32 [F]: for each feature the first one of its table. `starts`: each table's first feature, and the
    end."""
    firsts = torch.tensor(starts, dtype=torch.int32, device="cpu")
    return firsts[:-1].repeat_interleave(firsts.diff()).to(device)
