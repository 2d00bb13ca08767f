"""Defines the results of a run's evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rowcast.job.schema import Job
from rowcast.trainer.models.evaluate import EvalResult, ranking_figures


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
    # None if all labels are equal, or if accuracy is None; of several labels the mean of their AUCs, None if any is
    auc: float | None
    # the loss that is trained on, its mean over the samples; None if a script recorded only ranks
    logloss: float | None
    is_own_loss: bool = False  # `logloss` is the model's own loss
    accuracy: float | None  # None if the model's outputs are not logits; of several labels the fraction of known ones
    normalized_entropy: float | None = None  # None for the model's own loss, several labels, or equal labels
    ranking: dict[str, float] = {}  # `hr@k`, `ndcg@k`, `mrr@k` for each k of eval.ranks, if the model has ranks
    tasks: tuple[TaskEvaluation, ...] = ()  # of several labels, each


@dataclass(frozen=True, slots=True)
class EvaluationFigures:
    """Makes an evaluation's figures from its counts, with the job's names and settings."""

    labels: Sequence[str]  # data.columns.labels
    cutoffs: Sequence[int]  # eval.ranks

    @classmethod
    def of_job(cls, job: Job) -> "EvaluationFigures":
        return cls(labels=job.data.columns.labels, cutoffs=job.eval.ranks)

    def evaluation(self, result: EvalResult, train_step: int) -> Evaluation | None:
        """Returns None without samples and ranks. Raises ConfigError for ranks that are none."""
        ranking = ranking_figures(result.rank_bins, self.cutoffs)
        if result.logloss is None and not ranking:
            return None
        return Evaluation(
            train_step=train_step,
            auc=result.auc,
            logloss=result.logloss,
            is_own_loss=result.is_own_loss,
            accuracy=result.accuracy,
            normalized_entropy=result.normalized_entropy,
            ranking=ranking,
            tasks=tuple(
                TaskEvaluation(
                    label=label,
                    num_labels=task.num_labels,
                    auc=task.auc,
                    logloss=task.logloss,
                    normalized_entropy=task.normalized_entropy,
                )
                for label, task in zip(self.labels, result.tasks, strict=True)
            ),
        )
