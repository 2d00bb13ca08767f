"""Decodes typed columns into the checked arrays of a batch, by the roles that the job gives them.

Typed columns are pyarrow arrays: numbers, integers, uint64 hashes of ids under data.columns.hash, or lists of these.

Prepares the values of columns by `data.columns.prepare`: pure functions of a column, in fp64.

    missing -> map | number | clock -> fill -> least -> log1p -> standardize -> at_least    numbers
                                                                        buckets     ids: 0 missing, 1 below the first
                                                                                    bound, ...

A missing value is NaN until `fill`. Without rules, numbers keep their values and dtypes.

Decides which columns of a file with named columns are labels, dense features, ids and weights.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rowcast.job.formats import DecimalMark, Prepare
from rowcast.job.models import BottomAndTop
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.clocks import clock_numbers
from rowcast.prefetcher.readers.columns import Column, Floats, Ids, join_columns, offsets_of
from rowcast.prefetcher.readers.hashed_ids import Inexact, hashes_of, is_text, rows_of_hashes
from rowcast.prefetcher.readers.id_check import (
    EVERY_WIDE,
    LARGEST_ID,
    MISSING,
    ByValue,
    CheckedFeature,
    IdCheck,
    Location,
    check_dense,
    check_labels,
    job_features,
    require_features,
)
from rowcast.prefetcher.readers.reader import Columns
from rowcast.protocol.batch import Lookups, Samples
from rowcast.runtime.arrays import F64
from rowcast.runtime.errors import ConfigError, DataError, listed, nearest

AS_IT_IS = Prepare()
NUMBER = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*")
Rules = Mapping[str, Prepare]  # of columns
SEPARATORS: dict[DecimalMark, str] = {"": "", ".": ",", ",": "."}  # of thousands
CURRENCY = r"(?:[A-Z]{1,2}\$|USD|EUR|GBP|CHF|INR|BRL|Rs\.?)"
SIGN = rf"^\s*([-+]?)(?:{CURRENCY}|[^\w\s.,#()+-]{{0,4}})\s*"
UNIT = rf"(?:\s*{CURRENCY}\s*|[^\w.,#()+-]{{0,4}})$"
# numbers as text: sign, currency, digits between separators, exponent, unit
WRITTEN: dict[DecimalMark, str] = {
    "": r"^\s*([-+]?)(\d+\.?\d*|\.\d+)((?:[eE][-+]?\d+)?)\s*$",
    ".": SIGN + r"((?:\d{1,3}(?:[, ']\d{3})+|\d+)(?:\.\d*)?|\.\d+)((?:[eE][-+]?\d+)?)" + UNIT,
    ",": SIGN + r"((?:\d{1,3}(?:[. ']\d{3})+|\d+)(?:,\d*)?|,\d+)((?:[eE][-+]?\d+)?)" + UNIT,
}


def prepared(values: Any, rules: Rules, name: str, location: Location) -> npt.NDArray[Any]:
    """Returns numbers [n] of a pyarrow array [n]. Raises DataError for a value that the column's rule cannot take."""
    rule = rules.get(name, AS_IT_IS)
    if (rule.missing or rule.number or rule.clock) and pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    values = without(values, rule.missing) if rule.missing else values
    if rule.clock:
        numbers: npt.NDArray[Any] = clock_numbers(values, rule, name, location)
    elif rule.map:
        numbers = mapped(values, rule.map, name, location)
    elif rule.takes_text and is_text(values.type):
        numbers = parsed(values, rule.number, name, location)
    else:
        numbers = numbers_of(values)
    if rule.fill is not None:
        numbers = numbers.astype(np.float64)
        numbers[np.isnan(numbers)] = rule.fill
    if rule.least is not None:
        numbers = np.where(numbers < rule.least, rule.least, numbers.astype(np.float64))
    if rule.log1p:
        numbers = logarithms(numbers.astype(np.float64), name, location)
    if rule.standardize is not None:
        mean, deviation = rule.standardize
        numbers = (numbers.astype(np.float64) - mean) / deviation
    if rule.at_least is not None:
        wide = numbers.astype(np.float64)
        numbers = np.where(np.isnan(wide), wide, wide >= rule.at_least)
    return numbers


def without(values: Any, missing: Sequence[str]) -> Any:
    """Returns values with null in place of these texts."""
    if not is_text(values.type):
        return values
    words = "|".join(map(re.escape, missing))
    return pc.if_else(pc.match_substring_regex(values, rf"^\s*(?:{words})\s*$"), None, values)


