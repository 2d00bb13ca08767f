"""Checks ids, dense values and labels before they are used.

Numbers become fp32. A whole number that fp32 changes, and one beyond its range, are refused; decimals are rounded, as
every trainer rounds them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rowcast.job.formats import Columns, formats_with
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import Floats, Ids
from rowcast.runtime.checkpoint_manifest import IdType, Manifest
from rowcast.runtime.errors import ConfigError, DataError, RowcastError, nearest

ByValue = bool | Literal["earlier"]
Array = npt.NDArray[Any]
Location = Callable[[int], str]  # position in the checked array -> "file, row 17"
MISSING = np.iinfo(np.int64).min  # a missing id; numpy also converts NaN to it
LARGEST_ID = 2**63 - 1
EVERY_WHOLE, EVERY_WIDE = 2.0**24, 2.0**53  # up to these, fp32 and fp64 hold every whole number


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedFeature:
    name: str
    table: str
    num_embeddings: int
    weights_column: str | None  # data.columns.weights
    hashed: bool  # data.columns.hash
    by_value: ByValue  # data.columns.hash_by_value, "earlier" by rule 1 of value_rule
    separator: str  # data.columns.lists: between ids in a cell of text; "" for one id

    @property
    def rule(self) -> bool | int:
        """Returns the rule's name in copies of text, which earlier copies have too."""
        return {False: False, "earlier": True, True: 2}[self.by_value]


@contextmanager
def decoding(location: Location, number: int) -> Iterator[None]:
    """Lets a library decode a file's content in this block, and turns whatever it raises into a DataError."""
    try:
        yield
    except RowcastError:
        raise
    except Exception as error:
        among = f", or another of {number} decoded with it" if number > 1 else ""
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise DataError(f"{location(0)}{among}: it cannot be decoded ({reason}); write the file again") from error


def row_location(path: Path, rows: Ids | range) -> Location:
    return lambda i: f"{path}, row {rows[i]}"


def line_location(path: Path, first: int) -> Location:
    """Returns the location of consecutive lines; line `first` of the file is the first."""
    return lambda i: f"{path}, line {first + i}"


