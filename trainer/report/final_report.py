"""Collects a run's figures for `report.json` and its content for `report.html`, at the end."""

import os
import time
from datetime import UTC, datetime

import torch

from rowcast.job.schema import Job
from rowcast.protocol.messages import Welcome
from rowcast.runtime.telemetry.metrics import versions
from rowcast.trainer.report.charts import RunRecord
from rowcast.trainer.report.progress import History
from rowcast.trainer.report.report_json import Report, make_report
from rowcast.trainer.report.results import ResultFiles
from rowcast.trainer.step.engine import TrainerEngine


def final_report(
    engine: TrainerEngine,
    welcome: Welcome,
    results: ResultFiles,
    *,
    train_steps: int,
    met_s: float,
    first_step_s: float | None,
) -> Report:
    """Call after the engine's loop has ended.

    `met_s`, `first_step_s`: when the prefetcher connected and the first step began, by time.perf_counter(); None: no
    step."""
    end, now_s = engine.barrier.end, time.perf_counter()
    assert end is not None, "the loop ends with EndOfData"
    first_step_s = first_step_s or now_s
    return make_report(
        engine.counters,
        wall_s=now_s - first_step_s,
        startup_s=first_step_s - met_s,
        train_steps=train_steps,
        skipped_steps=len(results.skipped),
        loss=results.mean_loss,
        first_loss=results.first_loss,
        evaluations=results.evaluations,
        table_bytes=engine.slots.table_bytes,
        cache_bytes=engine.slots.cache_bytes,
        staging_bytes=engine.cache.staging_bytes,
        plans_bytes=engine.cache.plans_bytes,
        device_bytes=engine.device_bytes,
        host_bytes=end.host_bytes,
        prefetcher_waits_s={wait.reason: wait.seconds for wait in end.waits},
        tier=end.tier,
        row_copies=end.row_copies,
        threads=torch.get_num_threads(),
        pinned=engine.has_page_locked_rings,
        device=str(engine.device),
        versions=versions("torch", "numpy"),
        pids={"prefetcher": welcome.pid, "trainer": os.getpid()},
        finished=end.finished,
        stopped_by=None if end.finished else engine.barrier.stop_reason,
        ended_early=engine.loop.ended_by,
    )


def final_record(job: Job, report: Report, results: ResultFiles, history: History) -> RunRecord:
    return RunRecord(
        job=job,
        report=report,
        losses=results.losses_from(0),
        evaluations=results.evaluations,
        marks=history.marks,
        starts=history.starts,
        ended_at=datetime.now(UTC),
    )
