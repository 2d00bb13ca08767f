"""Hands each sample's predictions to a receiver, in the order of the samples, instead of counting them."""

from typing import Any, Protocol

from torch import Tensor

from rowcast.runtime.arrays import F32
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.evaluate import to_host
from rowcast.trainer.models.runner import EvaluationRunner, StepInputs
from rowcast.trainer.models.shared_runner import SharedEvaluationRunner, SharedStep


class Scores(Protocol):
    def begin(self, name: str) -> None:
        """Drops what an earlier attempt has written. `name`: what a score is, such as "logit". Raises ConfigError."""

    def write(self, scores: F32) -> None:
        """Takes the scores [B], or [B, T] with several labels, of the next samples."""


class Pending:
    """Predictions of issued steps, on their way to the host."""

    def __init__(self, scores: Scores, name: str) -> None:
        self._scores = scores
        self._steps: dict[int, list[Tensor]] = {}
        scores.begin(name)

    def add(self, step: int, logits: Any, labels: Tensor) -> None:
        """Raises ConfigError if these are not numbers for each of the `labels`."""
        if not isinstance(logits, Tensor) or logits.shape != labels.shape:
            found = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else f"type {type(logits).__name__}"
            raise ConfigError(
                f"the model's outputs have {found}, which are no scores; give the model a method logits(outputs) that "
                f"returns shape {list(labels.shape)}"
            )
        self._steps.setdefault(step, []).append(to_host(logits.float()))

    def completed(self, step: int) -> None:
        for part in self._steps.pop(step):
            self._scores.write(part.numpy())


class ScoringRunner(EvaluationRunner):
    needs_labels = False

    def __init__(self, scores: Scores, *arguments: Any) -> None:
        """`arguments`: of `EvaluationRunner`."""
        super().__init__(*arguments)
        self._pending = Pending(scores, self._side.score_name)

    def count(self, step: StepInputs, outputs: Any) -> None:
        self._pending.add(step.step, self._side.logits(outputs), step.arrays["labels"])

    def completed(self, step: int) -> None:
        self._pending.completed(step)


class SharedScoringRunner(SharedEvaluationRunner):
    """For a trainer of several parts."""

    needs_labels = False

    def __init__(self, scores: Scores, *arguments: Any) -> None:
        """`arguments`: of `SharedEvaluationRunner`."""
        super().__init__(*arguments)
        self._pending = Pending(scores, self._side.score_name)

    def count(self, shared: SharedStep, part: int, outputs: Any) -> None:
        self._pending.add(shared.step.step, self._side.logits(outputs), shared.samples(part, "labels"))

    def completed(self, step: int) -> None:
        super().completed(step)
        self._pending.completed(step)