def parsed(texts: Any, mark: DecimalMark, name: str, location: Location) -> F64:
    """Returns f64 [n], NaN for a missing one. Raises DataError for text that is not a number."""
    numbers = written_numbers(texts, mark)
    wrong = np.isnan(numbers) & texts.is_valid().to_numpy(zero_copy_only=False)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise DataError(
            f"{location(at)}, column {name}: {shown(texts[at].as_py())[:40]!r} is no number; correct it, or add it to "
            f"data.columns.prepare.{name}.missing"
        )
    return numbers


def written_numbers(texts: Any, mark: DecimalMark) -> F64:
    """Returns f64 [n] of strings or binaries; NaN for other texts."""
    is_number = pc.match_substring_regex(texts, WRITTEN[mark])
    digits = pc.replace_substring_regex(pc.if_else(is_number, texts, None), WRITTEN[mark], r"\1\2\3")
    digits = pc.replace_substring_regex(digits, rf"^\+|[ '{SEPARATORS[mark]}]", "")
    numbers: F64 = np.array(pc.replace_substring(digits, ",", ".").cast(pa.string()).cast(pa.float64()), np.float64)
    return numbers


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
    if pa.types.is_boolean(values.type):  # pandas makes them of True, true and TRUE
        numbers = {key.capitalize(): number for key, number in numbers.items()}
    values_by_code = [of_value(shown(entry), numbers, by_number) for entry in encoded.dictionary.to_pylist()]
    taken: F64 = np.array([*values_by_code, np.nan])[
        encoded.indices.fill_null(len(values_by_code)).to_numpy(zero_copy_only=False)
    ]
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
        if any(abs(end or 0) >= EVERY_WIDE for end in ends):
            return np.array(values.to_pylist(), object)
    if values.null_count and pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    labels: list[str]
    dense: list[str]
    features: list[CheckedFeature]
    inputs: list[str]  # arrays for the model; of a feature, the rows of its look-ups
    of: dict[str, str]  # the feature of each array of look-ups
    sources: dict[str, str]  # the column of each dense feature and feature that is made of times

    @property
    def weights(self) -> list[str]:
        return [feature.weights_column for feature in self.features if feature.weights_column is not None]

    def names(self, columns: Columns = "all") -> list[str]:
        dense = [*self.labels, *self.dense, *self.inputs, *self.of.values()]
        ids = [*(feature.name for feature in self.features), *self.weights]
        some = dense or ids[:1]  # a table without columns has no rows, so scoring needs one of them
        return list(dict.fromkeys(map(self.column, {"all": dense + ids, "ids": ids, "dense": some}[columns])))

    def column(self, name: str) -> str:
        """The column of a label, dense feature, feature or array."""
        return self.sources.get(name, name)


def roles_of(job: Job, path: Path, names: Sequence[str], numeric: Callable[[], Collection[str]]) -> Roles:
    """Returns the roles of data.columns in a file with columns `names`; `numeric` returns those that hold numbers.

    Raises ConfigError for a missing column, and for a model with a bottom MLP if no dense column is found or excluded.
    """
    columns, features = job.data.columns, job_features(job)
    dense = columns.dense
    if dense is None:
        numbered = sorted((int(match[1]), name) for name in names if (match := re.fullmatch(r"int_(\d+)", name)))
        dense = [name for _, name in numbered]
    labels = [] if columns.label_values == "none" else columns.label_names
    of = {name: job.data.of[name] for name in columns.inputs if name in job.data.of}
    roles = Roles(labels=labels, dense=dense, features=features, inputs=columns.inputs, of=of, sources=columns.sources)
    require_columns(job, roles, path, names)
    if columns.dense is None and not dense and isinstance(job.model, BottomAndTop) and job.model.bottom_mlp:
        used, numbers = roles.names(), numeric()
        candidates = [name for name in names if name in numbers and name not in used]
        change = (
            f"name the dense ones of the other columns with numbers: data.columns.dense = {quoted(candidates)}"
            if candidates
            else "the file has no other column with numbers"
        )
        raise ConfigError(
            f"{path}: the model has a bottom MLP for dense features, and no column is named int_0, int_1, ...; "
            f"{change}; data.columns.dense = [] says that there are none"
        )
    return roles


