"""Cuts a batch into parts: contiguous slices of its samples, each of which gives a gradient of its own.

    samples of a batch of 21    | 0 1 | 2 3 4 | 5 6 | 7 8 9 | ...        part m of M: from m * 21 // M on
    8 parts                     |  0  |   1   |  2  |   3   | ...

How large a part is depends on the batch and on M alone. Parts differ by at most one sample; where a batch has fewer
samples than parts, some parts are empty. The M / N parts of one of N ranks are one contiguous slice as well, and it is
the slice that the rank would have if there were N parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rowcast.job.schema import Ranks, check_shared
from rowcast.protocol.batch import Batch
from rowcast.runtime.arrays import F32, I64
from rowcast.runtime.splitmix import GOLDEN, mix

Value = TypeVar("Value", np.int64, np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One of `count` trainers, which share the parts of every batch in order. Raises ValueError."""

    number: int  # 0 to count - 1
    count: int
    parts: int

    def __post_init__(self) -> None:
        assert 0 <= self.number < self.count, f"rank {self.number} of {self.count}"
        check_shared(self.parts, self.count)

    @property
    def parts_per_rank(self) -> int:
        return self.parts // self.count

    @property
    def own_parts(self) -> range:
        return range(self.number * self.parts_per_rank, (self.number + 1) * self.parts_per_rank)


def rank_of(ranks: Ranks, number: int) -> Rank | None:
    """None if a trainer is alone and computes whole batches."""
    if ranks.num_parts == 1:
        return None
    return Rank(number=number, count=ranks.count, parts=ranks.num_parts)


class Ids(NamedTuple):
    """Fields as in `Batch`."""

    ids: I64
    offsets: I64 | None
    weights: F32 | None


def part_bounds(batch_size: int, parts: int) -> list[int]:
    """Where each part starts, and the end of the last one: parts + 1 samples."""
    return [part * batch_size // parts for part in range(parts + 1)]


def part_sizes(batch_size: int, rank: Rank) -> list[int]:
    """The samples of each own part."""
    bounds = part_bounds(batch_size, rank.parts)
    return [bounds[part + 1] - bounds[part] for part in rank.own_parts]


def samples_of(batch_size: int, rank: Rank) -> slice:
    """The samples of all own parts."""
    bounds = part_bounds(batch_size, rank.parts)
    return slice(bounds[rank.own_parts.start], bounds[rank.own_parts.stop])


def ids_of_samples(batch_size: int, ids: Ids, first: int, end: int) -> Ids:
    """The look-ups of the samples `first` to `end` - 1, in the order of the batch."""
    num_features = (len(ids.ids) if ids.offsets is None else len(ids.offsets) - 1) // batch_size
    bags = [(f * batch_size + first, f * batch_size + end) for f in range(num_features)]
    if ids.offsets is None:
        return Ids(joined(ids.ids, bags), None, None if ids.weights is None else joined(ids.weights, bags))
    lookups = [(int(ids.offsets[start]), int(ids.offsets[stop])) for start, stop in bags]
    counts = [np.diff(ids.offsets[start : stop + 1]) for start, stop in bags]
    return Ids(
        joined(ids.ids, lookups),
        np.cumsum(np.concatenate([np.zeros(1, np.int64), *counts])),
        None if ids.weights is None else joined(ids.weights, lookups),
    )


def joined(array: npt.NDArray[Value], ranges: Sequence[tuple[int, int]]) -> npt.NDArray[Value]:
    return np.concatenate([array[:0], *(array[first:end] for first, end in ranges)])


def part_of(batch: Batch, part: int, parts: int) -> Batch:
    """The samples of one part. `extra`, of which nothing says how it belongs to samples, is left out."""
    first, end = part_bounds(batch.size, parts)[part : part + 2]
    ids = ids_of_samples(batch.size, Ids(batch.ids, batch.offsets, batch.weights), first, end)
    return Batch(dense=batch.dense[first:end], labels=batch.labels[first:end], **ids._asdict())


def part_seed(seed: int, train_step: int, part: int) -> int:
    """The seed of torch's random numbers in a part, where a batch has several. It knows nothing of ranks."""
    state = np.zeros(1, np.uint64)
    for counter in (seed, train_step, part):
        state = mix(state + np.array([counter + 1], np.uint64) * GOLDEN)
    return int(state[0] >> np.uint64(1))
