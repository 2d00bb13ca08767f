"""Computes AUC, log loss and accuracy in bounded memory, without waiting for the device.

AUC needs the order of all predictions. Instead, positives and negatives are counted in bins of the logit; a pair within
one bin counts half, as a tie. Bins are narrow where logits usually are:

    logit            0        +-1       +-4       +-16      +-100
    width of a bin   3.1e-05  4.8e-05   1.2e-04   7.6e-04   2.1e-02

With several labels per sample, each has separate counts, of the samples where it is known. Normalised entropy is the
log loss over that of a constant prediction, the base rate (He et al. 2014).

The rank of a positive is the number of other candidates with at least its score: 0 is best. Ties and NaN count against
the model. Counts are integers, so kills, parts and ranks of a run change no bit of hit rate, NDCG and reciprocal rank.

A model's `eval_sums` gives a sum and a weight for each of its `eval_names`. They are added in f64 for each part of a
batch, and parts in the tree, so no kill and no number of ranks changes a bit of their means.

    bin    0          1 ... 1,024       1,025
    rank   negative   0 ... 1,023       1,024 and more
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Self

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from rowcast.job.schema import MAX_RANK
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import metric_text
from rowcast.trainer.models.exchanges import sum_in_order

NUM_BINS = 2**18  # 4 MiB of counts
MAY_LACK = ("num_own", "rank_bins")
SUMS = "sums."  # before each of a model's `eval_names`
Pair = Sequence[Any]  # a sum and its weight: tensors [] or numbers, also NumPy's
CPU = torch.device("cpu")
HALF_RANGE = 4.0  # half of the bins are within +- this logit


RANK_BINS = MAX_RANK + 2


class TaskEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one of several labels. Values are None if outputs are not logits, or if no label is known."""

    label: str
    num_labels: int  # samples with a known label
    auc: float | None  # also None if all known labels are equal
    logloss: float | None  # mean over the known labels
    normalized_entropy: float | None = None  # the log loss over that of the labels' base rate


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one pass over the evaluation batches."""

    train_step: int  # train steps before it
    num_samples: int = 0  # 0 in runs of earlier versions
    # None if all labels are equal, or if accuracy is None; of several labels the mean of their AUCs, None if any is
    auc: float | None
    # the loss that is trained on, its mean over the samples; None if a script recorded only ranks
    logloss: float | None
    is_own_loss: bool = False  # `logloss` is the model's own loss
    accuracy: float | None  # None if the model's outputs are not logits; of several labels the fraction of known ones
    normalized_entropy: float | None = None  # None for the model's own loss, several labels, or equal labels
    ranking: dict[str, float] = {}  # `hr@k`, `ndcg@k`, `mrr@k` for each k of eval.ranks, if the model has ranks
    means: dict[str, float | None] = {}  # sum over weight of each of the model's eval_names; None without weight
    tasks: tuple[TaskEvaluation, ...] = ()  # of several labels, each


def place_of_best(evaluations: Sequence[Evaluation]) -> int:
    """Returns the place of the first evaluation with the lowest loss, or -1 if no loss is finite."""
    losses = [math.nan if evaluation.logloss is None else evaluation.logloss for evaluation in evaluations]
    known = [place for place, loss in enumerate(losses) if math.isfinite(loss)]
    return min(known, key=losses.__getitem__, default=-1)


def end_of_patience(evaluations: Sequence[Evaluation], patience: int) -> str:
    """Returns why `eval.patience` ends training after these evaluations; "" while it does not."""
    place = place_of_best(evaluations)
    if not 0 < patience < len(evaluations) - place:
        return ""
    since = "no evaluation had a finite loss"
    if place >= 0:
        best = evaluations[place]
        loss = metric_text(best.logloss, best.num_samples)
        since = f"none had a lower loss than the one after {best.train_step} train steps, {loss}"
    return f"eval.patience = {patience}: of the last {patience} evaluations {since}"


@dataclass(frozen=True, slots=True)
class EvalCounts:
    """The counts of an evaluation so far. T is the number of labels per sample if there are several, else 0."""

    histogram: Tensor  # i64 [2, NUM_BINS] or [T, 2, NUM_BINS]: negatives, positives
    num_correct: Tensor  # i64 [] or [T]
    loss_sum: Tensor  # f64 [parts] of a batch, see `protocol/parts.py`; one if there are none
    num_samples: Tensor  # i64 []; more than in the histogram if outputs are not logits or labels are not 0 or 1
    num_own: Tensor  # i64 []: samples with the model's own loss
    rank_bins: Tensor  # i64 [RANK_BINS]
    num_labels: Tensor  # i64 [T] known labels
    task_loss_sum: Tensor  # f64 [parts, T]
    sums: Mapping[str, Tensor]  # f64 [parts, 2]: sum and weight of each of the model's eval_names

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> Self:
        sums = {name.removeprefix(SUMS): counts for name, counts in named.items() if name.startswith(SUMS)}
        return cls(**{name: counts for name, counts in named.items() if not name.startswith(SUMS)}, sums=sums)

    def result(self, train_step: int, labels: Sequence[str], cutoffs: Sequence[int]) -> Evaluation | None:
        """Reads the counts; waits for the device if they are on one. `labels`: data.columns.labels. `cutoffs`:
        eval.ranks. Returns None without samples and ranks. Raises ConfigError for invalid ranks."""
        num_samples, num_known = int(self.num_samples), self.num_labels.tolist()
        ranking = ranking_figures(self.rank_bins.tolist(), cutoffs)
        if not num_samples and not ranking:
            return None
        histograms = self.histogram.cpu().double().view(-1, 2, NUM_BINS)
        counted = histograms.sum((1, 2)).long().tolist()
        are_all = counted == (num_known or [num_samples]) and sum(counted) > 0
        aucs = [area_under_curve(*histogram) for histogram in histograms]
        mean_auc = None if None in aucs else sum(auc for auc in aucs if auc is not None) / len(aucs)
        losses = sum_in_order(self.task_loss_sum.clone()).tolist()
        logloss = sum_in_order(self.loss_sum.clone()).item() / num_samples if num_samples else None
        is_own_loss = bool(self.num_own)
        is_plain = are_all and not num_known and not is_own_loss
        tasks = []
        for label, known, positives, auc, loss, histogram in zip(
            labels, num_known, counted, aucs, losses, histograms, strict=False
        ):
            are_known, of_label = known == positives > 0, loss / max(1, known)
            tasks.append(
                TaskEvaluation(
                    label=label,
                    num_labels=known,
                    auc=auc if are_known else None,
                    logloss=of_label if are_known else None,
                    normalized_entropy=over_entropy(of_label, histogram) if are_known else None,
                )
            )
        return Evaluation(
            train_step=train_step,
            num_samples=num_samples,
            auc=mean_auc if are_all else None,
            logloss=logloss,
            is_own_loss=is_own_loss,
            accuracy=int(self.num_correct.sum()) / sum(counted) if are_all else None,
            normalized_entropy=over_entropy(logloss, histograms[0]) if is_plain and logloss is not None else None,
            ranking=ranking,
            means={name: mean(name, *sum_in_order(sums.clone()).tolist()) for name, sums in self.sums.items()},
            tasks=tuple(tasks),
        )

    def named(self) -> dict[str, Tensor]:
        counts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sums"}
        return counts | {f"{SUMS}{name}": sums for name, sums in self.sums.items()}

    def state(self) -> dict[str, Tensor]:
        """Returns the counts for a checkpoint, without optional ones that are 0."""
        saved = {name: counts for name, counts in self.named().items() if name not in MAY_LACK or counts.any()}
        return {f"metrics.{name}": counts for name, counts in saved.items() if counts.numel()}

    @classmethod
    def saved(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a checkpoint's tensors of an evaluation in progress, by name; empty if none was."""
        saved = {name: counts for name, counts in tensors.items() if name.startswith("metrics.")}
        return {name.removeprefix("metrics."): counts for name, counts in saved.items()}


