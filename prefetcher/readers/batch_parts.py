"""Splits a batch in two: ids, needed far ahead, and dense features, needed when the step is planned.

IdsBatch     ids, offsets, weights      hundreds of batches ahead
DenseBatch   dense, labels, inputs      a few batches ahead
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy.typing as npt

from rowcast.protocol.batch import Batch, IdsBatch
from rowcast.protocol.inputs import Cut
from rowcast.runtime.arrays import F32

Columns = Literal["all", "ids", "dense"]  # what a reader decodes: whole batches, or one half of each


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseBatch:
    """Fields as in `Batch`."""

    dense: F32
    labels: F32
    inputs: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def of_samples(self, cut: Cut) -> "DenseBatch":
        return DenseBatch(dense=self.dense[cut.samples], labels=self.labels[cut.samples], inputs=cut.of(self.inputs))


Part = Batch | IdsBatch | DenseBatch


def join_parts(ids: IdsBatch, dense: DenseBatch) -> Batch:
    return Batch(
        dense=dense.dense,
        labels=dense.labels,
        ids=ids.ids,
        offsets=ids.offsets,
        weights=ids.weights,
        inputs=dense.inputs,
    )


def divide(batch: Batch) -> tuple[IdsBatch, DenseBatch]:
    ids = IdsBatch(size=batch.size, ids=batch.ids, offsets=batch.offsets, weights=batch.weights)
    return ids, DenseBatch(dense=batch.dense, labels=batch.labels, inputs=batch.inputs)


def decode_part(columns: Columns, dense: Callable[[], DenseBatch], ids: Callable[[], IdsBatch]) -> Part:
    """Decodes the requested columns. Decodes dense features first, so their errors precede those of the ids."""
    if columns == "ids":
        return ids()
    decoded = dense()
    return decoded if columns == "dense" else join_parts(ids(), decoded)
