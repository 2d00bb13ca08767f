"""The two parts of a batch: what its rows are looked up by, needed far ahead, and its dense part, needed when the step is planned.

IdsBatch     ids, offsets, weights      hundreds of batches ahead
DenseBatch   dense, labels, extra       a few batches ahead
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from rowcast.protocol.batch import Batch

Columns = Literal["all", "ids", "dense"]  # what a reader is opened for: whole batches or one part of each


@dataclass(frozen=True, kw_only=True, slots=True)
class IdsBatch:
    """As in `Batch`."""

    size: int  # B
    ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64] | None = None
    weights: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseBatch:
    """As in `Batch`."""

    dense: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    extra: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)


Part = Batch | IdsBatch | DenseBatch


def join_parts(ids: IdsBatch, dense: DenseBatch) -> Batch:
    return Batch(
        dense=dense.dense, labels=dense.labels, ids=ids.ids, offsets=ids.offsets, weights=ids.weights, extra=dense.extra
    )


def divide(batch: Batch) -> tuple[IdsBatch, DenseBatch]:
    ids = IdsBatch(size=batch.size, ids=batch.ids, offsets=batch.offsets, weights=batch.weights)
    return ids, DenseBatch(dense=batch.dense, labels=batch.labels, extra=batch.extra)


def decode_part(columns: Columns, dense: Callable[[], DenseBatch], ids: Callable[[], IdsBatch]) -> Part:
    """What `columns` asks for. Of a whole batch the dense part is decoded first, so its errors come before those of the ids."""
    if columns == "ids":
        return ids()
    decoded = dense()
    return decoded if columns == "dense" else join_parts(ids(), decoded)
