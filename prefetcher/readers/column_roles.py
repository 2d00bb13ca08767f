"""Decides which columns of a file with named columns are labels, dense features, ids and weights."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rowcast.job.models import BottomAndTop
from rowcast.job.schema import Job
from rowcast.prefetcher.readers.id_check import Feature, job_features, require_features
from rowcast.prefetcher.readers.reader import Columns
from rowcast.runtime.errors import ConfigError, DataError, listed, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    labels: list[str]
    dense: list[str]
    features: list[Feature]
    inputs: list[str]  # arrays for the model; of a feature, the rows of its look-ups
    of: dict[str, str]  # the feature of each array of look-ups

    @property
    def weights(self) -> list[str]:
        return [feature.weights_column for feature in self.features if feature.weights_column is not None]

    def names(self, columns: Columns = "all") -> list[str]:
        dense = [*self.labels, *self.dense, *self.inputs, *self.of.values()]
        ids = [*(feature.name for feature in self.features), *self.weights]
        return list(dict.fromkeys({"all": dense + ids, "ids": ids, "dense": dense}[columns]))


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
    roles = Roles(labels=labels, dense=dense, features=features, inputs=columns.inputs, of=of)
    require_columns(job, roles, path, names)
    if columns.dense is None and not dense and isinstance(job.model, BottomAndTop) and job.model.bottom_mlp:
        used, numbers = roles.names(), numeric()
        raise no_dense_column(path, [name for name in names if name in numbers and name not in used])
    return roles


def require_columns(job: Job, roles: Roles, path: Path, names: Sequence[str]) -> None:
    """Raises ConfigError for a column that the file does not have, DataError for one that it has twice."""
    require_features(job, names, f"{path}, which has {listed(names)}")
    key = "labels" if job.data.columns.labels else "label"
    key_of = {
        **dict.fromkeys(roles.labels, key),
        **dict.fromkeys(roles.dense, "dense"),
        **dict.fromkeys(roles.weights, "weights"),
        **dict.fromkeys(roles.inputs, "inputs"),
    }
    for name, key in key_of.items():
        if name not in names:
            raise ConfigError(
                f"data.columns.{key}: {path} has no column {name}{nearest(name, names)}; it has {listed(names)}"
            )
    require_single(path, names, roles.names())


def require_single(path: Path, names: Sequence[str], used: Sequence[str]) -> None:
    for name in used:
        if names.count(name) > 1:
            raise DataError(f"{path}: {names.count(name)} columns are named {name}; rename all but one of them")


def no_dense_column(path: Path, candidates: list[str]) -> ConfigError:
    found = (
        f"name the dense ones of the other columns with numbers: data.columns.dense = {quoted(candidates)}"
        if candidates
        else "the file has no other column with numbers"
    )
    return ConfigError(
        f"{path}: the model has a bottom MLP for dense features, and no column is named int_0, int_1, ...; {found}; "
        "data.columns.dense = [] says that there are none"
    )


def quoted(names: Sequence[str]) -> str:
    return "[" + listed([f'"{name}"' for name in names]) + "]"
