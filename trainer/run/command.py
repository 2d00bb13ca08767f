"""Implements `trainer run` and `trainer eval`. Reads the job file before importing torch, to refuse a bad one at
once."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from typer import Option

from rowcast.job.file import load_own_job
from rowcast.job.schema import Job
from rowcast.runtime.command_options import Config, LogJson, LogLevel, Overrides, Probability, TensorBoard, Timeline
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.process import Signals, run_until_stopped, stop_with_parent
from rowcast.runtime.run_directory import note_start, pair_folder
from rowcast.runtime.stops import leave_at_once, uncollected
from rowcast.runtime.telemetry.logs import setup_logging
from rowcast.trainer.run.launch import rank_in_log, read_launch


def run_until_left(process: str, main: Callable[[Signals], int | None]) -> int:
    """Runs `main`. If the process did not leave the group of ranks in order, ends it at once: gloo's threads may still
    wait for a lost rank, and an orderly exit would wait for them."""
    code = run_until_stopped(process, main)
    distributed, joining = map(sys.modules.get, ("torch.distributed", "rowcast.trainer.run.meeting"))
    has_joined = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if has_joined or (joining is not None and joining.is_joining()):
        sys.stderr.flush()
        leave_at_once(code)
    return code


def begin(config: Path, overrides: list[str] | None, log_level: str, log_json: bool) -> Job:
    launch = read_launch(os.environ)
    if launch.has_agent:
        stop_with_parent(os.getppid())  # torchrun, which cannot notify its trainers if it is killed
    setup_logging("trainer", log_level, log_json or None, rank_in_log(os.environ))
    job = load_own_job("trainer", config, tuple(overrides or ()))
    note_start(pair_folder(job.run_dir, launch.rank, launch.world_size), "trainer", os.getpid())
    return job


def run(
    config: Config,
    overrides: Overrides = None,
    fresh: Annotated[
        bool,
        Option(
            "--fresh", help="Begin a new run; its first checkpoint replaces the report and losses of an earlier run."
        ),
    ] = False,
    timeline: Timeline = False,
    tensorboard: TensorBoard = None,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> Callable[[Signals], None]:
    def main(signals: Signals) -> None:
        job = begin(config, overrides, log_level, log_json)
        with uncollected():
            from rowcast.trainer.run.attempt import TrainerRun

        TrainerRun(job, signals, fresh=fresh, timeline=timeline, tensorboard=tensorboard).run()

    return main


def evaluate(
    config: Config,
    overrides: Overrides = None,
    timeline: Timeline = False,
    scores: Annotated[
        Path | None,
        Option(help="Write a score for each evaluation sample to this new file.", metavar="FILE.csv|FILE.parquet"),
    ] = None,
    probability: Probability = False,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> Callable[[Signals], None]:
    def main(signals: Signals) -> None:
        if probability and scores is None:
            raise ConfigError("--probability says what --scores writes; add --scores, or leave it out")
        job = begin(config, overrides, log_level, log_json)
        with uncollected():
            from rowcast.trainer.run.attempt import EVALUATE, TrainerRun, score_to

        errand = EVALUATE if scores is None else score_to(scores, job, probability=probability)
        TrainerRun(job, signals, timeline=timeline, errand=errand).run()

    return main
