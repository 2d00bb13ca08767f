"""Defines the results of a run's evaluations."""

from collections.abc import Sequence

import msgspec

from rowcast.trainer.models.evaluate import EvalResult


class TaskEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one of several labels. Values are None if outputs are not logits, or if no label is known."""

    label: str
    num_labels: int  # samples with a known label
    auc: float | None  # also None if all known labels are equal
    logloss: float | None  # mean over the known labels


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one pass over the evaluation batches."""

    train_step: int  # train steps before it
    # None if all labels are equal, or if accuracy is None; of several labels the mean of their AUCs, None if any is
    auc: float | None
    logloss: float  # the loss that is trained on, its mean over the samples
    accuracy: float | None  # None if the model's outputs are not logits; of several labels the fraction of known ones
    tasks: tuple[TaskEvaluation, ...] = ()  # of several labels, each


def evaluation(result: EvalResult, train_step: int, labels: Sequence[str]) -> Evaluation | None:
    """`labels`: their names if there are several. None without samples."""
    if result.logloss is None:
        return None
    return Evaluation(
        train_step=train_step,
        auc=result.auc,
        logloss=result.logloss,
        accuracy=result.accuracy,
        tasks=tuple(
            TaskEvaluation(label=label, num_labels=task.num_labels, auc=task.auc, logloss=task.logloss)
            for label, task in zip(labels, result.tasks, strict=True)
        ),
    )