class EvalMetrics:
    """Computes the metrics of consecutive evaluations."""

    def __init__(
        self, device: torch.device | None = None, parts: int = 1, num_labels: int = 0, names: Iterable[str] = ()
    ) -> None:
        """Counts on `device`; None is the CPU. `num_labels`: labels per sample if there are several. `names`: the
        model's eval_names."""
        self._begun = False
        of_each = (num_labels,) if num_labels else ()
        self.counts = EvalCounts(
            histogram=torch.zeros(*of_each, 2, NUM_BINS, dtype=torch.int64, device=device),
            num_correct=torch.zeros(of_each, dtype=torch.int64, device=device),
            loss_sum=torch.zeros(parts, dtype=torch.float64, device=device),
            num_samples=torch.zeros((), dtype=torch.int64, device=device),
            num_own=torch.zeros((), dtype=torch.int64, device=device),
            rank_bins=torch.zeros(RANK_BINS, dtype=torch.int64, device=device),
            num_labels=torch.zeros(num_labels, dtype=torch.int64, device=device),
            task_loss_sum=torch.zeros(parts, num_labels, dtype=torch.float64, device=device),
            sums={name: torch.zeros(parts, 2, dtype=torch.float64, device=device) for name in names},
        )
        self._starts = 2 * NUM_BINS * torch.arange(num_labels, device=device)  # of each label's histogram

    def update(self, outputs: Any, labels: Tensor, own_loss: Tensor | None = None, part: int = 0) -> None:
        """Counts one batch: logits f32 [B], labels f32 [B], 0 or 1, on the metrics' device. Issues work, reads nothing.

        With several labels both are [B, T], and a label may be NaN: unknown. `own_loss`: [], the batch's mean of the
        model's own loss. Outputs may then be anything and labels any numbers; samples that have a logit and a label of
        0 or 1 count for AUC and accuracy."""
        self._begun = True
        self.counts.num_samples.add_(len(labels))
        if own_loss is not None:
            self.counts.num_own.add_(len(labels))
        if labels.dim() > 1:
            self._update_tasks(outputs, labels, own_loss, part)
            return
        if own_loss is None:
            self.counts.loss_sum[part].add_(
                binary_cross_entropy_with_logits(outputs.double(), labels.double(), reduction="sum")
            )
            self._count(outputs, labels, torch.ones_like(labels, dtype=torch.int64))
            return
        self.counts.loss_sum[part].add_(own_loss.double() * len(labels))
        if isinstance(outputs, Tensor) and outputs.shape == labels.shape:
            self._count(outputs, labels, ((labels == 0) | (labels == 1)).long())

    def update_ranks(self, ranks: Tensor) -> None:
        """Counts ranks of positives, i64 of any shape. Issues work, reads nothing."""
        self._begun = True
        count_ranks(self.counts.rank_bins, ranks)

    def update_sums(self, sums: Mapping[str, Pair], part: int = 0) -> None:
        """Adds what the model's eval_sums gave for one batch. Issues work, reads nothing."""
        for name, pair in sums.items():
            for number, value in enumerate(pair):
                self.counts.sums[name][part, number].add_(value if isinstance(value, Tensor) else float(value))

    def _update_tasks(self, outputs: Any, labels: Tensor, own_loss: Tensor | None, part: int) -> None:
        self.counts.num_labels.add_((~labels.isnan()).sum(0))
        if isinstance(outputs, Tensor) and outputs.shape == labels.shape:
            counts = (labels == 0) | (labels == 1)
            losses = binary_cross_entropy_with_logits(
                outputs.double(), labels.where(counts, 0.0).double(), counts.double(), reduction="none"
            ).sum(0)
            self.counts.task_loss_sum[part].add_(losses)
            self._count(outputs, labels, counts.long())
            if own_loss is None:
                self.counts.loss_sum[part].add_(losses.sum() / labels.shape[1])
        if own_loss is not None:
            self.counts.loss_sum[part].add_(own_loss.double() * len(labels))

    def _count(self, logits: Tensor, labels: Tensor, counts: Tensor) -> None:
        """`counts`: i64 as labels, 1 for those that count and 0 for others."""
        positive = labels > 0.5
        places = bins(logits) + positive * NUM_BINS
        if labels.dim() > 1:
            places = places + self._starts
        self.counts.histogram.view(-1).index_add_(0, places.flatten(), counts.flatten())
        self.counts.num_correct.add_((((logits > 0) == positive) * counts).sum(0))

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
        """Raises ConfigError if the model's eval_names are others."""
        theirs = sorted(name.removeprefix(SUMS) for name in saved if name.startswith(SUMS))
        if theirs != sorted(self.counts.sums):
            raise ConfigError(
                f"the checkpoint is within an evaluation of a model with eval_names = {theirs}, and this one has "
                f"{sorted(self.counts.sums)}; give the model those again, or begin a new run with --from"
            )
        for name, counts in saved.items():
            self.counts.named()[name].copy_(counts)
        if "num_samples" not in saved:  # saved by a version that had logits only
            self.counts.num_samples.copy_(self.counts.histogram.sum())
        self._begun = True

    def close(self) -> EvalCounts:
        """Issues a copy of the counts to the host and starts the next evaluation.

        On a device, the result may be read once an event recorded after this call has happened."""
        closed = EvalCounts.of({name: to_host(counts) for name, counts in self.counts.named().items()})
        self.clear()
        return closed

    def clear(self) -> None:
        self._begun = False
        for counts in self.counts.named().values():
            counts.zero_()


