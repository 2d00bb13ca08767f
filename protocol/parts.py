"""Cuts a batch into parts: contiguous slices of its samples with separate gradients.

    samples of a batch of 21    | 0 1 | 2 3 4 | 5 6 | 7 8 9 | ...        part m of M: from m * 21 // M on
    8 parts                     |  0  |   1   |  2  |   3   | ...

Only the batch and M decide a part's size. Parts differ by at most one sample; in a batch with fewer samples than parts,
some are empty. The M / N parts of one of N ranks are also one contiguous slice, the same that it would have with N
parts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rowcast.job.schema import Ranks, check_shared
from rowcast.protocol.batch import Batch, Cut, Lookups
from rowcast.protocol.inputs import Belonging
from rowcast.runtime.arrays import GOLDEN, I64, mix

Value = TypeVar("Value", np.int64, np.float32)


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


UNDIVIDED = Rank(number=0, count=1, parts=1)


def rank_of(ranks: Ranks, number: int) -> Rank:
    return Rank(number=number, count=ranks.count, parts=ranks.num_parts)


def part_bounds(batch_size: int, parts: int) -> list[int]:
    """Returns the first sample of each part, and the end of the last: parts + 1 numbers."""
    return [part * batch_size // parts for part in range(parts + 1)]


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
    ids, offsets, weights = batch.ids, batch.offsets, batch.weights
    size = samples.stop - samples.start
    num_features = (len(ids) if offsets is None else len(offsets) - 1) // batch.size
    firsts = [f * batch.size + (0 if f in whole else samples.start) for f in range(num_features)]
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
    samples = slice(*part_bounds(batch.size, parts)[part : part + 2])
    own, cut = ids_of_samples(batch, samples, of.batch_positions), arrays_of_samples(batch, samples, of)
    return Batch.of(own, batch.within(cut))


def part_seed(seed: int, train_step: int, part: int) -> int:
    """Returns the seed of torch's random numbers in one of several parts. It does not depend on ranks."""
    state = np.zeros(1, np.uint64)
    for counter in (seed, train_step, part):
        state = mix(state + np.array([counter + 1], np.uint64) * GOLDEN)
    return int(state[0] >> np.uint64(1))
