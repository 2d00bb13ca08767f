"""Computes AUC, log loss and accuracy of any number of predictions, in bounded memory, without waiting for the device.

AUC needs the order of all predictions. They are counted in bins of the logit instead, positives and negatives
separately; a pair within one bin counts half, as a tie. Bins are narrow where logits usually are:

    logit            0        +-1       +-4       +-16      +-100
    width of a bin   3.1e-05  4.8e-05   1.2e-04   7.6e-04   2.1e-02
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rowcast.trainer.models.ordered import sum_in_order

NUM_BINS = 2**18  # 4 MiB of counts
HALF_RANGE = 4.0  # half of the bins are within +- this logit


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    num_samples: int
    auc: float | None  # None if all labels are equal, or if accuracy is None
    # natural logarithm, mean over samples, or the mean of the model's own loss; None without samples
    logloss: float | None
    # at probability 0.5; None without samples, or if outputs are not logits or labels are not 0 or 1
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class EvalCounts:
    """The counts of an evaluation so far."""

    histogram: Tensor  # i64 [2, NUM_BINS]: negatives, positives
    num_correct: Tensor  # i64 []
    loss_sum: Tensor  # f64 [parts] of a batch, see `protocol/parts.py`; one if there are none
    num_samples: Tensor  # i64 []; more than in the histogram if outputs are not logits or labels are not 0 or 1

    def result(self) -> EvalResult:
        """Reads the counts; waits for the device if they are on one."""
        negatives, positives = self.histogram.cpu().double()
        num_samples = int(self.num_samples)
        are_all = int(negatives.sum() + positives.sum()) == num_samples > 0
        return EvalResult(
            num_samples=num_samples,
            auc=area_under_curve(negatives, positives) if are_all else None,
            logloss=sum_in_order(self.loss_sum.unbind()).item() / num_samples if num_samples else None,
            accuracy=self.num_correct.item() / num_samples if are_all else None,
        )

    def named(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {f"metrics.{name}": counts for name, counts in self.named().items()}

    @classmethod
    def saved(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint holds of an evaluation in progress, by name; empty if none was."""
        names = (field.name for field in fields(cls))
        return {name: tensors[f"metrics.{name}"] for name in names if f"metrics.{name}" in tensors}


class EvalMetrics:
    """Metrics of one evaluation after another."""

    def __init__(self, device: torch.device | None = None, parts: int = 1) -> None:
        """Counts on `device`; None is the CPU."""
        self._begun = False
        self.counts = EvalCounts(
            torch.zeros(2, NUM_BINS, dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.zeros(parts, dtype=torch.float64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
        )

    def update(self, outputs: Any, labels: Tensor, own_loss: Tensor | None = None, part: int = 0) -> None:
        """Counts one batch: logits f32 [B], labels f32 [B], 0 or 1, on the metrics' device. Issues work, reads nothing.

        `own_loss`: [], the batch's mean of the model's own loss. Outputs may then be anything and labels any numbers;
        samples that have a logit and a label of 0 or 1 count for AUC and accuracy.
        """
        self._begun = True
        self.counts.num_samples.add_(len(labels))
        if own_loss is None:
            self.counts.loss_sum[part].add_(
                binary_cross_entropy_with_logits(outputs.double(), labels.double(), reduction="sum")
            )
            self._count(outputs, labels, torch.ones_like(labels, dtype=torch.int64))
            return
        self.counts.loss_sum[part].add_(own_loss.double() * len(labels))
        if isinstance(outputs, Tensor) and outputs.shape == labels.shape:
            self._count(outputs, labels, ((labels == 0) | (labels == 1)).long())

    def _count(self, logits: Tensor, labels: Tensor, counts: Tensor) -> None:
        """`counts`: i64 [B], 1 for samples that count and 0 for others."""
        positive = labels > 0.5
        self.counts.histogram.view(-1).index_add_(0, bins(logits) + positive * NUM_BINS, counts)
        self.counts.num_correct.add_((((logits > 0) == positive) * counts).sum())

    def state(self) -> dict[str, Tensor]:
        """The counts of an evaluation in progress, for a checkpoint; empty otherwise. Waits for the device."""
        return self.counts.state() if self._begun else {}

    def restore(self, tensors: Mapping[str, Tensor]) -> bool:
        """Continues from a `state`; returns whether an evaluation was in progress."""
        saved = EvalCounts.saved(tensors)
        if saved:
            self.continue_from(saved)
        return bool(saved)

    def continue_from(self, saved: Mapping[str, Tensor]) -> None:
        for name, counts in saved.items():
            self.counts.named()[name].copy_(counts)
        if "num_samples" not in saved:  # saved by a version that had logits only
            self.counts.num_samples.copy_(self.counts.histogram.sum())
        self._begun = True

    def compute(self) -> EvalResult:
        return self.counts.result()

    def close(self) -> EvalCounts:
        """Issues a copy of the counts to the host and starts the next evaluation.

        On a device, the result may be read once an event recorded after this call has happened.
        """
        closed = EvalCounts(**{name: to_host(counts) for name, counts in self.counts.named().items()})
        self.clear()
        return closed

    def clear(self) -> None:
        self._begun = False
        for counts in self.counts.named().values():
            counts.zero_()


def to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def bins(logits: Tensor) -> Tensor:
    """The bin of each logit, i64, never decreasing in the logit. NaN goes to the middle bin; the log loss shows it."""
    wide = logits.double().nan_to_num(0.0)
    share = 0.5 + 0.5 * wide / (HALF_RANGE + wide.abs())
    return (share * NUM_BINS).long().clamp_(0, NUM_BINS - 1)


def area_under_curve(negatives: Tensor, positives: Tensor) -> float | None:
    """The share of (negative, positive) pairs in the right order, ties counting half; f64 counts by ascending bin."""
    num_pairs = negatives.sum() * positives.sum()
    if num_pairs == 0:
        return None
    below = negatives.cumsum(0) - negatives
    return float((positives * (below + negatives / 2)).sum() / num_pairs)
