"""The `prefetcher` command."""

from pathlib import Path
from typing import Annotated

import typer

from protocol.command import run_command
from protocol.job_file import load_job
from protocol.process import Signals
from protocol.telemetry.logs import get_logger, setup_logging

app = typer.Typer(
    help="The CPU side of rowcast: reads the coming batches, plans, and streams rows to the trainer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path, typer.Option("--config", help="The job file.", metavar="job.toml")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a key: section.key=value. Repeatable.")]
LogLevel = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")]


@app.command()
def run(
    config: Config,
    overrides: Overrides = None,
    max_steps: Annotated[int | None, typer.Option("--max-steps", min=0, help="End the run after so many train steps.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Empty the run directory of an earlier run.")] = False,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> None:
    """Serve one training run. Start `trainer run` with the same job file, before or after."""

    def main() -> None:
        setup_logging("prefetcher", log_level, log_json or None)
        job = load_job(config, tuple(overrides or ()))
        with Signals() as signals:
            from prefetcher.service import run_prefetcher

            run_prefetcher(job, max_steps, signals, fresh=fresh)

    raise typer.Exit(run_command("prefetcher", main))


@app.command()
def export(
    run_dir: Annotated[Path, typer.Option("--run", help="The run directory.", metavar="DIR")],
    out: Annotated[Path, typer.Option("--out", help="The safetensors file to write.", metavar="FILE")],
) -> None:
    """Write the newest checkpoint of a run as one safetensors file: tables, row state, dense weights."""

    def main() -> None:
        from prefetcher.export import export_run

        manifest = export_run(run_dir, out, lambda table: get_logger().info("table", name=table))
        get_logger().info("exported", file=str(out), train_steps=manifest.train_steps, bytes=out.stat().st_size)

    raise typer.Exit(run_command("prefetcher", main))
