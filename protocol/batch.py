"""Defines the batch of training data: look-ups, needed far ahead, and samples, needed when the step is planned.

Lookups        ids, offsets, weights      hundreds of batches ahead
Samples        dense, labels, inputs      a few batches ahead
Batch          both
Scheduled      any of these at its place in the run, or the function that decodes it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec.structs import replace

from rowcast.runtime.arrays import F32, I64
from rowcast.runtime.checkpoint_manifest import Position

Kind = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class SampleCut:
    """The entries that some samples of a batch have in its arrays."""

    samples: slice
    lookups: Mapping[str, slice]  # of the arrays of look-ups

    def of(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """`arrays`: or tensors."""
        return {name: array[self.lookups.get(name, self.samples)] for name, array in arrays.items()}


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """B samples' look-ups of F features. Arrays are C-contiguous and never change."""

    size: int  # B
    others: int = 0  # samples of the batch that are not here, but on other ranks
    # [N] feature-major (all samples of feature 0, then of feature 1, ...), checked against the tables
    ids: I64
    # [F * B + 1] into ids, or None if every bag holds exactly one id (N = F * B)
    offsets: I64 | None = None
    weights: F32 | None = None  # [N], or None if no feature has weights

    @property
    def num_bags(self) -> int:
        return len(self.ids) if self.offsets is None else len(self.offsets) - 1

    @property
    def batch_size(self) -> int:
        """Samples of the batch over all ranks."""
        return self.size + self.others


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The part of a batch that travels with its plan."""

    dense: F32  # [B, D], finite
    labels: F32  # [B], or [B, T] with T labels per sample (data.columns.labels); NaN is unknown
    # other arrays for the model, of any dtype: an entry per sample, or per look-up of a feature (`parts.py`)
    inputs: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def within(self, cut: SampleCut) -> "Samples":
        return Samples(dense=self.dense[cut.samples], labels=self.labels[cut.samples], inputs=cut.of(self.inputs))


@dataclass(frozen=True, kw_only=True)
class Batch(Lookups, Samples):
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.labels))

    @classmethod
    def of(cls, lookups: Lookups, samples: Samples) -> "Batch":
        return cls(
            dense=samples.dense,
            labels=samples.labels,
            ids=lookups.ids,
            offsets=lookups.offsets,
            weights=lookups.weights,
            inputs=samples.inputs,
            others=lookups.others,
        )

    @property
    def lookups(self) -> Lookups:
        return Lookups(size=self.size, others=self.others, ids=self.ids, offsets=self.offsets, weights=self.weights)

    @property
    def samples(self) -> Samples:
        return Samples(dense=self.dense, labels=self.labels, inputs=self.inputs)


def needed_offsets(ids: I64, offsets: I64 | None) -> I64 | None:
    """Returns None if every bag holds exactly one id, as `Lookups` has it; else the offsets."""
    if offsets is None or len(ids) != len(offsets) - 1 or not (np.diff(offsets) == 1).all():
        return offsets
    return None


def ids_checksum(batch: Lookups) -> str:
    """Returns the xxh3_64 of ids, offsets and weights, 16 hex digits; the same with offsets that are not needed."""
    return checksum_of([batch.ids, needed_offsets(batch.ids, batch.offsets), batch.weights])


def dense_checksum(batch: Samples) -> str:
    """Returns the xxh3_64 of dense features, labels and all other arrays, 16 hex digits."""
    return checksum_of([batch.dense, batch.labels, *batch.inputs.values()])


def checksum_of(arrays: Sequence[npt.NDArray[np.generic] | None]) -> str:
    hasher = xxhash.xxh3_64()
    for array in arrays:
        if array is not None:
            hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()


def after(kind: Kind, at: Position) -> Position:
    """Returns the position after a batch, where no evaluation begins or ends."""
    if kind == "train":
        return replace(
            at, step=at.step + 1, train_step=at.train_step + 1, train_batch=at.train_batch + 1, eval_batch=None
        )
    return replace(at, step=at.step + 1, eval_batch=(at.eval_batch or 0) + 1)


B = TypeVar("B", covariant=True)


@dataclass(frozen=True, kw_only=True)  # no slots: Python would unpickle them field by field
class Scheduled(Generic[B]):
    """A batch, a half of it, or the function that decodes it, at its place in the run: a run from `position` starts
    with this batch, a run from `following` with the next."""

    kind: Kind
    position: Position
    following: Position
    batch: B

    @classmethod
    def at(cls, *, step: int, kind: Kind, train_step: int, epoch: int, batch: B) -> "Scheduled[B]":  # type: ignore[misc]
        """Returns a batch whose place within its epoch does not matter."""
        at = Position(step=step, train_step=train_step, epoch=epoch, eval_batch=None if kind == "train" else 0)
        return cls(kind=kind, position=at, following=after(kind, at), batch=batch)

    @property
    def step(self) -> int:
        """Steps count training and evaluation batches together, without gaps."""
        return self.position.step

    @property
    def train_step(self) -> int:
        """Training batches before this one in the run."""
        return self.position.train_step

    @property
    def epoch(self) -> int:
        return self.position.epoch

    def holding(self, batch: Any) -> "Scheduled[Any]":
        """Returns the same place with another content."""
        return Scheduled(kind=self.kind, position=self.position, following=self.following, batch=batch)


ScheduledBatch = Scheduled[Batch]
