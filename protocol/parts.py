"""Cuts a batch into parts: contiguous slices of its samples with separate gradients.

    samples of a batch of 21    | 0 1 | 2 3 4 | 5 6 | 7 8 9 | ...        part m of M: from m * 21 // M on
    8 parts                     |  0  |   1   |  2  |   3   | ...

Only the batch and M decide a part's size. Parts differ by at most one sample; in a batch with fewer samples than parts,
some are empty. The M / N parts of one of N ranks are also one contiguous slice, the same that it would have with N
parts. What an array of the batch belongs to decides how it is cut:

    [data.of]             array of the batch
                          [B, ...]    an entry per sample: dense features, labels, and every array that is not named
    time = "history"      [n, ...]    an entry per look-up of a feature, in their order
    log_q = "negative"    [n, ...]    the same, of a feature that is the batch's: whole in every part with a sample
    negative = "batch"                such a feature
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rowcast.job.schema import Job, Ranks, check_shared
from rowcast.protocol.batch import Batch, Cut, Lookups, Samples
from rowcast.protocol.plan_layout import Dtype
from rowcast.runtime.arrays import GOLDEN, I64, mix
from rowcast.runtime.errors import DataError
from rowcast.runtime.ranges import Number, Text

Value = TypeVar("Value", np.int64, np.float32)
Arrays = Mapping[str, npt.NDArray[Any]]
PREFIX = "inputs:"  # of their names in a plan, where what follows a dot is an array of a group, such as "0.slots"


class InputSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One array of every batch of a run; only its number of entries varies."""

    name: Text
    dtype: Dtype
    shape: tuple[Number, ...]  # of an entry
    of: Text = ""  # the feature whose look-ups have an entry each; "" for samples


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One of `count` trainers, which divide the parts of every batch in order. Raises ValueError."""

    number: int  # 0 to count - 1
    count: int
    parts: int

    def __post_init__(self) -> None:
        assert 0 <= self.number < self.count, f"rank {self.number} of {self.count}"
        check_shared(self.parts, self.count)

    @property
    def is_divided(self) -> bool:
        """Returns whether each batch has several parts, on one rank or more. Otherwise a step computes the whole
        batch."""
        return self.parts > 1

    @property
    def parts_per_rank(self) -> int:
        return self.parts // self.count

    @property
    def own_parts(self) -> range:
        return range(self.number * self.parts_per_rank, (self.number + 1) * self.parts_per_rank)

    @property
    def other_parts(self) -> list[int]:
        return [part for part in range(self.parts) if part not in self.own_parts]


UNDIVIDED = Rank(number=0, count=1, parts=1)


def rank_of(ranks: Ranks, number: int) -> Rank:
    return Rank(number=number, count=ranks.count, parts=ranks.num_parts)


def part_bounds(batch_size: int, parts: int) -> list[int]:
    """Returns the first sample of each part, and the end of the last: parts + 1 numbers."""
    return [part * batch_size // parts for part in range(parts + 1)]


def samples_of_part(batch_size: int, parts: int, part: int) -> slice:
    return slice(part * batch_size // parts, (part + 1) * batch_size // parts)


def part_sizes(batch_size: int, rank: Rank) -> list[int]:
    """Returns the number of samples in each of the rank's parts."""
    bounds = part_bounds(batch_size, rank.parts)
    return [bounds[part + 1] - bounds[part] for part in rank.own_parts]


def samples_of(batch_size: int, rank: Rank) -> slice:
    """Returns the samples of all the rank's parts."""
    bounds = part_bounds(batch_size, rank.parts)
    return slice(bounds[rank.own_parts.start], bounds[rank.own_parts.stop])


def ids_of_samples(batch: Lookups, samples: slice, whole: Collection[int]) -> Lookups:
    """Returns the look-ups of some samples, in the order of the batch.

    `whole`: positions of the features whose look-ups are the batch's. All are in its first bag, and also here."""
    return ids_of_features(batch, samples, whole, range(batch.num_bags // max(batch.size, 1)))


def ids_of_features(batch: Lookups, samples: slice, whole: Collection[int], features: Iterable[int]) -> Lookups:
    """Returns the same of some features alone, by ascending position."""
    ids, offsets, weights = batch.ids, batch.offsets, batch.weights
    size = samples.stop - samples.start
    if offsets is None and weights is None and not whole and batch.size:  # in one copy
        chosen = ids.reshape(-1, batch.size)[list(features), samples]
        return Lookups(size=size, ids=np.ascontiguousarray(chosen).ravel())
    firsts = [f * batch.size + (0 if f in whole else samples.start) for f in features]
    lookups = [(first, first + size) for first in firsts]
    counts: list[I64] = []
    if offsets is not None:
        counts = [np.diff(offsets[start : stop + 1]) for start, stop in lookups]
        lookups = [(int(offsets[start]), int(offsets[stop])) for start, stop in lookups]
    return Lookups(
        size=size,
        ids=joined(ids, lookups),
        offsets=None if offsets is None else np.cumsum(np.concatenate([np.zeros(1, np.int64), *counts])),
        weights=None if weights is None else joined(weights, lookups),
    )


def joined(array: npt.NDArray[Value], ranges: Sequence[tuple[int, int]]) -> npt.NDArray[Value]:
    return np.concatenate([array[:0], *(array[first:end] for first, end in ranges)])


def parts_of(batch: Lookups, parts: int, whole: Collection[int]) -> list[Lookups]:
    """Returns the look-ups of each part, as `ids_of_samples`."""
    return [ids_of_samples(batch, slice(*ends), whole) for ends in pairwise(part_bounds(batch.size, parts))]


def own_bounds(batch_size: int, rank: Rank) -> list[int]:
    """Returns the first sample of each of the rank's parts among its own, and the end of the last."""
    own = part_bounds(batch_size, rank.parts)[rank.own_parts.start : rank.own_parts.stop + 1]
    return [bound - own[0] for bound in own]


def own_parts(own: Lookups, rank: Rank, whole: Collection[int]) -> list[Lookups]:
    """Returns the look-ups of each of the rank's parts, as `ids_of_samples`. `own`: the rank's of the batch."""
    if rank.parts_per_rank == 1:
        return [replace(own, others=0)]
    return [ids_of_samples(own, slice(*ends), whole) for ends in pairwise(own_bounds(own.batch_size, rank))]


def arrays_of_samples(batch: Lookups, samples: slice, of: Belonging) -> Cut:
    """Returns the entries that some samples have in the arrays of the batch."""

    def lookups(feature: str) -> slice:
        first = of.positions[feature] * batch.size
        if batch.offsets is None:
            return samples
        start, *ends = (batch.offsets[first + sample] for sample in (0, samples.start, samples.stop))
        return slice(*(int(end - start) for end in ends))

    return of.cut(samples, lookups)


def part_of(batch: Batch, part: int, parts: int, of: Belonging) -> Batch:
    """Returns the samples of one part."""
    samples = samples_of_part(batch.size, parts, part)
    own, cut = ids_of_samples(batch, samples, of.batch_positions), arrays_of_samples(batch, samples, of)
    return Batch.of(own, batch.within(cut))


def part_seed(seed: int, train_step: int, part: int) -> int:
    """Returns the seed of torch's random numbers in one of several parts. It does not depend on ranks."""
    state = np.zeros(1, np.uint64)
    for counter in (seed, train_step, part):
        state = mix(state + np.array([counter + 1], np.uint64) * GOLDEN)
    return int(state[0] >> np.uint64(1))
