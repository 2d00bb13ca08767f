"""The exchange of a rank from the rows of all parts, as whole arrays: what `want` and `complete` must give together."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from rowcast.prefetcher.planner.exchange import ExchangedRows, OrderedSum, OwnRows
from rowcast.prefetcher.planner.grouping import Grouping
from rowcast.protocol.parts import Rank, Shards
from rowcast.runtime.arrays import I32, I64


def shared_rows_of(parts: Sequence[Grouping], shards: Shards, rank: Rank) -> ExchangedRows:
    """`parts`: of the whole batch."""
    k, keys_of_parts = rank.parts_per_rank, [part.keys for part in parts]
    wanted = [distinct(keys_of_parts[first : first + k]) for first in range(0, rank.parts, k)]  # by each rank
    asked_here = [shards.rows_of(rank.number, keys) for keys in wanted]
    sums = ordered_sum(asked_here)
    lie = own_first([len(own) for own in asked_here], rank.number)
    home = ordered_sum(own_parts := keys_of_parts[rank.number * k : (rank.number + 1) * k])
    owners = shards.owners(home.keys)
    # of the received rows
    order = np.argsort(np.where(owners == rank.number, -1, owners), kind="stable")
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return ExchangedRows(
        own=OwnRows(
            parts=tuple(parts[own] for own in rank.own_parts),
            others=(),
            places=tuple(place[np.searchsorted(home.keys, keys)] for keys in own_parts),
            home=replace(home, keys=home.keys[order], roots=home.roots[order]),
            wanted=tuple(shards.rows_of(owner, home.keys) for owner in range(rank.count)),
        ),
        send_counts=tuple(map(len, asked_here)),
        send=np.searchsorted(sums.keys, np.concatenate(asked_here)).astype(np.int32)[np.argsort(lie)],
        sums=replace(sums, to=lie[sums.to], of=lie[sums.of], roots=lie[sums.roots]),
    )


def own_first(counts: Sequence[int], number: int) -> I32:
    """Where each row lies, of those from each rank in turn, if that rank's own lie first."""
    ranks = np.repeat(np.arange(len(counts)), counts)
    return np.argsort(np.argsort(np.where(ranks == number, -1, ranks), kind="stable")).astype(np.int32)


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


def distinct(keys: Sequence[I64]) -> I64:
    """Returns the rows of several batches or parts, ascending; `keys`: those of each, ascending and distinct.

    numpy's `unique` hashes, several times slower than merging sorted keys."""
    if len(keys) == 1:
        return keys[0]
    every = np.sort(np.concatenate([np.zeros(0, np.int64), *keys]), kind="stable")
    is_first = np.ones(len(every), np.bool_)
    np.not_equal(every[1:], every[:-1], out=is_first[1:])
    return every[is_first]


def assert_same(found: Any, expected: Any, name: str) -> None:
    assert type(found) is type(expected), name
    if is_dataclass(expected):
        for own in fields(expected):
            assert_same(getattr(found, own.name), getattr(expected, own.name), f"{name}, {own.name}")
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype, name
        np.testing.assert_array_equal(found, expected, name)
    elif isinstance(expected, tuple):
        assert len(found) == len(expected), name
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{name}[{index}]")
    else:
        assert found == expected, name
