"""Rows as columns: cutting, permuting and joining blocks of samples.

A block is a `Batch` of any number of samples; every function here returns a new one and leaves its arguments as they are. Ids lie
feature-major, so one sample's ids are spread over the block: sample b of feature f is bag f * B + b.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from protocol.batch import Batch

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Value = TypeVar("Value", bound=np.generic)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One feature of a block of B samples."""

    ids: Ids  # [n]
    lengths: Ids | None = None  # [B] ids in each bag, or None: one each (n = B)
    weights: Floats | None = None  # [n], or None: all one


def block_of(dense: Floats, labels: Floats, columns: list[Column], weighted: bool) -> Batch:
    """Joins features, in the job's feature order, into one block."""
    return Batch(
        dense=dense,
        labels=labels,
        ids=np.concatenate([column.ids for column in columns]),
        offsets=joined_offsets([column.lengths for column in columns], len(labels)),
        weights=np.concatenate([column_weights(column) for column in columns]) if weighted else None,
    )


def column_weights(column: Column) -> Floats:
    return np.ones(len(column.ids), np.float32) if column.weights is None else column.weights


def joined_offsets(lengths: list[Ids | None], num_samples: int) -> Ids | None:
    if all(column is None for column in lengths):
        return None
    ones = np.ones(num_samples, np.int64)
    return offsets_of(np.concatenate([ones if column is None else column for column in lengths]))


def offsets_of(lengths: Ids) -> Ids:
    """[n] lengths of bags -> [n + 1] offsets."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def bag_offsets(block: Batch) -> Ids:
    """[F * B + 1], written out where the block leaves them away."""
    return np.arange(len(block.ids) + 1, dtype=np.int64) if block.offsets is None else block.offsets


def compact(block: Batch) -> Batch:
    """The block as it crosses the boundary: no offsets where every bag holds exactly one id."""
    if block.offsets is None or len(block.ids) != len(block.offsets) - 1 or not (np.diff(block.offsets) == 1).all():
        return block
    return Batch(dense=block.dense, labels=block.labels, ids=block.ids, weights=block.weights, extra=block.extra)


def take_rows(block: Batch, rows: Ids | slice) -> Batch:
    """The samples `rows` of a block, in that order. A slice may share memory with the block."""
    dense, labels = block.dense[rows], block.labels[rows]
    if block.offsets is None:
        ids = block.ids.reshape(-1, block.size)[:, rows].ravel()
        weights = None if block.weights is None else block.weights.reshape(-1, block.size)[:, rows].ravel()
        return Batch(dense=dense, labels=labels, ids=ids, weights=weights)
    bags = np.arange(len(block.offsets) - 1).reshape(-1, block.size)[:, rows].ravel()
    lookups, offsets = take_bags(block.offsets, bags)
    weights = None if block.weights is None else block.weights[lookups]
    return Batch(dense=dense, labels=labels, ids=block.ids[lookups], offsets=offsets, weights=weights)


def take_bags(offsets: Ids, bags: Ids) -> tuple[Ids, Ids]:
    """The look-ups of `bags`, bag after bag, and the offsets of the bags in that new order."""
    lengths = np.diff(offsets)[bags]
    taken = offsets_of(lengths)
    return np.repeat(offsets[bags] - taken[:-1], lengths) + np.arange(taken[-1]), taken


def join_rows(blocks: list[Batch]) -> Batch:
    """The samples of all blocks, block after block."""
    if len(blocks) == 1:
        return blocks[0]
    offsets = None if all(block.offsets is None for block in blocks) else [bag_offsets(block) for block in blocks]
    sizes = [block.size for block in blocks]
    weights = [block.weights for block in blocks if block.weights is not None]
    return Batch(
        dense=np.concatenate([block.dense for block in blocks]),
        labels=np.concatenate([block.labels for block in blocks]),
        ids=join_lookups([block.ids for block in blocks], sizes, offsets),
        offsets=None if offsets is None else join_offsets(offsets, sizes),
        weights=join_lookups(weights, sizes, offsets) if weights else None,
    )


def join_offsets(offsets: list[Ids], sizes: list[int]) -> Ids:
    lengths = [np.diff(own).reshape(-1, size) for own, size in zip(offsets, sizes, strict=True)]
    return offsets_of(np.concatenate(lengths, axis=1).ravel())


def join_lookups(values: list[npt.NDArray[Value]], sizes: list[int], offsets: list[Ids] | None) -> npt.NDArray[Value]:
    """Feature-major values of several blocks, feature by feature; offsets None: one value a bag."""
    if offsets is None:
        return np.concatenate([own.reshape(-1, size) for own, size in zip(values, sizes, strict=True)], axis=1).ravel()
    bounds = [own[::size] for own, size in zip(offsets, sizes, strict=True)]  # where each feature starts and ends
    num_features = len(bounds[0]) - 1
    return np.concatenate([own[at[f] : at[f + 1]] for f in range(num_features) for own, at in zip(values, bounds, strict=True)])


def cut(blocks: Iterable[Batch], num_samples: int) -> Iterator[Batch]:
    """The same samples in blocks of exactly `num_samples`, the last one what is left."""
    parts: list[Batch] = []
    held = 0
    for block in blocks:
        at = 0
        while at < block.size:
            taken = min(num_samples - held, block.size - at)
            parts.append(take_rows(block, slice(at, at + taken)))
            at, held = at + taken, held + taken
            if held == num_samples:
                yield join_rows(parts)
                parts, held = [], 0
    if parts:
        yield join_rows(parts)
