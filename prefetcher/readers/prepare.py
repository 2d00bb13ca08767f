"""Prepares the values of columns by `data.columns.prepare`: pure functions of a column, in fp64.

    map -> fill -> least -> log1p -> standardize -> at_least       numbers
                                                    buckets        ids: 0 missing, 1 below the first bound, ...

A missing value is NaN until `fill`. Without rules, numbers keep their values and dtypes.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rowcast.job.formats import Prepare
from rowcast.prefetcher.readers.columns import Ids
from rowcast.prefetcher.readers.id_check import EVERY_WIDE, Location
from rowcast.runtime.arrays import F64
from rowcast.runtime.errors import DataError

AS_IT_IS = Prepare()
NUMBER = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*")
Rules = Mapping[str, Prepare]  # of columns


def prepared(values: Any, rules: Rules, name: str, location: Location) -> npt.NDArray[Any]:
    """Returns numbers [n] of a pyarrow array [n]. Raises DataError for a value that the column's rule cannot take."""
    rule = rules.get(name, AS_IT_IS)
    own = mapped(values, rule.map, name, location) if rule.map else numbers_of(values)
    if rule.fill is not None:
        own = own.astype(np.float64)
        own[np.isnan(own)] = rule.fill
    if rule.least is not None:
        own = np.where(own < rule.least, rule.least, own.astype(np.float64))
    if rule.log1p:
        own = logarithms(own.astype(np.float64), name, location)
    if rule.standardize is not None:
        mean, deviation = rule.standardize
        own = (own.astype(np.float64) - mean) / deviation
    if rule.at_least is not None:
        wide = own.astype(np.float64)
        own = np.where(np.isnan(wide), wide, wide >= rule.at_least)
    return own


def bucket_ids(numbers: npt.NDArray[Any], bounds: list[float]) -> Ids:
    wide = numbers.astype(np.float64)
    return np.where(np.isnan(wide), 0, 1 + np.searchsorted(bounds, wide, side="right"))


def logarithms(numbers: F64, name: str, location: Location) -> F64:
    outside = numbers <= -1
    if outside.any():
        at = int(np.argmax(outside))
        raise DataError(
            f"{location(at)}, column {name}: log1p takes numbers above -1, and the value is {numbers[at]:g}; set "
            f"data.columns.prepare.{name}.least = 0.0, or remove log1p"
        )
    return np.log1p(numbers)


def mapped(values: Any, numbers: Mapping[str, float], name: str, location: Location) -> F64:
    """Returns f64 [n] by the keys of `numbers`, which equal a value as text or as a number."""
    encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    by_number = {number: numbers[key] for key in numbers if (number := as_number(key)) is not None}
    found = [of_value(shown(own), numbers, by_number) for own in encoded.dictionary.to_pylist()]
    taken: F64 = np.array([*found, np.nan])[encoded.indices.fill_null(len(found)).to_numpy(zero_copy_only=False)]
    unknown = np.isnan(taken) & ~values.is_null().to_numpy(zero_copy_only=False)
    if unknown.any():
        at = int(np.argmax(unknown))
        raise DataError(
            f"{location(at)}, column {name}: {shown(values[at].as_py())[:40]!r} is not in "
            f"data.columns.prepare.{name}.map, which has {', '.join(map(repr, numbers))}; add it"
        )
    return taken


def of_value(text: str, numbers: Mapping[str, float], by_number: Mapping[float, float]) -> float:
    number = as_number(text)
    return numbers.get(text, np.nan if number is None else by_number.get(number, np.nan))


def as_number(text: str) -> float | None:
    return float(text) if NUMBER.fullmatch(text) else None


def shown(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def numbers_of(values: Any) -> npt.NDArray[Any]:
    """Returns numbers unchanged: integers with nulls as fp64 with NaN, or as objects if fp64 cannot hold them."""
    if values.null_count and pa.types.is_integer(values.type):
        ends = pc.min_max(values).as_py().values()
        if any(abs(own or 0) >= EVERY_WIDE for own in ends):
            return np.array(values.to_pylist(), object)
    if values.null_count and pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array
