"""Implements `prefetcher run`. Reads the job file before its other imports, to refuse a bad one at once."""

import os
import sys
from collections.abc import Callable
from typing import Annotated

from typer import Option

from rowcast.job.file import load_own_job
from rowcast.runtime.command_options import (
    Config,
    LogJson,
    LogLevel,
    MaxSteps,
    Overrides,
    Source,
    Timeline,
)
from rowcast.runtime.imports import uncollected
from rowcast.runtime.process import UNTRAINED, Signals
from rowcast.runtime.run_directory import note_start, pair_folder
from rowcast.runtime.telemetry.logs import setup_logging


def run(
    config: Config,
    overrides: Overrides = None,
    max_steps: MaxSteps = None,
    fresh: Annotated[
        bool, Option("--fresh", help="Begin a new run; its first checkpoint replaces those of an earlier one.")
    ] = False,
    source: Source = None,
    timeline: Timeline = False,
    evaluate: Annotated[
        bool, Option("--eval", help="Evaluate a checkpoint, with `trainer eval`; train nothing.")
    ] = False,
    checkpoint: Annotated[str | None, Option(help="With --eval: which, such as step-000000000100.")] = None,
    unfinished_code: Annotated[
        int, Option(min=0, max=125, help="Exit with this code if the run was stopped before its end.")
    ] = 0,
    host: Annotated[int, Option(min=0, help="Several ranks on several hosts: which host this is, from 0.")] = 0,
    rank: Annotated[int | None, Option(min=0, hidden=True)] = None,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> Callable[[Signals], int]:
    def main(signals: Signals) -> int:
        signals.left_undone = UNTRAINED
        setup_logging("prefetcher", log_level, log_json or None, rank=rank)
        job = load_own_job("prefetcher", config, tuple(overrides or ()))
        count, on_host = job.ranks.count, job.ranks.on_host
        for own in range(count)[host * on_host :][:on_host] if rank is None else [rank]:
            note_start(pair_folder(job.run_dir, own, count), "prefetcher", os.getpid())
        with uncollected():
            from rowcast.prefetcher.run.attempt import run_prefetcher
            from rowcast.prefetcher.run.starting_point import RunOptions

        options = RunOptions(
            max_steps=max_steps,
            fresh=fresh,
            source=source,
            timeline=timeline,
            mode="eval" if evaluate else "train",
            checkpoint=checkpoint,
            host=host,
            rank=rank,
        )
        finished = run_prefetcher(job, options, signals, sys.argv[1:])
        return 0 if evaluate or finished else unfinished_code

    return main
