"""Defines the batch of training data that every reader yields."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy.typing as npt

from rowcast.runtime.arrays import F32, I64

Kind = Literal["train", "eval"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """B samples of F features. Arrays are C-contiguous and never change."""

    dense: F32  # [B, D], finite
    labels: F32  # [B], or [B, T] with T labels per sample (data.columns.labels); NaN is unknown
    # [N] feature-major (all samples of feature 0, then of feature 1, ...), checked against the tables
    ids: I64
    # [F * B + 1] into ids, or None if every bag holds exactly one id (N = F * B)
    offsets: I64 | None = None
    weights: F32 | None = None  # [N], or None if no feature has weights
    # other arrays for the model, of any dtype: an entry per sample, or per look-up of a feature (`inputs.py`)
    inputs: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True, slots=True)
class IdsBatch:
    """The planner's view of a batch; fields as in `Batch`."""

    size: int  # B
    ids: I64
    offsets: I64 | None = None
    weights: F32 | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledBatch:
    """A batch with its position in the run. Steps count training and evaluation batches together, without gaps."""

    step: int
    kind: Kind
    train_step: int  # training batches before this one in the run
    epoch: int
    batch: Batch
