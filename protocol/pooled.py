"""Says which features a rank looks up of which parts, where ranks own whole tables and pool them for all.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from rowcast.job.tables import GroupSpec
from rowcast.protocol.parts import Rank, part_bounds
from rowcast.protocol.shards import owner_of


@dataclass(frozen=True, slots=True)
class Source:
    """What a rank looks up of one part of a batch, in a group."""

    part: int  # 0 to rank.parts - 1
    features: tuple[int, ...]  # ascending, by their number among the group's features


def feature_owners(group: GroupSpec, count: int) -> list[int | None]:
    """Returns the one of `count` ranks that pools each of the group's features, in the group's order. None: the rows of
    its table are divided, and each rank pools its own parts."""
    return [owner_of(table, count) for table in group.feature_tables()]


def features_of(group: GroupSpec, rank: Rank, owner: int) -> tuple[int, ...]:
    """Returns the features that rank `owner` pools for all, ascending, by their number among the group's features."""
    return tuple(f for f, own in enumerate(feature_owners(group, rank.count)) if own == owner)


def sources_of(group: GroupSpec, rank: Rank) -> tuple[Source, ...]:
    """Returns the group's sources on `rank`: its own parts, then, if it owns a table, all others; both ascending."""
    owners, owned = feature_owners(group, rank.count), features_of(group, rank, rank.number)
    own = tuple(f for f, owner in enumerate(owners) if owner in {None, rank.number})
    others = rank.other_parts if owned else []
    return (*(Source(part, own) for part in rank.own_parts), *(Source(part, owned) for part in others))


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
