"""Refuses numbers that a cast to fp32 would change: whole ones beyond 2^24, and those beyond its range.

Decimals are rounded, as every trainer rounds them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rowcast.runtime.arrays import F32
from rowcast.runtime.errors import DataError

Array = npt.NDArray[Any]
EVERY_WHOLE, EVERY_WIDE = 2.0**24, 2.0**53  # up to these, fp32 and fp64 hold every whole number


def to_fp32(given: Array) -> F32:
    with np.errstate(over="ignore"):  # numbers beyond fp32 become infinite, and the checks refuse them
        return given.astype(np.float32, copy=False)


def is_kept(cast: F32) -> bool:
    """Whether all are finite and so small that no whole number can have changed. The two passes over a batch that has
    no others."""
    return not cast.size or bool(cast.min() > -EVERY_WHOLE and cast.max() < EVERY_WHOLE)


def refuse_changed(given: Sequence[Array], cast: F32, where: Callable[[int, int], str]) -> None:
    """`given`: D arrays [n], before they became `cast`, f32 [n, D]. Raises DataError at `where(row, column)`."""
    for column, own in enumerate(given):
        row = None if is_kept(cast[:, column]) else first_changed(own, cast[:, column])
        if row is not None:
            raise DataError(
                f"{where(row, column)}: value {plain(own, row)} is {cast[row, column]:.0f} in fp32; scale it, or make "
                "it an array (data.columns.inputs, or another key of a data set's batch), which keeps its dtype"
            )


def first_changed(given: Array, cast: F32) -> int | None:
    wide = given.astype(np.float64)
    may_differ = (np.rint(wide) == wide) & ((wide != cast) | (np.abs(wide) >= EVERY_WIDE))
    return next((i for i in np.flatnonzero(may_differ).tolist() if plain(given, i) != cast[i].item()), None)


def plain(array: Array, at: int) -> Any:
    """Returns a number of Python, which compares integers with floats exactly."""
    return array[at : at + 1].tolist()[0]
