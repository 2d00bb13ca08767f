"""What a trainer is started for: to train, to evaluate a checkpoint, or to score samples with it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rowcast.job.schema import Job
from rowcast.protocol.messages import Mode
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.runner import EvaluationRunner, StepRunner
from rowcast.trainer.models.scoring import ScoringRunner, SharedScoringRunner
from rowcast.trainer.models.shared_runner import SharedEvaluationRunner, SharedRunner
from rowcast.trainer.report.report_json import Report, write_report
from rowcast.trainer.report.results import REPORT


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
    from rowcast.trainer.report.score_file import ScoreFile  # imports pyarrow, which no other trainer needs

    file = ScoreFile(path, job.data.columns.labels, probability=probability)
    return Score(
        mode="eval",
        runner=partial(ScoringRunner, file),
        shared_runner=partial(SharedScoringRunner, file),
        report="score.json",
        finish_scores=file.finish,
    )
