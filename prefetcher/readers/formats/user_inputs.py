"""Checks the arrays of batches of code outside this project: their dtypes, and how many entries they have."""

from typing import Any

import numpy as np

from rowcast.prefetcher.readers.columns import Ids, bag_offsets
from rowcast.prefetcher.readers.formats.user_arrays import is_array
from rowcast.protocol.batch import Batch
from rowcast.protocol.messages import MAX_DIMENSIONS
from rowcast.protocol.parts import Belonging
from rowcast.protocol.plan_layout import ITEM_BYTES
from rowcast.runtime.errors import DataError, listed


def check_inputs(batch: Batch, of: Belonging, where: str) -> None:
    """Raises DataError that starts with `where`. Ids and offsets were checked."""
    bounds = bag_offsets(batch.ids, batch.offsets)
    for name in of.batch_features:
        check_first_bag(name, lengths_of(name, batch, bounds, of), where)
    for name in of.arrays:
        if name not in batch.inputs:
            raise DataError(
                f"{where}: data.of names the array {name}, and the batch has {listed(list(batch.inputs)) or 'none'}"
            )
    for name, array in batch.inputs.items():
        check_array(name, array, where)
        if name not in of.arrays and len(array) != batch.size:
            raise DataError(
                f"{where}: {name} has {len(array)} entries for {batch.size} samples; give one for each, or set "
                f'data.of.{name} = "FEATURE" if they belong to the look-ups of a feature'
            )
        if name in of.arrays:
            num_lookups = int(lengths_of(of.arrays[name], batch, bounds, of).sum())
            if len(array) != num_lookups:
                raise DataError(
                    f"{where}: {name} has {len(array)} entries for {num_lookups} look-ups of feature "
                    f"{of.arrays[name]}; give one for each"
                )


def lengths_of(feature: str, batch: Batch, bounds: Ids, of: Belonging) -> Ids:
    """Returns the look-ups of each sample."""
    first = of.positions[feature] * batch.size
    return np.diff(bounds[first : first + batch.size + 1])


def check_first_bag(feature: str, lengths: Ids, where: str) -> None:
    others = np.flatnonzero(lengths[1:])
    if len(others):
        raise DataError(
            f"{where}: feature {feature} has look-ups in sample {others[0] + 1}, and data.of.{feature} = "
            '"batch"; give all of them to sample 0'
        )


def check_array(name: str, array: Any, where: str) -> None:
    if not isinstance(name, str) or "." in name or not name.isprintable():
        raise DataError(f"{where}: the array {name!r} needs a name that is printable text without a dot; rename it")
    dtype = array.dtype if is_array(array) else None
    if dtype is None or dtype.str[1:] not in ITEM_BYTES or not dtype.isnative:
        raise DataError(
            f"{where}: {name} is {type(array).__name__ if dtype is None else dtype}; give an array of bool, integers "
            "of 8 to 64 bits or floats of 16 to 64"
        )
    if not 1 <= array.ndim <= MAX_DIMENSIONS:
        raise DataError(
            f"{where}: {name} has {array.ndim} dimensions; give from 1 to {MAX_DIMENSIONS}, of entries first"
        )
