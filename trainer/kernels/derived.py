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
from rowcast.runtime.arrays import I32

CHUNK_LOOKUPS = 128  # a row with more look-ups in a step is a long row

A = TypeVar("A")  # a numpy array on the host, a tensor on the device


class Chunks(NamedTuple, Generic[A]):
    """P chunks of the look-ups of K long rows; all but the last chunk of a row have CHUNK_LOOKUPS look-ups."""

    long_rows: A  # i32 [K] the long rows, as positions in unique_slots
    chunk_offsets: A  # i32 [K + 1] start of each long row's chunks
    chunk_rows: A  # i32 [P] the long row of each chunk, as a position in long_rows


def cut_long_rows(segment_offsets: I32) -> Chunks[I32]:
    """Returns the chunks. `segment_offsets` i32 [U + 1]: start and end of each row's look-ups."""
    (chunks,) = cut_groups([segment_offsets])
    return chunks


def cut_groups(segment_offsets: Sequence[I32]) -> list[Chunks[I32]]:
    """Returns the chunks of each group, cut in one pass: a group has few long rows, and each numpy call takes time."""
    starts = list(accumulate(map(len, segment_offsets), initial=0))
    joined = np.concatenate(segment_offsets)
    lengths = joined[1:] - joined[:-1]  # from one group to the next the offsets fall: no long row
    rows = np.flatnonzero(lengths > CHUNK_LOOKUPS).astype(np.int32)
    num_chunks = -(-lengths[rows] // CHUNK_LOOKUPS)
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(num_chunks, out=offsets[1:])
    chunk_rows = np.repeat(np.arange(len(rows), dtype=np.int32), num_chunks)
    bounds = np.searchsorted(rows, starts).tolist()
    return [
        Chunks(
            long_rows=rows[first:last] - start,
            chunk_offsets=offsets[first : last + 1] - offsets[first],
            chunk_rows=chunk_rows[offsets[first] : offsets[last]] - first,
        )
        for start, first, last in zip(starts[:-1], bounds[:-1], bounds[1:], strict=True)
    ]


def chunk_arrays(segment_offsets: Sequence[I32]) -> dict[str, I32]:
    """Returns the chunks of each group, named like the arrays of a plan, from each group's segment_offsets."""
    return {
        f"{group}.{name}": array
        for group, chunks in enumerate(cut_groups(segment_offsets))
        for name, array in zip(Chunks._fields, chunks, strict=True)
    }


def most_chunk_items(num_lookups: int) -> int:
    """Returns an upper bound of the number of items in a group's three arrays."""
    long_rows = num_lookups // (CHUNK_LOOKUPS + 1)
    return long_rows + (long_rows + 1) + (num_lookups // CHUNK_LOOKUPS + long_rows)


class Arranger:
    """Makes `slots` and `bag_order` of all groups: on a CPU in one compiled call."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._groups = groups
        starts = [table_starts(group, 1) for group in groups]
        self._starts = np.concatenate(starts)
        self._firsts = list(accumulate(map(len, starts), initial=0))

    def arrange(self, batch_size: int, plans: Sequence[tuple[int, Sequence[Tensor]]]) -> None:
        """Writes `slots` and `bag_order`, i32 [N], of each plan: a group's number, and its `order` u16 [N], checked,
        `segment_offsets` and `unique_slots`, as in `LookupArrays`, and the two."""
        if plans and plans[0][1][0].device.type != "cpu":
            for group, arrays in plans:
                arrange_in_torch(self._groups[group], *arrays)
            return
        places = [
            (
                self._firsts[g],
                len(self._groups[g].tables),
                len(own[0]),
                len(own[2]),
                *(array.data_ptr() for array in own),
            )
            for g, own in plans
        ]
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