def mean(name: str, total: float, weight: float) -> float | None:
    """Returns the mean; for `rmse`, its root."""
    if not weight:
        return None
    return math.sqrt(total / weight) if name == "rmse" else total / weight


def to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def bins(logits: Tensor) -> Tensor:
    """Returns the bin of each logit, i64, never decreasing in the logit. NaN is in the middle bin; the log loss shows
    it."""
    wide = logits.double().nan_to_num(0.0)
    share = 0.5 + 0.5 * wide / (HALF_RANGE + wide.abs())
    return (share * NUM_BINS).long().clamp_(0, NUM_BINS - 1)


def over_entropy(logloss: float, histogram: Tensor) -> float | None:
    """Returns the log loss over the entropy of the base rate; None if all labels are equal. f64 [2, NUM_BINS]."""
    counts = histogram.sum(1)
    if not counts.all():
        return None
    rates = counts / counts.sum()
    return logloss / -float((rates * rates.log()).sum())


def area_under_curve(negatives: Tensor, positives: Tensor) -> float | None:
    """Returns the fraction of (negative, positive) pairs in the right order, ties counting half; f64 counts by
    ascending bin."""
    num_pairs = negatives.sum() * positives.sum()
    if num_pairs == 0:
        return None
    below = negatives.cumsum(0) - negatives
    return float((positives * (below + negatives / 2)).sum() / num_pairs)


