"""Plans a group's exchange between ranks in a step: owners send rows to the ranks that look them up, and get gradients
back.

Every rank knows the ids of the whole batch and computes its side from them, so both sides agree on every size and
order:

    rows         an owner sends each rank the distinct rows that its parts look up, by ascending key
    received     from owner 0, owner 1, ...                            place: a row's position among those
    gradients    each part has one per distinct row; a rank adds its parts (`home`) and sends them back in that order
    returned     from rank 0, rank 1, ...                              the owner adds them (`sums`) and trains its rows

Both sums are branches of one tree over all parts of the batch, `((0 + 1) + (2 + 3)) + ...`: level by level, neighbours
are added, and a value without a neighbour passes unchanged. A part that does not look up a row is not in its tree: its
zero would not change the sum, which starts from 0 and is never -0.0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rowcast.protocol.parts import Rank
from rowcast.protocol.shards import Shards
from rowcast.runtime.arrays import I32, I64


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedSum:
    """The additions, in place, of rows' gradients from several sources, concatenated."""

    keys: I64  # [U] ascending: every row of any source
    to: I32  # [A] values[to] += values[of], level by level; within a level all positions differ
    of: I32  # [A]
    level_ends: tuple[int, ...]  # additions up to the end of each level
    roots: I32  # [U] position of each row's sum after the last level

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.to.nbytes + self.of.nbytes + self.roots.nbytes


def ordered_sum(sources: Sequence[I64]) -> OrderedSum:
    """`sources`: the distinct rows with a gradient from each source, by ascending key."""
    keys = np.concatenate([np.zeros(0, np.int64), *sources])
    nodes = np.repeat(np.arange(len(sources)), [len(own) for own in sources])
    places = np.argsort(keys, kind="stable")  # by row, and by source within a row
    keys, nodes = keys[places], nodes[places]
    additions = [np.zeros((2, 0), np.int64)]
    level_ends: list[int] = []
    for _ in range((len(sources) - 1).bit_length()):
        nodes >>= 1
        joins = np.flatnonzero((keys[1:] == keys[:-1]) & (nodes[1:] == nodes[:-1]))
        additions.append(np.stack([places[joins], places[joins + 1]]))
        level_ends.append(len(joins) + (level_ends[-1] if level_ends else 0))
        keys, nodes, places = (np.delete(array, joins + 1) for array in (keys, nodes, places))
    to, of = np.concatenate(additions, axis=1).astype(np.int32)
    return OrderedSum(keys=keys, to=to, of=of, level_ends=tuple(level_ends), roots=places.astype(np.int32))


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupExchange:
    """One rank's side of a step's exchange, before the rows have slots."""

    send_counts: tuple[int, ...]  # rows sent to each rank
    send: I32  # [sent] which of this rank's rows, for rank 0, then rank 1, ...
    sums: OrderedSum  # over returned gradients, laid out as the sent rows; its keys are the shard's rows of the batch
    receive_counts: tuple[int, ...]  # rows received from each owner
    places: tuple[I32, ...]  # for each part here: positions of its distinct rows, ascending, among those received
    home: OrderedSum  # over the parts here, concatenated; its roots follow the received rows

    @property
    def nbytes(self) -> int:
        return self.send.nbytes + self.sums.nbytes + self.home.nbytes + sum(own.nbytes for own in self.places)


def exchange_of(keys_of_parts: Sequence[I64], shards: Shards, rank: Rank) -> GroupExchange:
    """`keys_of_parts`: the distinct rows of a group that each part of the batch looks up, by ascending key."""
    k = rank.parts_per_rank
    wanted = [distinct(keys_of_parts[first : first + k]) for first in range(0, rank.parts, k)]  # by each rank
    asked_here = [shards.rows_of(rank.number, keys) for keys in wanted]
    sums = ordered_sum(asked_here)
    home = ordered_sum(own_parts := keys_of_parts[rank.number * k : (rank.number + 1) * k])
    owners = shards.owners(home.keys)
    order = np.argsort(owners, kind="stable")  # of the received rows
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return GroupExchange(
        send_counts=tuple(map(len, asked_here)),
        send=np.searchsorted(sums.keys, np.concatenate(asked_here)).astype(np.int32),
        sums=sums,
        receive_counts=tuple(np.bincount(owners, minlength=rank.count).tolist()),
        places=tuple(place[np.searchsorted(home.keys, keys)] for keys in own_parts),
        home=OrderedSum(
            keys=home.keys[order], to=home.to, of=home.of, level_ends=home.level_ends, roots=home.roots[order]
        ),
    )


def distinct(keys: Sequence[I64]) -> I64:
    """Returns the rows of several batches or parts, ascending; `keys`: those of each, ascending and distinct.

    numpy's `unique` hashes, several times slower than merging sorted keys."""
    if len(keys) == 1:
        return keys[0]
    every = np.sort(np.concatenate([np.zeros(0, np.int64), *keys]), kind="stable")
    is_first = np.ones(len(every), np.bool_)
    np.not_equal(every[1:], every[:-1], out=is_first[1:])
    return every[is_first]