def job_features(job: Job) -> list[CheckedFeature]:
    columns = job.data.columns
    return [
        CheckedFeature(
            name=name,
            table=table.name,
            num_embeddings=table.num_embeddings,
            weights_column=columns.weights.get(name),
            hashed=columns.is_hashed(name),
            by_value="earlier" if columns.hash_by_value and columns.value_rule == 1 else columns.hash_by_value,
            separator=columns.lists.get(name, ""),
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
                "correct the table's features, or give data that has it"
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
    def of_feature(cls, job: Job, feature: CheckedFeature) -> "IdCheck":
        """Returns a check of one feature alone, with a count of its own."""
        check = cls.__new__(cls)
        check._use(job.data.on_invalid_id, [feature])
        return check

    def _use(self, policy: str, features: list[CheckedFeature]) -> None:
        self._policy, self._features = policy, features
        self._limits = np.array([feature.num_embeddings for feature in self._features], np.uint64)
        self.num_invalid = 0
        self.types: dict[str, tuple[IdType, str]] = {}  # of hashed features: the first file that has some, and which

    def note_type(self, feature: str, kind: IdType, path: str) -> None:
        """Raises DataError if another file has ids of another type, which would become other rows."""
        first, where = self.types.setdefault(feature, (kind, path))
        if kind != first:
            raise other_type(feature, (kind, path), (first, where))

    def check(self, ids: Ids, bounds: Ids, location: Callable[[int], Location]) -> Ids:
        """Returns the ids of all features, those of feature f at bounds[f] to bounds[f + 1], inside their tables.

        `location(f)(i)` names the file and row of the feature's i-th id. Under "error", raises DataError for the first
        feature with an invalid id.
        """
        unsigned = ids.view(np.uint64)  # a negative id is a huge one
        present = np.flatnonzero(np.diff(bounds))  # features with ids; those of all of them in one call
        if (np.maximum.reduceat(unsigned, bounds[present]) < self._limits[present]).all():
            return ids
        outside = unsigned >= np.repeat(self._limits, np.diff(bounds))
        inside = ids.copy()
        for f, (feature, start, stop) in enumerate(zip(self._features, bounds, bounds[1:], strict=False)):
            where = start + np.flatnonzero(outside[start:stop])
            if len(where) and self._policy == "error":
                raise refusal(int(ids[where[0]]), feature, location(f)(int(where[0] - start)))
            replaced = np.where(ids[where] == MISSING, 0, ids[where] % np.int64(feature.num_embeddings))
            inside[where] = 0 if self._policy == "zero" else replaced
        self.num_invalid += int(np.count_nonzero(outside))
        return inside


def check_id_types(newest: Manifest, types: Mapping[str, IdType], paths: Sequence[Path]) -> None:
    """Raises DataError for ids of another type than the checkpoint's run has hashed. `paths`: of their files."""
    files = () if newest.trained_on is None else newest.trained_on.files
    before = files[0].path if files else f"the training data of run {newest.run_id}"
    for feature, kind in types.items():
        if (was := newest.id_types.get(feature, kind)) != kind:
            raise other_type(feature, (kind, str(paths[0])), (was, before))


def other_type(feature: str, now: tuple[IdType, str], before: tuple[IdType, str]) -> DataError:
    return DataError(
        f"{now[1]}, column {feature}: the ids are {now[0]}, and in {before[1]} they are {before[0]}, so that one id "
        "would have two rows; write both as one type, or set data.columns.hash_by_value = true before the first step"
    )


def refusal(row: int, feature: CheckedFeature, location: str) -> DataError:
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


def to_fp32(given: Array) -> Floats:
    with np.errstate(over="ignore"):  # numbers beyond fp32 become infinite, and the checks refuse them
        return given.astype(np.float32, copy=False)


def refuse_changed(given: Array, cast: Floats, where: Callable[[int, int], str]) -> None:
    """`given` [n, D], before it became `cast`. Raises DataError at `where(row, column)`."""
    if given.dtype == cast.dtype or is_kept(cast):
        return
    wide = given.astype(np.float64)
    may_differ = (np.rint(wide) == wide) & ((wide != cast) | (np.abs(wide) >= EVERY_WIDE))
    for row, column in np.argwhere(may_differ).tolist():
        [value] = given[row : row + 1, column].tolist()  # a number of Python: it compares integers with floats exactly
        if value != cast[row, column].item():
            raise DataError(
                f"{where(row, column)}: value {value} is {cast[row, column]:.0f} in fp32; scale it, or make it an "
                "array (data.columns.inputs, or another key of a data set's batch), which keeps its dtype"
            )


def cells(names: Sequence[str], location: Location) -> Callable[[int, int], str]:
    return lambda row, column: f"{location(row)}, column {names[column]}"


def is_kept(cast: Floats) -> bool:
    """Whether all are finite and so small that no whole number can have changed. The two passes over a batch that has
    no others."""
    return not cast.size or bool(cast.min() > -EVERY_WHOLE and cast.max() < EVERY_WHOLE)


def check_dense(given: Array, names: Sequence[str], location: Location) -> Floats:
    """Returns numbers [n, D] as f32. Raises DataError with the location of one that is not finite or that changes."""
    dense = to_fp32(given)
    if is_kept(dense):
        return dense
    refuse_changed(given, dense, cells(names, location))
    finite = np.isfinite(dense)
    if not finite.all():
        row, column = divmod(int(np.argmin(finite)), dense.shape[1])
        raise DataError(
            f"{location(row)}, column {names[column]}: value {dense[row, column]} is not finite in fp32; "
            f"replace missing values before training, for example by data.columns.prepare.{names[column]}.fill"
        )
    return dense


def check_labels(given: Sequence[Array], columns: Columns, location: Location) -> Floats:
    """Returns labels f32 [n], or [n, T] with data.columns.labels, of T arrays [n]. Raises DataError for one that
    `columns` does not allow, or that changes."""
    cast, names = [to_fp32(own) for own in given], columns.label_names
    labels = np.stack(cast, axis=1) if columns.labels else cast[0]
    if columns.label_values == "none":
        return labels
    is_binary = columns.label_values == "binary"
    valid = (labels == 0) | (labels == 1) if is_binary else np.isfinite(labels)
    if columns.labels:
        valid |= np.isnan(labels)  # unknown
    for name, own, found in zip(names, given, () if is_binary else cast, strict=False):
        refuse_changed(own[:, None], found[:, None], cells([name], location))
    if not valid.all():
        row, column = divmod(int(np.argmin(valid)), len(names))
        allowed = "0 or 1" if is_binary else "finite in fp32"
        wrong = f"{location(row)}, column {names[column]}: label {labels.flat[np.argmin(valid)]} is not {allowed}"
        raise DataError(f"{wrong}; correct it, or make labels of it by data.columns.prepare.{names[column]}")
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