def require_columns(job: Job, roles: Roles, path: Path, names: Sequence[str]) -> None:
    """Raises ConfigError for a column that the file does not have, DataError for one that it has twice."""
    for name, source in roles.sources.items():
        if source not in names:
            raise ConfigError(
                f"data.columns.prepare.{name}: {path} has no column {source}{nearest(source, names)}; it has "
                f"{listed(names)}"
            )
    require_features(job, [*names, *roles.sources], f"{path}, which has {listed(names)}")
    key = "labels" if job.data.columns.labels else "label"
    key_of = {
        **dict.fromkeys(roles.labels, key),
        **dict.fromkeys(roles.dense, "dense"),
        **dict.fromkeys(roles.weights, "weights"),
        **dict.fromkeys(roles.inputs, "inputs"),
    }
    for name, key in key_of.items():
        if name not in names and name not in roles.sources:
            raise ConfigError(
                f"data.columns.{key}: {path} has no column {name}{nearest(name, names)}; it has {listed(names)}"
            )
    require_single(path, names, roles.names())


def require_single(path: Path, names: Sequence[str], used: Sequence[str]) -> None:
    for name in used:
        if names.count(name) > 1:
            raise DataError(f"{path}: {names.count(name)} columns are named {name}; rename all but one of them")


def quoted(names: Sequence[str]) -> str:
    return "[" + listed([f'"{name}"' for name in names]) + "]"


def typed(table: Any, features: Sequence[CheckedFeature], location: Location) -> Any:
    """Returns a pyarrow.RecordBatch with hashes in the columns of hashed features, null where an id is missing. Raises
    DataError."""
    for feature in features:
        if feature.hashed and feature.name in table.schema.names:
            at = table.schema.get_field_index(feature.name)
            values = table.column(at)
            try:
                table = table.set_column(at, feature.name, with_hashes(values, by_value=feature.by_value))
            except Inexact as error:
                single = values.flatten() if is_list(values.type) else values
                listed = [value.encode() if isinstance(value, str) else value for value in single.to_pylist()]
                place = listed.index(error.value)
                where = lookup_location(bag_lengths(values), location)(place)
                raise DataError(f"{where}, column {feature.name}: {error}") from None
    return table


def with_hashes(values: Any, *, by_value: ByValue) -> Any:
    lengths = bag_lengths(values)
    if lengths is None:
        return hashes_of(values, by_value=by_value)
    return pa.ListArray.from_arrays(
        pa.array(offsets_of(lengths), pa.int32()), hashes_of(values.flatten(), by_value=by_value)
    )


class RowDecoder:
    def __init__(self, job: Job, roles: Roles, ids: IdCheck) -> None:
        self._roles, self._ids, self._columns = roles, ids, job.data.columns
        self._features = {feature.name: feature for feature in roles.features}
        self._checks = {
            name: IdCheck.of_feature(job, self._features[name]) for name in roles.inputs if name in self._features
        }

    def dense(self, table: Any, location: Location) -> Samples:
        roles, table = self._roles, with_sources(table, self._roles.sources)
        dense = [floats(table[name], self._columns.prepare, name, location) for name in roles.dense]
        return Samples(
            dense=np.concatenate([np.zeros((table.num_rows, 0), np.float32), *dense], axis=1),
            labels=check_labels(
                [prepared(table[name], self._columns.prepare, name, location) for name in roles.labels],
                self._columns,
                location,
            )
            if roles.labels
            else np.full((table.num_rows, *self._columns.label_shape), np.nan, np.float32),
            inputs=dict(self._input(table, name, location) for name in roles.inputs),
        )

    def lengths(self, table: Any) -> dict[str, Ids]:
        """Returns the entries of each sample in the arrays of look-ups."""
        of, table = (
            self._roles.of | {f"{name}.id": name for name in self._checks},
            with_sources(table, self._roles.sources),
        )
        return {name: counts_of(bag_lengths(table[feature]), table.num_rows) for name, feature in of.items()}

    def _input(self, table: Any, name: str, location: Location) -> tuple[str, npt.NDArray[Any]]:
        """Returns an array for the model with its name."""
        if name in self._checks:
            column = feature_column(table, self._features[name], self._columns.prepare, location)
            bounds, where = np.array([0, len(column.ids)]), lookup_location(column.lengths, location)
            return f"{name}.id", self._checks[name].check(column.ids, bounds, lambda f: where)
        if name not in self._roles.of:
            return name, numbers(table[name], name, location)
        feature = self._features[self._roles.of[name]]
        lengths = bag_lengths(table[feature.name])
        return name, numbers(
            lookup_values(table, name, feature, lengths, location), name, lookup_location(lengths, location)
        )

    def ids(self, table: Any, location: Location) -> Lookups:
        table = with_sources(table, self._roles.sources)
        columns = [feature_column(table, feature, self._columns.prepare, location) for feature in self._roles.features]
        joined = join_columns(
            columns, table.num_rows, weighted=any(feature.weights_column for feature in self._roles.features)
        )
        bounds = np.cumsum([0, *(len(column.ids) for column in columns)])
        return replace(
            joined, ids=self._ids.check(joined.ids, bounds, lambda f: lookup_location(columns[f].lengths, location))
        )


