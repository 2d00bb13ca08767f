"""Makes a plan's look-ups from rows and slots, for checks, measurements and tests without a planner."""

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from rowcast.job.tables import GroupSpec
from rowcast.protocol.plan_layout import LookupArrays
from rowcast.runtime.arrays import F32, I32
from rowcast.trainer.kernels import GroupLookup
from rowcast.trainer.kernels.derived import Arranger, Chunks, cut_long_rows

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
    own = (arrays.order, arrays.segment_offsets, arrays.unique_slots, slots, bag_order)
    plan = (0, len(slots), len(arrays.unique_slots), *(array.ctypes.data for array in own))
    Arranger([group]).arrange(len(slots) // group.num_features, [plan])
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
