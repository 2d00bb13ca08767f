"""What a trainer is started for: to train, to evaluate a checkpoint, or to score samples with it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rowcast.job.schema import Job
from rowcast.protocol.messages import Mode
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.evaluate import to_host
from rowcast.trainer.models.runner import EvaluationRunner, Runner, StepRunner
from rowcast.trainer.models.shared_runner import SharedEvaluationRunner, SharedRunner
from rowcast.trainer.report.report_json import Report, write_report
from rowcast.trainer.report.results import REPORT

if TYPE_CHECKING:
    from rowcast.trainer.report.score_file import ScoreFile  # imports pyarrow, which no other trainer needs


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    mode: Mode
    runner: Callable[..., StepRunner]
    shared_runner: Callable[..., SharedRunner]  # of batches in parts
    report: str  # its file in the run directory

    def finish(self, run_dir: Path, report: Report) -> None:
        """Called by the first rank after the last step."""
        write_report(run_dir / self.report, report)


TRAIN = Errand(mode="train", runner=StepRunner, shared_runner=SharedRunner, report=REPORT)
EVALUATE = Errand(mode="eval", runner=EvaluationRunner, shared_runner=SharedEvaluationRunner, report="eval.json")


class Scoring(Runner):
    """The scores of issued steps are on their way to the host."""

    trains = False
    needs_labels = False

    def __init__(self, scores: "ScoreFile", *arguments: Any) -> None:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Score(Errand):
    finish_scores: Callable[[], None]

    def finish(self, run_dir: Path, report: Report) -> None:
        if report.finished:
            self.finish_scores()
        Errand.finish(self, run_dir, report)


def score_to(path: Path, job: Job, *, probability: bool) -> Score:
    """Raises ConfigError."""
    if job.ranks.count > 1:
        raise ConfigError(
            f"--scores: one trainer writes the scores, but ranks.count = {job.ranks.count}; set ranks.count = 1 and "
            f"ranks.parts = {job.ranks.num_parts}, which gives the same bits"
        )
    from rowcast.trainer.report.score_file import ScoreFile

    file = ScoreFile(path, job.data.columns.labels, probability=probability)
    return Score(
        mode="eval",
        runner=partial(ScoringRunner, file),
        shared_runner=partial(SharedScoringRunner, file),
        report="score.json",
        finish_scores=file.finish,
    )
