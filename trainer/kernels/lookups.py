"""Makes a plan's look-ups from rows and slots, for checks, measurements and tests without a planner."""

from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowcast.job.tables import GroupSpec
from rowcast.protocol.arrange import arrange as compiled_arrange
from rowcast.protocol.arrange import table_starts
from rowcast.protocol.plan_layout import LookupArrays
from rowcast.runtime.arrays import F32, I32
from rowcast.trainer.kernels import GroupLookup
from rowcast.trainer.kernels.chunks import Chunks, cut_long_rows

Ints = npt.NDArray[np.integer[Any]]
Arrays = TypeVar("Arrays", bound=LookupArrays[npt.NDArray[Any]])


def lookup_arrays(
    rows: Ints, slots: I32, counts: Ints | None = None, weights: F32 | None = None, sequence_offsets: I32 | None = None
) -> LookupArrays[npt.NDArray[Any]]:
    """`rows` [N]: any numbers in the order of the keys. `slots` [N]: of each look-up's row. `counts` [G]: the look-ups
    of each bag; None: one each. Weights and offsets as in `LookupArrays`."""
    _, firsts, uses = np.unique(rows, return_index=True, return_counts=True)
    order = np.argsort(rows, kind="stable").astype(np.int32)
    return LookupArrays(
        slots=slots,
        unique_slots=slots[firsts],
        segment_offsets=bounds(uses),
        bag_order=order if counts is None else np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order],
        lookup_order=None if weights is None else order,
        offsets=None if counts is None else bounds(counts),
        weights=weights,
        sequence_offsets=sequence_offsets,
    )


def arranged(arrays: Arrays, group: GroupSpec) -> Arrays:
    """Returns the look-ups of a plan with `slots` and `bag_order` instead of `order`."""
    if arrays.order is None:
        return arrays
    slots, bag_order = np.empty(len(arrays.order), np.int32), np.empty(len(arrays.order), np.int32)
    arrange(
        group, *map(torch.from_numpy, (arrays.order, arrays.segment_offsets, arrays.unique_slots, slots, bag_order))
    )
    return replace(arrays, order=None, slots=slots, bag_order=bag_order)


def bounds(counts: Ints) -> I32:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def group_lookup(arrays: LookupArrays[npt.NDArray[Any]], batch_size: int) -> GroupLookup:
    """Returns a step's look-ups on the CPU; `arrays` may be a plan's. Uses the same memory."""
    sequences = arrays.sequence_offsets
    return GroupLookup(
        batch_size=batch_size,
        sequence_lookups=() if sequences is None else tuple(sequences[:, -1].tolist()),
        chunks=Chunks(*map(torch.from_numpy, cut_long_rows(arrays.segment_offsets))),
        **{name: torch.from_numpy(array) for name, array in arrays.named().items()},
    )


def moved(lookup: GroupLookup, device: torch.device) -> GroupLookup:
    arrays = {name: array.to(device) for name, array in lookup.named().items()}
    return replace(lookup, chunks=Chunks(*(array.to(device) for array in lookup.chunks)), **arrays)


def arrange(
    group: GroupSpec, order: Tensor, segment_offsets: Tensor, unique_slots: Tensor, slots: Tensor, bag_order: Tensor
) -> None:
    """Writes `slots` and `bag_order`, i32 [N]. `order` u16 [N], checked; the others as in `LookupArrays`."""
    batch_size = len(order) // group.num_features
    if order.device.type == "cpu":
        starts = table_starts(group, batch_size)
        arrays = (own.numpy() for own in (segment_offsets, unique_slots, slots, bag_order))
        compiled_arrange(0, len(starts) - 1, 0, order.numpy(), starts, *arrays)
    else:
        arrange_in_torch(group, order, segment_offsets, unique_slots, slots, bag_order)


def arrange_in_torch(
    group: GroupSpec, order: Tensor, segment_offsets: Tensor, unique_slots: Tensor, slots: Tensor, bag_order: Tensor
) -> None:
    """Does the same in a few operations of torch, without a wait for the device."""
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