Sums = Callable[[Any, Tensor], Mapping[str, Pair]]  # outputs, labels -> of each name


def own_sums(model: nn.Module) -> tuple[tuple[str, ...], Sums]:
    """Returns the model's `eval_names` and `eval_sums(outputs, labels)`, checked at each call. Raises ConfigError."""
    names, sums, kind = getattr(model, "eval_names", ()), getattr(model, "eval_sums", None), type(model).__name__
    if sums is None and not names:
        return (), lambda outputs, labels: {}
    # a set has another order in each rank
    are_names = isinstance(names, list | tuple) and all(isinstance(name, str) and name for name in names)
    if not callable(sums) or not are_names or not names or len({*names}) < len(names):
        raise ConfigError(
            f"{kind}.eval_names = {names!r}: give a list of different names, and a method eval_sums(outputs, labels) "
            "that returns {name: (sum, weight)} for these"
        )
    return tuple(names), lambda outputs, labels: require_sums(
        sums(outputs, labels), names, labels.device, f"{kind}.eval_sums"
    )


def require_sums(sums: Any, names: Collection[str], device: torch.device, where: str) -> Mapping[str, Pair]:
    """Raises ConfigError if these are not a sum and a weight for each name, on the host or the device."""
    if not isinstance(sums, Mapping) or sums.keys() != {*names}:
        given = sorted(map(str, sums)) if isinstance(sums, Mapping) else type(sums).__name__
        raise ConfigError(f"{where} gave {given}; give {{name: (sum, weight)}} for {', '.join(names)}")
    for name, pair in sums.items():
        if (
            not isinstance(pair, tuple | list)
            or len(pair) != 2
            or not all(is_number(number, device) for number in pair)
        ):
            raise ConfigError(
                f"{where} gave {name!r}: {pair!r}; give a sum and its weight, numbers or tensors [] on {device}"
            )
    return sums


