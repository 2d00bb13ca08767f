"""Joins the features of a batch, and the rows of a batch from several files.

No function changes its arguments. Ids are feature-major: sample b of feature f is bag f * B + b.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rowcast.protocol.batch import Lookups, Samples, needed_offsets
from rowcast.runtime.arrays import F32, I64

Ids = I64
Floats = F32
Value = TypeVar("Value", bound=np.generic)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One feature of B samples."""

    ids: Ids  # [n]
    lengths: Ids | None = None  # [B] ids in each bag, or None: one each (n = B)
    weights: Floats | None = None  # [n], or None: all one


def join_columns(columns: list[Column], size: int, weighted: bool) -> Lookups:
    """Joins features, in the job's feature order, into the ids of `size` samples."""
    ids = np.concatenate([column.ids for column in columns])
    weights = [np.ones(len(own.ids), np.float32) if own.weights is None else own.weights for own in columns if weighted]
    return Lookups(
        size=size,
        ids=ids,
        offsets=needed_offsets(ids, joined_offsets([column.lengths for column in columns], size)),
        weights=np.concatenate(weights) if weighted else None,
    )


def joined_offsets(lengths: list[Ids | None], num_samples: int) -> Ids | None:
    if all(column is None for column in lengths):
        return None
    ones = np.ones(num_samples, np.int64)
    return offsets_of(np.concatenate([ones if column is None else column for column in lengths]))


def offsets_of(lengths: Ids) -> Ids:
    """Turns [n] lengths of bags into [n + 1] offsets."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def bag_offsets(ids: Ids, offsets: Ids | None) -> Ids:
    """Returns offsets [F * B + 1], computed if omitted."""
    return np.arange(len(ids) + 1, dtype=np.int64) if offsets is None else offsets


# rows of several files


class FileRows(NamedTuple):
    """The rows of a batch that are in one file."""

    file: int
    positions: Ids  # in the batch
    rows: Ids  # in the file, counted from 0


def rows_by_file(bounds: Ids, rows: Ids) -> list[FileRows]:
    """Splits `rows`, in any order, by file. File i holds the rows bounds[i] to bounds[i + 1]."""
    files = np.searchsorted(bounds, rows, side="right") - 1
    if files[0] == files[-1] and (files == files[0]).all():
        return [FileRows(int(files[0]), np.arange(len(rows)), rows - bounds[files[0]])]
    split = ((int(file), np.flatnonzero(files == file)) for file in np.unique(files))
    return [FileRows(file, positions, rows[positions] - bounds[file]) for file, positions in split]


def as_slice(rows: Ids) -> Ids | slice:
    """Returns consecutive rows as a slice, which reads them at once."""
    first, last = int(rows[0]), int(rows[-1])
    is_run = last - first + 1 == len(rows) and (np.diff(rows) == 1).all()
    return slice(first, last + 1) if is_run else rows


def join_dense(files: list[FileRows], parts: list[Samples], lengths: list[dict[str, Ids]]) -> Samples:
    """Joins what was read from each file into the batch's samples, in their order. `lengths`: of each file, the entries
    of each sample in the arrays of look-ups."""
    if len(parts) == 1:
        return parts[0]
    order = batch_order(files)
    return Samples(
        dense=np.concatenate([part.dense for part in parts])[order],
        labels=np.concatenate([part.labels for part in parts])[order],
        inputs={
            name: join_input(
                [part.inputs[name] for part in parts], [own[name] for own in lengths if name in own], order
            )
            for name in parts[0].inputs
        },
    )


def join_input(arrays: list[npt.NDArray[Value]], lengths: list[Ids], order: Ids) -> npt.NDArray[Value]:
    """`lengths` is empty for an array with an entry per sample."""
    entries = take_bags(offsets_of(np.concatenate(lengths)), order)[0] if lengths else order
    return np.concatenate(arrays)[entries]


def join_ids(files: list[FileRows], parts: list[Lookups]) -> Lookups:
    if len(parts) == 1:
        return parts[0]
    sizes = [part.size for part in parts]
    offsets = [bag_offsets(part.ids, part.offsets) for part in parts]
    weights = [part.weights for part in parts if part.weights is not None]
    lengths = [np.diff(bounds).reshape(-1, size) for bounds, size in zip(offsets, sizes, strict=True)]
    joined = Lookups(
        size=sum(sizes),
        ids=join_lookups([part.ids for part in parts], sizes, offsets),
        offsets=offsets_of(np.concatenate(lengths, axis=1).ravel()),
        weights=join_lookups(weights, sizes, offsets) if weights else None,
    )
    return take_samples(joined, batch_order(files))


def batch_order(files: list[FileRows]) -> Ids:
    return np.argsort(np.concatenate([file.positions for file in files]))


def join_lookups(values: list[npt.NDArray[Value]], sizes: list[int], offsets: list[Ids]) -> npt.NDArray[Value]:
    bounds = [own[::size] for own, size in zip(offsets, sizes, strict=True)]  # where each feature starts and ends
    num_features = len(bounds[0]) - 1
    return np.concatenate(
        [own[at[f] : at[f + 1]] for f in range(num_features) for own, at in zip(values, bounds, strict=True)]
    )


def take_samples(batch: Lookups, samples: Ids) -> Lookups:
    offsets = bag_offsets(batch.ids, batch.offsets)
    bags = np.arange(len(offsets) - 1).reshape(-1, batch.size)[:, samples].ravel()
    lookups, taken = take_bags(offsets, bags)
    ids = batch.ids[lookups]
    weights = None if batch.weights is None else batch.weights[lookups]
    return Lookups(size=len(samples), ids=ids, offsets=needed_offsets(ids, taken), weights=weights)


def take_bags(offsets: Ids, bags: Ids) -> tuple[Ids, Ids]:
    lengths = np.diff(offsets)[bags]
    taken = offsets_of(lengths)
    return np.repeat(offsets[bags] - taken[:-1], lengths) + np.arange(taken[-1]), taken
