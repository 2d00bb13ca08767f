"""AUC, log loss and accuracy of any number of predictions, in bounded memory and without waiting for the device.

AUC needs the order of all predictions. They are counted in bins of the logit instead, positives and negatives apart; a pair within one
bin counts half, as a tie. Bins are narrow where logits usually are:

    logit            0        +-1       +-4       +-16      +-100
    width of a bin   3.1e-05  4.8e-05   1.2e-04   7.6e-04   2.1e-02
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

NUM_BINS = 2**18  # 4 MiB of counts
HALF_RANGE = 4.0  # half of the bins lie within +- this logit


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    num_samples: int
    auc: float | None  # None where all labels are equal
    logloss: float | None  # natural logarithm, mean over samples; None without samples
    accuracy: float | None  # at probability 0.5; None without samples


@dataclass(frozen=True, slots=True)
class EvalCounts:
    """What an evaluation has counted so far."""

    histogram: Tensor  # i64 [2, NUM_BINS]: negatives, positives
    num_correct: Tensor  # i64 []
    loss_sum: Tensor  # f64 []

    def result(self) -> EvalResult:
        """Reads the counts: waits for the device where they are on one."""
        negatives, positives = self.histogram.cpu().double()
        num_samples = int(negatives.sum() + positives.sum())
        return EvalResult(
            num_samples=num_samples,
            auc=area_under_curve(negatives, positives),
            logloss=self.loss_sum.item() / num_samples if num_samples else None,
            accuracy=self.num_correct.item() / num_samples if num_samples else None,
        )


class EvalMetrics:
    """Metrics of one evaluation after the other."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Counts on `device`; None is the CPU."""
        self._begun = False
        self._counts = EvalCounts(
            torch.zeros(2, NUM_BINS, dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.float64, device=device),
        )

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Counts one batch: logits f32 [B] and labels f32 [B], 0 or 1, on the metrics' device. Issues work and reads nothing."""
        self._begun = True
        positive = labels > 0.5
        where = bins(logits) + positive * NUM_BINS
        self._counts.histogram.view(-1).index_add_(0, where, torch.ones_like(where))
        self._counts.num_correct.add_(((logits > 0) == positive).sum())
        self._counts.loss_sum.add_(binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="sum"))

    def state(self) -> dict[str, Tensor]:
        """The counts of an evaluation in progress, for a checkpoint; nothing outside one. Waits for the device."""
        return {f"metrics.{name}": counts for name, counts in self._named().items()} if self._begun else {}

    def restore(self, tensors: Mapping[str, Tensor]) -> bool:
        """Goes on counting where a `state` was; whether there was an evaluation in progress."""
        saved = {name: tensors[f"metrics.{name}"] for name in self._named() if f"metrics.{name}" in tensors}
        for name, counts in saved.items():
            self._named()[name].copy_(counts)
        self._begun = bool(saved)
        return self._begun

    def _named(self) -> dict[str, Tensor]:
        counts = self._counts
        return {"histogram": counts.histogram, "num_correct": counts.num_correct, "loss_sum": counts.loss_sum}

    def compute(self) -> EvalResult:
        """The metrics so far. Waits for the device."""
        return self._counts.result()

    def close(self) -> EvalCounts:
        """Issues a copy of the counts to the host and starts the next evaluation.

        On a device the result may be read once an event recorded after this call has happened.
        """
        self._begun = False
        closed = EvalCounts(*(to_host(counts) for counts in (self._counts.histogram, self._counts.num_correct, self._counts.loss_sum)))
        for counts in (self._counts.histogram, self._counts.num_correct, self._counts.loss_sum):
            counts.zero_()
        return closed


def to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def bins(logits: Tensor) -> Tensor:
    """The bin of each logit, i64, never decreasing in the logit. NaN goes to the middle; the log loss shows it."""
    wide = logits.double().nan_to_num(0.0)
    share = 0.5 + 0.5 * wide / (HALF_RANGE + wide.abs())
    return (share * NUM_BINS).long().clamp_(0, NUM_BINS - 1)


def area_under_curve(negatives: Tensor, positives: Tensor) -> float | None:
    """Share of (negative, positive) pairs in the right order, pairs of one bin counting half; f64 counts by ascending bin."""
    num_pairs = negatives.sum() * positives.sum()
    if num_pairs == 0:
        return None
    below = negatives.cumsum(0) - negatives
    return float((positives * (below + negatives / 2)).sum() / num_pairs)
