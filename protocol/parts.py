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

Divides the rows of every table among ranks: each row has one owner.

Neighbouring rows stay together in blocks of 8. Each block has a point on a line. The shards divide the line evenly, in
order, and the shard around the point owns the block:

    point      0                                                      2**32
    2 shards   |            0              |            1              |
    4 shards   |     0      |      1       |     2      |      3       |

A table that is placed whole is one block (`TableSpec.point`).

So doubling the number of shards halves each one, and halving it joins neighbours; a modulo would mix all rows.

The points of 256 neighbouring blocks are multiples of the golden ratio along the line, which spread as evenly as
possible: if ids are sorted by frequency, no owner gets many more of the hot blocks. The first block's point is a hash
of its table's name and its number, which also spreads ids with a pattern, such as multiples of a number.

Maps ranks to the (part, feature) pairs that they look up, where ranks own whole tables and pool them for all.

A group's *sources* on rank 1 of 2 with 4 parts, in their order, if rank 1 owns table u, rank 0 owns v, and w is divided
by rows:

    part    2     3     0    1          features keep the group's order
    looks   u w   u w   u    u          the vectors of v in parts 2 and 3 arrive from rank 0

Look-ups, distinct rows and bags of a plan follow each other source by source, and feature by feature within one. A rank
that owns no table of a group has its own parts alone. If no table of a group has an owner, they look up all features.

The pooled vectors of u in parts 0 and 1 travel to rank 0: [n, D] for part 0, then for part 1, of each feature after
the other in the group's order, where the part has n samples. Vectors from owner 0, 1, ... follow each other, each
owner's in the order of its sources. Their gradients travel back in the same order. The batch size alone decides their
numbers.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from rowcast.job.schema import Job, Ranks, check_shared
from rowcast.job.tables import KEY_SHIFT, ROW_MASK, GroupSpec, TableSpec
from rowcast.protocol.batch import Batch, Lookups, SampleCut, Samples
from rowcast.protocol.plan_layout import Dtype
from rowcast.runtime.arrays import GOLDEN, I32, I64, mix
from rowcast.runtime.compiled import compiled_loop, compiled_part
from rowcast.runtime.errors import DataError
from rowcast.runtime.ranges import Number, Text

BLOCK_BITS = 3  # a block has 2**3 rows
ONE_BLOCK = 63  # of a table that is placed whole
RUN_BITS = 8  # a run has 2**8 blocks
MOST_SHARDS = 2**16
HALF = np.uint64(32)
# of a table: its block's point if it is one, or the number from which those of its blocks of 2**block_bits rows follow
LINE = np.dtype([("block_bits", np.uint8), ("point", np.uint64)])
Lines = npt.NDArray[np.void]
mixed = compiled_loop(mix)


class Shards:
    """Maps rows of some tables to their owners. Immutable, so any thread may use it."""

    def __init__(self, tables: Sequence[TableSpec], count: int, block_bits: int = BLOCK_BITS) -> None:
        """`count`: shards, 1 to MOST_SHARDS. `block_bits`: others than these stand in checkpoints."""
        assert 1 <= count <= MOST_SHARDS, f"{count} shards"
        self.count = count
        self.lines = np.zeros(1 + max(table.index for table in tables), LINE)  # by table.index
        for table in tables:
            seed = xxhash.xxh3_64_intdigest(table.name.encode())
            self.lines[table.index] = (block_bits, seed) if table.point is None else (ONE_BLOCK, table.point)

    def owners(self, keys: I64) -> I32:
        """Returns the shard of each row, i32 [n]. `keys`: row keys of these tables, in any order."""
        keys = keys.view()
        keys.flags.writeable = False  # some are, and loops are compiled for one kind
        owners = np.empty(len(keys), np.int32)
        find_owners(keys, self.lines, self.count, owners)
        return owners

    def rows_of(self, number: int, keys: I64) -> I64:
        """Returns the `keys` that shard `number` owns, in their order."""
        owned: I64 = keys[self.owners(keys) == number]
        return owned


@compiled_loop
def find_owners(keys: I64, lines: Lines, count: int, owners: I32) -> None:
    for i in range(len(keys)):
        owners[i] = owner(lines[keys[i] >> KEY_SHIFT], keys[i], count)


@compiled_part
def owner(line: Any, key: int, count: int) -> np.int64:
    """Returns the shard of a row, of `count`. `line`: of its table."""
    point = np.uint64(line["point"])
    if line["block_bits"] != ONE_BLOCK:
        block = np.uint64(key & ROW_MASK) >> np.uint64(line["block_bits"])
        point = mixed(point + (block >> np.uint64(RUN_BITS)) * GOLDEN) + block * GOLDEN >> HALF
    return np.int64(point * np.uint64(count) >> HALF)


def owner_of(table: TableSpec, count: int) -> int | None:
    """Returns the rank that owns all rows of a table; None if each block of rows has its own."""
    return None if table.point is None else table.point * count >> 32


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

    def cut(self, samples: slice, lookups: Callable[[str], slice]) -> SampleCut:
        """`lookups`: of a feature, the look-ups that the samples have, counted among its own."""
        whole = slice(None) if samples.start < samples.stop else slice(0)
        bounds = {of: whole if of in self.batch_features else lookups(of) for of in set(self.arrays.values())}
        return SampleCut(samples, {name: bounds[of] for name, of in self.arrays.items()})


