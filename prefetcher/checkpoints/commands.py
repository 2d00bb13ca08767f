"""`prefetcher export`, `import` and `verify`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from rowcast.job.file import load_job
from rowcast.prefetcher.checkpoints.check_files import verify_run
from rowcast.prefetcher.checkpoints.export import export_run, export_start
from rowcast.prefetcher.checkpoints.import_checkpoint import import_run
from rowcast.runtime.command_options import CheckpointName, Config, Overrides, RunFolder
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.logs import get_logger


def export(
    out: Annotated[Path, Option(help="The safetensors file to write.", metavar="FILE")],
    run_dir: Annotated[
        Path | None, Option("--run", help="The run directory.", metavar="DIR", show_default=False)
    ] = None,
    checkpoint: CheckpointName = None,
    config: Annotated[
        Path | None,
        Option(
            help="Instead of --run: the tables that a run of this job begins with.",
            metavar="job.toml",
            show_default=False,
        ),
    ] = None,
    trained_rows: Annotated[
        bool, Option("--trained-rows", help="Only the rows that were trained, with their ids.")
    ] = False,
) -> None:
    if config is not None and run_dir is None and checkpoint is None and not trained_rows:
        export_start(load_job(config), out)
        return
    if run_dir is None or config is not None:
        raise ConfigError(
            "give either --run DIR, for a checkpoint of a run, or --config job.toml, for the tables that it starts from"
        )
    manifest = export_run(run_dir, out, checkpoint, trained_only=trained_rows)
    get_logger().info("exported", file=str(out), train_steps=manifest.train_steps, bytes=out.stat().st_size)


def import_(
    config: Config,
    source: Annotated[
        Path,
        Option(
            "--from",
            help="A run directory, or a safetensors file as `prefetcher export` writes it.",
            metavar="RUN|FILE",
        ),
    ],
    overrides: Overrides = None,
    fresh: Annotated[bool, Option("--fresh", help="Replace what an earlier run left in the run directory.")] = False,
) -> None:
    manifest = import_run(load_job(config, tuple(overrides or ())), source, fresh=fresh)
    get_logger().info(
        "imported", file=str(source), checkpoint=manifest.name, rows=manifest.num_rows, bytes=manifest.nbytes
    )


def verify(run_dir: RunFolder, checkpoint: CheckpointName = None) -> int:
    return verify_run(run_dir, checkpoint)
