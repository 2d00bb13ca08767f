"""Holds the content of a run report."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rowcast.job.schema import Job
from rowcast.runtime.arrays import F32
from rowcast.trainer.report.history import HistoryMark
from rowcast.trainer.report.report_json import Report
from rowcast.trainer.step.results import Evaluation


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    job: Job
    report: Report
    losses: F32  # one per train step of the whole run
    evaluations: Sequence[Evaluation]  # those of the whole run
    marks: Sequence[HistoryMark]  # of this process
    starts: Sequence[int]  # train steps of the run before each attempt of this process
    ended_at: datetime  # UTC