def belonging(job: Job) -> Belonging:
    positions = {feature: position for position, feature in enumerate(job.features)}
    inputs = [*job.data.columns.inputs, *(negatives.per for negatives in job.data.negatives)]
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
    """Raises DataError if a batch does not have the arrays of the first one."""
    arrays, first = ({spec.name: described(spec) for spec in specs} for specs in (found, announced))
    for name in sorted(arrays.keys() | first.keys()):
        if arrays.get(name) != first.get(name):
            raise DataError(
                f"{where}: the array {name} is {arrays.get(name, 'missing')}, and in the first batch "
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
    """Returns the same for some features only, by ascending position."""
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
    bounds = part_bounds(batch_size, rank.parts)[rank.own_parts.start : rank.own_parts.stop + 1]
    return [bound - bounds[0] for bound in bounds]


def own_parts(lookups: Lookups, rank: Rank, whole: Collection[int]) -> list[Lookups]:
    """Returns the look-ups of each of the rank's parts, as `ids_of_samples`. `lookups`: the rank's."""
    if rank.parts_per_rank == 1:
        return [replace(lookups, others=0)]
    return [ids_of_samples(lookups, slice(*ends), whole) for ends in pairwise(own_bounds(lookups.batch_size, rank))]


def arrays_of_samples(batch: Lookups, samples: slice, of: Belonging) -> SampleCut:
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
    lookups, cut = ids_of_samples(batch, samples, of.batch_positions), arrays_of_samples(batch, samples, of)
    return Batch.of(lookups, batch.within(cut))


def part_seed(seed: int, train_step: int, part: int) -> int:
    """Returns the seed of torch's random numbers in one of several parts. It does not depend on ranks."""
    state = np.zeros(1, np.uint64)
    for counter in (seed, train_step, part):
        state = mix(state + np.array([counter + 1], np.uint64) * GOLDEN)
    return int(state[0] >> np.uint64(1))


@dataclass(frozen=True, slots=True)
class LookupSource:
    """What a rank looks up of one part of a batch, in a group."""

    part: int  # 0 to rank.parts - 1
    features: tuple[int, ...]  # ascending, by their number among the group's features


def feature_owners(group: GroupSpec, count: int) -> list[int | None]:
    """Returns which of `count` ranks pools each of the group's features, in the group's order; None if the rows of its
    table are divided, so that each rank pools its own parts."""
    return [owner_of(table, count) for table in group.feature_tables()]


def features_of(group: GroupSpec, rank: Rank, owner: int) -> tuple[int, ...]:
    """Returns the features that rank `owner` pools for all, ascending, by their number among the group's features."""
    return tuple(f for f, feature_owner in enumerate(feature_owners(group, rank.count)) if feature_owner == owner)


def sources_of(group: GroupSpec, rank: Rank) -> tuple[LookupSource, ...]:
    """Returns the group's sources on `rank`: its own parts, then, if it owns a table, all others; both ascending."""
    owners, owned = feature_owners(group, rank.count), features_of(group, rank, rank.number)
    features = tuple(f for f, owner in enumerate(owners) if owner in {None, rank.number})
    others = rank.other_parts if owned else []
    return (*(LookupSource(part, features) for part in rank.own_parts), *(LookupSource(part, owned) for part in others))


def source_sizes(group: GroupSpec, rank: Rank, batch_size: int) -> list[int]:
    """Returns the number of samples in the part of each source. `batch_size`: samples of the batch over all ranks."""
    bounds = part_bounds(batch_size, rank.parts)
    return [bounds[source.part + 1] - bounds[source.part] for source in sources_of(group, rank)]


def bags_of_sources(
    group: GroupSpec, rank: Rank, batch_size: int, sequence_lookups: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Returns the number of bags of each source and of each of its features.

    `sequence_lookups`: of each own part, the look-ups of each feature of the group that is not pooled, as in
    `ShareHeader`. All of these are in own parts, since the rows of their tables are divided."""
    unpooled = group.unpooled_features
    bags = []
    for place, (source, size) in enumerate(
        zip(sources_of(group, rank), source_sizes(group, rank, batch_size), strict=True)
    ):
        lookups = dict(zip(unpooled, sequence_lookups[place], strict=True)) if place < rank.parts_per_rank else {}
        bags.append([lookups.get(f, size) for f in source.features])
    return bags


def numbers_of_vectors(group: GroupSpec, rank: Rank) -> Callable[[int], tuple[list[int], list[int]]]:
    """Returns a function of the batch size: `vectors_to` and `vectors_from`, found once for the sizes of late."""
    return lru_cache(2)(lambda size: (vectors_to(group, rank, size), vectors_from(group, rank, size)))


def vectors_to(group: GroupSpec, rank: Rank, batch_size: int) -> list[int]:
    """Returns the pooled vectors [D] of a group that `rank` sends to each rank; 0 to itself. They are the last that
    it pools, and contiguous."""
    num_owned = len(features_of(group, rank, rank.number))
    sizes = samples_of_ranks(rank, batch_size)
    return [0 if other == rank.number else num_owned * size for other, size in enumerate(sizes)]


def vectors_from(group: GroupSpec, rank: Rank, batch_size: int) -> list[int]:
    """Returns the pooled vectors [D] of a group that `rank` receives from each rank; 0 from itself."""
    size = samples_of_ranks(rank, batch_size)[rank.number]
    return [0 if owner == rank.number else len(features_of(group, rank, owner)) * size for owner in range(rank.count)]


def samples_of_ranks(rank: Rank, batch_size: int) -> list[int]:
    bounds = part_bounds(batch_size, rank.parts)[:: rank.parts_per_rank]
    return [end - first for first, end in pairwise(bounds)]