def is_number(value: Any, device: torch.device) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex() and value.device in (device, CPU)
    return isinstance(value, Real)  # also NumPy's


Ranks = Callable[[Any], Tensor]  # a model's outputs -> ranks of its positives, i64 [P]


def ranks_among(positives: Tensor, candidates: Tensor, is_positive: Tensor) -> Tensor:
    """Returns the rank of each positive among its candidates, i64 [P].

    positives: scores, float [P]. candidates: scores, float [P, C]. is_positive: bool [P, C], or a shape that expands to
    it; True where a candidate is the positive itself, which is left out."""
    return (~(candidates < positives[:, None]) & ~is_positive).sum(-1)


def own_ranks(model: nn.Module) -> Ranks:
    """Returns the model's `ranks(outputs)`, checked at each call. A model without that method has no positives."""
    ranks = getattr(model, "ranks", None)
    if not callable(ranks):
        return lambda outputs: torch.zeros(0, dtype=torch.int64, device="cpu")
    return lambda outputs: require_integers(ranks(outputs), f"{type(model).__name__}.ranks")


def require_integers(ranks: Any, name: str) -> Tensor:
    """Raises ConfigError if these are not ranks."""
    if not isinstance(ranks, Tensor) or ranks.dtype != torch.int64:
        returned = f"{ranks.dtype} of shape {list(ranks.shape)}" if isinstance(ranks, Tensor) else type(ranks).__name__
        raise ConfigError(f"{name} gave {returned}; give the rank of each positive as torch.int64, counted from 0")
    return ranks


def count_ranks(bins: Tensor, ranks: Tensor) -> None:
    """Adds ranks, i64 of any shape, to `bins`, i64 [RANK_BINS] on the same device. Waits for nothing."""
    places = ranks.to(bins.device).flatten().clamp(-1, MAX_RANK) + 1
    bins.index_add_(0, places, torch.ones_like(places))


def ranking_figures(bins: Sequence[int], cutoffs: Sequence[int]) -> dict[str, float]:
    """Returns HR@k, NDCG@k and MRR@k for each k of `cutoffs`, means over all positives; empty without positives.

    Each positive is alone in its list, so its ideal DCG is 1. Raises ConfigError for negative ranks."""
    negative, *counts = bins
    if negative:
        raise ConfigError(
            f"{negative} ranks of an evaluation are negative; a rank is the number of candidates that do not score "
            "less than the positive, from 0"
        )
    total = sum(counts)
    if not total:
        return {}
    figures = {}
    for k in cutoffs:
        figures[f"hr@{k}"] = sum(counts[:k]) / total
        figures[f"ndcg@{k}"] = math.fsum(count / math.log2(rank + 2) for rank, count in enumerate(counts[:k])) / total
        figures[f"mrr@{k}"] = math.fsum(count / (rank + 1) for rank, count in enumerate(counts[:k])) / total
    return figures
