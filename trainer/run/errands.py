"""What a trainer is started for: to train, to evaluate a checkpoint, or to score samples with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rowcast.job.schema import Job
from rowcast.protocol.messages import Mode
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.report.report_json import Report, write_report
from rowcast.trainer.report.results import REPORT

if TYPE_CHECKING:
    from rowcast.trainer.report.score_file import ScoreFile  # imports pyarrow, which no other trainer needs


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    mode: Mode
    report: str  # its file in the run directory
    scores: "ScoreFile | None" = None  # None: evaluations have metrics

    def finish(self, run_dir: Path, report: Report) -> None:
        """Called by the first rank after the last step."""
        if report.finished and self.scores is not None:
            self.scores.finish()
        write_report(run_dir / self.report, report)


TRAIN = Errand(mode="train", report=REPORT)
EVALUATE = Errand(mode="eval", report="eval.json")


def score_to(path: Path, job: Job, *, probability: bool) -> Errand:
    """Raises ConfigError."""
    if job.ranks.count > 1:
        raise ConfigError(
            f"--scores: one trainer writes the scores, but ranks.count = {job.ranks.count}; set ranks.count = 1 and "
            f"ranks.parts = {job.ranks.num_parts}, which gives the same bits"
        )
    from rowcast.trainer.report.score_file import ScoreFile

    scores = ScoreFile(path, job.data.columns.labels, probability=probability)
    return Errand(mode="eval", report="score.json", scores=scores)
