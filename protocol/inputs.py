"""Says what each array of a batch belongs to, and cuts the arrays of some of its samples.

[data.of]             array of the batch
                      [B, ...]    an entry per sample: dense features, labels, and every array that is not named
time = "history"      [n, ...]    an entry per look-up of a feature, in their order
log_q = "negative"    [n, ...]    the same, of a feature that is the batch's: whole in every part with a sample
negative = "batch"                such a feature
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rowcast.job.schema import Job
from rowcast.protocol.batch import Cut, Samples
from rowcast.protocol.plan_layout import Dtype
from rowcast.runtime.errors import DataError

Arrays = Mapping[str, npt.NDArray[Any]]
PREFIX = "inputs:"  # of their names in a plan, where what follows a dot is an array of a group, such as "0.slots"


class InputSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One array of every batch of a run; only its number of entries varies."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]  # of an entry
    of: str = ""  # the feature whose look-ups have an entry each; "" for samples


@dataclass(frozen=True, slots=True)
class Belonging:
    """What the arrays and features of a job belong to."""

    arrays: Mapping[str, str]  # the feature of each array of look-ups
    positions: Mapping[str, int]  # of every feature, in the job's order
    batch_features: frozenset[str]  # those whose look-ups are the batch's

    @property
    def batch_positions(self) -> frozenset[int]:
        return frozenset(self.positions[name] for name in self.batch_features)

    def cut(self, samples: slice, lookups: Callable[[str], slice]) -> Cut:
        """`lookups`: of a feature, the look-ups that the samples have, counted among its own."""
        whole = slice(None) if samples.start < samples.stop else slice(0)
        bounds = {of: whole if of in self.batch_features else lookups(of) for of in set(self.arrays.values())}
        return Cut(samples, {name: bounds[of] for name, of in self.arrays.items()})


def belonging(job: Job) -> Belonging:
    positions = {feature: position for position, feature in enumerate(job.features)}
    inputs = [*job.data.columns.inputs, *(own.per for own in job.data.negatives)]
    columns = {f"{name}.id": name for name in inputs if name in positions}
    return Belonging(
        arrays=columns | job.data.lookup_arrays, positions=positions, batch_features=job.data.batch_features
    )


def batch_specs(batch: Samples, of: Mapping[str, str]) -> tuple[InputSpec, ...]:
    """Describes all arrays of a batch, as they are announced. `of`: the feature of each array of look-ups."""
    return input_specs({"dense": batch.dense, "labels": batch.labels} | dict(batch.inputs), of)


def input_specs(arrays: Arrays, of: Mapping[str, str]) -> tuple[InputSpec, ...]:
    return tuple(
        InputSpec(name=name, dtype=array.dtype.str[1:], shape=array.shape[1:], of=of.get(name, ""))  # type: ignore[arg-type]
        for name, array in arrays.items()
    )


def check_same(found: Sequence[InputSpec], announced: Sequence[InputSpec], where: str) -> None:
    """Raises DataError if a batch has not the arrays of the first one."""
    own, first = ({spec.name: described(spec) for spec in specs} for specs in (found, announced))
    for name in sorted(own.keys() | first.keys()):
        if own.get(name) != first.get(name):
            raise DataError(
                f"{where}: the array {name} is {own.get(name, 'missing')}, and in the first batch "
                f"{first.get(name, 'missing')}; give every batch the same arrays"
            )


def described(spec: InputSpec) -> str:
    return f"{np.dtype(spec.dtype)} with entries of shape {list(spec.shape)}"
