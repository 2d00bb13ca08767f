"""The two parts of a batch: what its rows are looked up by, needed far ahead, and the rest, needed when the step is planned.

IdsBatch   ids, offsets, weights      hundreds of batches ahead
Rest       dense, labels, extra       a few batches ahead
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from rowcast.protocol.batch import Batch
from rowcast.runtime.arrays import F32, I64

Columns = Literal["all", "ids", "rest"]  # what a reader is opened for: whole batches or one part of each


@dataclass(frozen=True, kw_only=True, slots=True)
class IdsBatch:
    """As in `Batch`."""

    size: int  # B
    ids: I64
    offsets: I64 | None = None
    weights: F32 | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """As in `Batch`."""

    dense: F32
    labels: F32
    extra: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)


Part = Batch | IdsBatch | Rest


def join_parts(ids: IdsBatch, rest: Rest) -> Batch:
    return Batch(
        dense=rest.dense, labels=rest.labels, ids=ids.ids, offsets=ids.offsets, weights=ids.weights, extra=rest.extra
    )


def divide(batch: Batch) -> tuple[IdsBatch, Rest]:
    ids = IdsBatch(size=batch.size, ids=batch.ids, offsets=batch.offsets, weights=batch.weights)
    return ids, Rest(dense=batch.dense, labels=batch.labels, extra=batch.extra)


def decode_part(columns: Columns, rest: Callable[[], Rest], ids: Callable[[], IdsBatch]) -> Part:
    """What `columns` asks for. Of a whole batch the rest is decoded first, so its errors come before those of the ids."""
    if columns == "ids":
        return ids()
    decoded = rest()
    return decoded if columns == "rest" else join_parts(ids(), decoded)
