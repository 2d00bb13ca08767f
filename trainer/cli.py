"""The `trainer` command."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rowcast.job.file import load_job, load_own_job
from rowcast.runtime.command import run_command
from rowcast.runtime.process import Signals, leave_at_once
from rowcast.runtime.telemetry.logs import setup_logging
from rowcast.trainer.run.launch import rank_in_log

app = typer.Typer(
    help="The device side of rowcast: trains the model on the steps that the prefetcher sends.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


Config = Annotated[Path, typer.Option("--config", help="The job file.", metavar="job.toml")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a key: section.key=value. Repeatable.")]
Timeline = Annotated[bool, typer.Option("--timeline", help="Record a timeline for `prefetcher timeline`.")]
LogLevel = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")]


def ended(code: int) -> int:
    """Returns `code`. Ends the process at once where it has not left the group of ranks in order: gloo's threads may
    still wait for a rank that is gone, and an orderly exit would wait for them."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        sys.stderr.flush()
        leave_at_once(code)
    return code


@app.command()
def run(
    config: Config,
    overrides: Overrides = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Begin a new run; its first checkpoint replaces the report and losses of an earlier run."
        ),
    ] = False,
    timeline: Timeline = False,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", help="Write TensorBoard event files to this folder.", metavar="DIR")
    ] = None,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> None:
    """Train. Start `prefetcher run` with the same job file, before or after; it decides how long the run is."""

    def start() -> None:
        setup_logging("trainer", log_level, log_json or None, rank_in_log(os.environ))
        job = load_own_job("trainer", config, tuple(overrides or ()))
        with Signals() as signals:
            from rowcast.trainer.run.trainer_run import run_trainer

            run_trainer(job, signals, fresh=fresh, timeline=timeline, tensorboard=tensorboard)

    raise typer.Exit(ended(run_command("trainer", start)))


@app.command()
def rates(
    out: Annotated[Path, typer.Option("--out", help="The file to write.", metavar="FILE")],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="A job whose model is measured as a whole, and exchanges if it has ranks.",
            metavar="job.toml",
            show_default=False,
        ),
    ] = None,
    num_dense: Annotated[int, typer.Option("--num-dense", min=0, help="Dense features of that job's samples.")] = 13,
    network_gbs: Annotated[
        float | None,
        typer.Option(
            "--network-gbs", help="What the network between hosts carries, in 10^9 bytes/s.", show_default=False
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of torch, as trainer.threads.")] = 1,
    overrides: Overrides = None,
) -> None:
    """Measure this device for `prefetcher predict --rates`: kernels, copies, and the host's share of a step."""

    def start() -> None:
        setup_logging("trainer", "warning", None)
        job = None if config is None else load_job(config, tuple(overrides or ()))
        from rowcast.trainer.rates.command import measure_and_say

        measure_and_say(out, device, threads, job, num_dense, network_gbs)

    raise typer.Exit(run_command("trainer", start))


@app.command(name="eval")
def evaluate(
    config: Config,
    overrides: Overrides = None,
    timeline: Timeline = False,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> None:
    """Evaluate a checkpoint of a run on its evaluation batches.

    Start `prefetcher run --eval` before or after; it chooses the checkpoint.
    """

    def start() -> None:
        setup_logging("trainer", log_level, log_json or None, rank_in_log(os.environ))
        job = load_own_job("trainer", config, tuple(overrides or ()))
        with Signals() as signals:
            from rowcast.trainer.run.trainer_run import run_trainer

            run_trainer(job, signals, timeline=timeline, mode="eval")

    raise typer.Exit(ended(run_command("trainer", start)))
