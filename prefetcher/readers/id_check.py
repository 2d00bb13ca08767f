"""Checks ids, dense values and labels before they are used."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from rowcast.job.formats import Columns, formats_with
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import Floats, Ids
from rowcast.prefetcher.readers.fp32 import Array, is_kept, refuse_changed
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.name_lists import nearest

Location = Callable[[int], str]  # position in the checked array -> "file, row 17"
MISSING = np.iinfo(np.int64).min  # a missing id; numpy also converts NaN to it
LARGEST_ID = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    name: str
    table: str
    num_embeddings: int
    weights_column: str | None  # data.columns.weights
    hashed: bool  # data.columns.hash


def row_location(path: Path, rows: Ids) -> Location:
    return lambda i: f"{path}, row {rows[i]}"


def job_features(job: Job) -> list[Feature]:
    columns = job.data.columns
    return [
        Feature(
            name=name,
            table=table.name,
            num_embeddings=table.num_embeddings,
            weights_column=columns.weights.get(name),
            hashed=columns.is_hashed(name),
        )
        for table in job.tables
        for name in table.features
    ]


def require_features(job: Job, available: Collection[str], described: str) -> None:
    """Raises ConfigError for a table whose feature is not in the data; `described` lists what is."""
    for feature in job_features(job):
        if feature.name not in available:
            raise ConfigError(
                f"table {feature.table}: feature {feature.name} is not in {described}"
                f"{nearest(feature.name, available)}; "
                "correct the table's features or data.path"
            )


def numbered_columns(job: Job, num_columns: int, described: str) -> list[int]:
    """Returns the column of each feature in data with features cat_0, cat_1, ... by position. Raises ConfigError."""
    columns = {f"cat_{i}": i for i in range(num_columns)}
    require_features(job, columns, f"{described}, which has cat_0 to cat_{num_columns - 1}")
    return [columns[name] for name in job.features]


def refuse_weights(job: Job) -> None:
    if job.data.columns.weights:
        raise ConfigError(
            f"data.columns.weights: {job.data.format} data has no weights; remove it or use format = "
            f"{formats_with('named_columns')}"
        )


class IdCheck:
    """Applies data.on_invalid_id and counts the ids that it replaced."""

    def __init__(self, job: Job) -> None:
        self._use(job.data.on_invalid_id, job_features(job))

    @classmethod
    def of_feature(cls, job: Job, feature: Feature) -> "IdCheck":
        """Returns a check of one feature alone, with a count of its own."""
        check = cls.__new__(cls)
        check._use(job.data.on_invalid_id, [feature])
        return check

    def _use(self, policy: str, features: list[Feature]) -> None:
        self._policy, self._features = policy, features
        self._limits = np.array([feature.num_embeddings for feature in self._features], np.uint64)
        self.num_invalid = 0

    def check(self, ids: Ids, bounds: Ids, location: Callable[[int], Location]) -> Ids:
        """Returns the ids of all features, those of feature f at bounds[f] to bounds[f + 1], inside their tables.

        `location(f)(i)` names the file and row of the feature's i-th id. Under "error", raises DataError for the first
        feature with an invalid id.
        """
        unsigned = ids.view(np.uint64)  # a negative id is a huge one
        largest = [unsigned[start:stop].max(initial=0) for start, stop in pairwise(bounds.tolist())]
        if (np.array(largest, np.uint64) < self._limits).all():
            return ids
        outside = unsigned >= np.repeat(self._limits, np.diff(bounds))
        inside = ids.copy()
        for f, (feature, start, stop) in enumerate(zip(self._features, bounds, bounds[1:], strict=False)):
            where = start + np.flatnonzero(outside[start:stop])
            if len(where) and self._policy == "error":
                raise refusal(int(ids[where[0]]), feature, location(f)(int(where[0] - start)))
            inside[where] = self._replaced(ids[where], feature)
        self.num_invalid += int(np.count_nonzero(outside))
        return inside

    def _replaced(self, ids: Ids, feature: Feature) -> Ids | int:
        if self._policy == "zero":
            return 0
        return np.where(ids == MISSING, 0, ids % np.int64(feature.num_embeddings))


def refusal(row: int, feature: Feature, location: str) -> DataError:
    if row == MISSING:
        return DataError(
            f"{location}, column {feature.name}: the id is missing; give missing ones an id of their own, "
            'or set data.on_invalid_id = "zero", which replaces them by row 0 and counts them; -2**63 counts as missing'
        )
    return DataError(
        f"{location}, column {feature.name}: id {row} is outside table {feature.table} "
        f"(num_embeddings = {feature.num_embeddings}); "
        'enlarge the table or set data.on_invalid_id = "modulo" or "zero"'
    )


def check_dense(dense: Floats, given: Sequence[Array], names: list[str], location: Location) -> Floats:
    """Returns `dense` f32 [n, D]; `given` are its columns before the cast. Raises DataError with the location of a
    value that is not finite, or that fp32 changes (`fp32.py`)."""
    if is_kept(dense):
        return dense
    refuse_changed(given, dense, lambda row, column: f"{location(row)}, column {names[column]}")
    finite = np.isfinite(dense)
    if not finite.all():
        row, column = divmod(int(np.argmin(finite)), dense.shape[1])
        raise DataError(
            f"{location(row)}, column {names[column]}: value {dense[row, column]} is not finite in fp32; "
            "replace missing values before training"
        )
    return dense


def check_labels(labels: Floats, given: Sequence[Array], columns: Columns, location: Location) -> Floats:
    """Returns `labels` f32 [n], or [n, T] with data.columns.labels; `given` are its columns before the cast. Raises
    DataError for one that `columns` does not allow, or that fp32 changes (`fp32.py`)."""
    if columns.label_values == "none":
        return labels
    names, is_binary = columns.label_names, columns.label_values == "binary"
    valid = (labels == 0) | (labels == 1) if is_binary else np.isfinite(labels)
    if columns.labels:
        valid |= np.isnan(labels)  # unknown
    if not is_binary and not is_kept(labels):
        by_name = labels.reshape(-1, len(names))
        refuse_changed(given, by_name, lambda row, column: f"{location(row)}, column {names[column]}")
    if not valid.all():
        row, column = divmod(int(np.argmin(valid)), len(names))
        allowed = "0 or 1" if is_binary else "finite in fp32"
        raise DataError(
            f"{location(row)}, column {names[column]}: label {labels.flat[np.argmin(valid)]} is not {allowed}"
        )
    return labels


def dense_names(num_dense: int) -> list[str]:
    return [f"int_{i}" for i in range(num_dense)]


# also the rules of `Snapshot.bags`


def lookup_location(where: str, first: int) -> Location:
    return lambda i: f"{where}, look-up {first + i}"


def check_offsets(offsets: Ids, num_ids: int, where: str) -> None:
    if offsets[0] != 0 or offsets[-1] != num_ids or (offsets[1:] < offsets[:-1]).any():
        raise DataError(
            f"{where}: offsets must rise from 0 to the {num_ids} ids, but go from {offsets[0]} to {offsets[-1]}"
        )


def require_weights(are_named: bool, are_given: bool, where: str) -> None:
    """Raises DataError unless weights are given where data.columns.weights names them, and only there."""
    if are_named and not are_given:
        raise DataError(f"{where}: weights are missing, but data.columns.weights names weights, so give f32[N]")
    if are_given and not are_named:
        raise DataError(
            f"{where}: weights are given, but data.columns.weights names none: name them there to multiply rows by "
            "them, or give an array with an entry for each look-up (data.of) if only the model needs them"
        )
