"""Hands each sample's predictions to a receiver, in the order of the samples, instead of counting them."""

from typing import Any, Protocol

from torch import Tensor

from rowcast.runtime.arrays import F32
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.evaluate import to_host
from rowcast.trainer.models.runner import Runner, StepRunner
from rowcast.trainer.models.shared_runner import SharedRunner


class Scores(Protocol):
    def begin(self, name: str) -> None:
        """Drops what an earlier attempt has written. `name`: what a score is, such as "logit". Raises ConfigError."""

    def write(self, scores: F32) -> None:
        """Takes the scores [B], or [B, T] with several labels, of the next samples."""


class Scoring(Runner):
    """The scores of issued steps are on their way to the host."""

    trains = False
    needs_labels = False

    def __init__(self, scores: Scores, *arguments: Any) -> None:
        """`arguments`: of the other runner that a class is made of."""
        super().__init__(*arguments)
        self._scores = scores
        self._steps: dict[int, list[Tensor]] = {}
        scores.begin(self._side.score_name)

    def count(self, step: int, outputs: Any, labels: Tensor, part: int = 0) -> None:
        """Raises ConfigError if the model's outputs are not numbers for each of the `labels`."""
        logits = self._side.logits(outputs)
        if not isinstance(logits, Tensor) or logits.shape != labels.shape:
            found = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else f"type {type(logits).__name__}"
            raise ConfigError(
                f"the model's outputs have {found}, which are no scores; give the model a method logits(outputs) that "
                f"returns shape {list(labels.shape)}"
            )
        self._steps.setdefault(step, []).append(to_host(logits.float()))

    def completed(self, step: int) -> None:
        super().completed(step)
        for part in self._steps.pop(step):
            self._scores.write(part.numpy())


class ScoringRunner(Scoring, StepRunner):
    """For whole batches."""


class SharedScoringRunner(Scoring, SharedRunner):
    """For a trainer of several parts."""