def with_sources(table: Any, sources: Mapping[str, str]) -> Any:
    """Returns a pyarrow.RecordBatch that also has the columns of times under the names of what is made of them."""
    if not sources:
        return table
    columns = {name: table[source] for name, source in sources.items() if source in table.schema.names}
    return pa.RecordBatch.from_pydict({name: table[name] for name in table.schema.names} | columns)


def feature_column(table: Any, feature: CheckedFeature, rules: Rules, location: Location) -> Column:
    values = table[feature.name]
    lengths = bag_lengths(values)
    single = values if lengths is None else values.flatten()
    return Column(
        ids=feature_ids(single, feature, rules, lookup_location(lengths, location)),
        lengths=lengths,
        weights=feature_weights(table, feature, rules, lengths, location),
    )


def feature_ids(values: Any, feature: CheckedFeature, rules: Rules, location: Location) -> Ids:
    if feature.hashed:
        return rows_of_hashes(values, feature.num_embeddings)
    if feature.name in rules:
        return bucket_ids(prepared(values, rules, feature.name, location), rules[feature.name].bounds)
    return integers(values, feature, location)


def feature_weights(
    table: Any, feature: CheckedFeature, rules: Rules, lengths: Ids | None, location: Location
) -> Floats | None:
    """One weight per id, or None for a feature without weights. Raises DataError if their numbers differ."""
    if feature.weights_column is None:
        return None
    values = lookup_values(table, feature.weights_column, feature, lengths, location)
    return floats(values, rules, feature.weights_column, lookup_location(lengths, location))[:, 0]


def floats(values: Any, rules: Rules, name: str, location: Location) -> Floats:
    """Returns f32 [n, 1]. Raises DataError for a value that is not finite or that fp32 changes."""
    return check_dense(prepared(values, rules, name, location)[:, np.newaxis], [name], location)


def lookup_values(table: Any, name: str, feature: CheckedFeature, lengths: Ids | None, location: Location) -> Any:
    """Returns a column's values for each look-up of a feature. Raises DataError if their numbers differ."""
    values = table[name]
    num_ids, num_values = (counts_of(counted, len(values)) for counted in (lengths, bag_lengths(values)))
    differs = num_ids != num_values
    if differs.any():
        row = int(np.argmax(differs))
        raise DataError(
            f"{location(row)}, column {name}: {num_values[row]} values for {num_ids[row]} ids of feature {feature.name}"
        )
    return values.flatten() if is_list(values.type) else values


def numbers(values: Any, name: str, location: Location) -> npt.NDArray[Any]:
    """Returns bool, integers or floats. Raises DataError for a missing value that is not a float."""
    if values.null_count and not pa.types.is_floating(values.type):
        at = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(f"{location(at)}, column {name}: the value is missing; give missing ones a value of their own")
    return numbers_of(values)


def counts_of(lengths: Ids | None, num_samples: int) -> Ids:
    return np.ones(num_samples, np.int64) if lengths is None else lengths


def lookup_location(lengths: Ids | None, location: Location) -> Location:
    return (
        location if lengths is None else lambda i: location(int(np.searchsorted(np.cumsum(lengths), i, side="right")))
    )


def bag_lengths(values: Any) -> Ids | None:
    if not is_list(values.type):
        return None
    lengths: Ids = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def integers(values: Any, feature: CheckedFeature, location: Location) -> Ids:
    if pa.types.is_uint64(values.type):
        beyond = pc.greater(values, pa.scalar(LARGEST_ID, pa.uint64())).fill_null(False).to_numpy(zero_copy_only=False)
        if beyond.any():
            at = int(np.argmax(beyond))
            raise DataError(
                f"{location(at)}, column {feature.name}: id {values[at].as_py()} is beyond 2**63 - 1; set "
                "data.columns.hash = true, which takes ids of any size"
            )
    wide = values.cast(pa.int64())
    ids: Ids = (wide.fill_null(MISSING) if wide.null_count else wide).to_numpy(zero_copy_only=False)
    return ids


def is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
