"""Decodes typed columns into the checked arrays of a batch, by the roles that the job gives them.

Typed columns are pyarrow arrays: numbers, integers, uint64 hashes of ids under data.columns.hash, or lists of these.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.column_roles import Roles
from rowcast.prefetcher.readers.columns import Column, Floats, Ids, join_columns, offsets_of
from rowcast.prefetcher.readers.hashed_ids import Inexact, hashes_of, rows_of_hashes
from rowcast.prefetcher.readers.id_check import (
    LARGEST_ID,
    MISSING,
    ByValue,
    Feature,
    IdCheck,
    Location,
    check_dense,
    check_labels,
)
from rowcast.prefetcher.readers.prepare import Rules, bucket_ids, numbers_of, prepared
from rowcast.protocol.batch import Lookups, Samples
from rowcast.runtime.errors import DataError


def typed(table: Any, features: Sequence[Feature], location: Location) -> Any:
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
                listed = [own.encode() if isinstance(own, str) else own for own in single.to_pylist()]
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
        roles = self._roles
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
        of = self._roles.of | {f"{name}.id": name for name in self._checks}
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
        columns = [feature_column(table, feature, self._columns.prepare, location) for feature in self._roles.features]
        joined = join_columns(
            columns, table.num_rows, weighted=any(feature.weights_column for feature in self._roles.features)
        )
        bounds = np.cumsum([0, *(len(column.ids) for column in columns)])
        return replace(
            joined, ids=self._ids.check(joined.ids, bounds, lambda f: lookup_location(columns[f].lengths, location))
        )


def feature_column(table: Any, feature: Feature, rules: Rules, location: Location) -> Column:
    values = table[feature.name]
    lengths = bag_lengths(values)
    single = values if lengths is None else values.flatten()
    return Column(
        ids=feature_ids(single, feature, rules, lookup_location(lengths, location)),
        lengths=lengths,
        weights=feature_weights(table, feature, rules, lengths, location),
    )


def feature_ids(values: Any, feature: Feature, rules: Rules, location: Location) -> Ids:
    if feature.hashed:
        return rows_of_hashes(values, feature.num_embeddings)
    if feature.name in rules:
        return bucket_ids(prepared(values, rules, feature.name, location), rules[feature.name].buckets)
    return integers(values, feature, location)


def feature_weights(
    table: Any, feature: Feature, rules: Rules, lengths: Ids | None, location: Location
) -> Floats | None:
    """One weight per id, or None for a feature without weights. Raises DataError if their numbers differ."""
    if feature.weights_column is None:
        return None
    values = lookup_values(table, feature.weights_column, feature, lengths, location)
    return floats(values, rules, feature.weights_column, lookup_location(lengths, location))[:, 0]


def floats(values: Any, rules: Rules, name: str, location: Location) -> Floats:
    """Returns f32 [n, 1]. Raises DataError for a value that is not finite or that fp32 changes."""
    return check_dense(prepared(values, rules, name, location)[:, np.newaxis], [name], location)


def lookup_values(table: Any, name: str, feature: Feature, lengths: Ids | None, location: Location) -> Any:
    """Returns a column's values for each look-up of a feature. Raises DataError if their numbers differ."""
    values = table[name]
    num_ids, num_values = (counts_of(own, len(values)) for own in (lengths, bag_lengths(values)))
    differs = num_ids != num_values
    if differs.any():
        row = int(np.argmax(differs))
        raise DataError(
            f"{location(row)}, column {name}: {num_values[row]} values for {num_ids[row]} ids of feature {feature.name}"
        )
    return values.flatten() if is_list(values.type) else values


def numbers(values: Any, name: str, location: Location) -> npt.NDArray[Any]:
    """Returns bool, integers or floats. Raises DataError for a missing value that is no float."""
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


def integers(values: Any, feature: Feature, location: Location) -> Ids:
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
