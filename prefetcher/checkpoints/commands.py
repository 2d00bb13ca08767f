"""`rowcast export`, `import` and `verify`."""

from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Option

from rowcast.job.file import load_job
from rowcast.prefetcher.checkpoints.export import export_run, export_start
from rowcast.prefetcher.checkpoints.folder import Checkpoints, Examined
from rowcast.prefetcher.checkpoints.import_checkpoint import import_run
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.command_options import CheckpointName, Config, Overrides, RunFolder
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.telemetry.format_numbers import human_bytes, stdout_console
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
            help="A run directory, or a safetensors file as `rowcast export` writes it.",
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
    """Prints a line per checkpoint, newest first, or for `checkpoint` only. Returns the exit code: 4 for damage."""
    checkpoints = Checkpoints(run_dir, Disk())
    names = checkpoints.back_from(checkpoint or "")
    found = list(checkpoints.examined(names[:1] if checkpoint else names))
    damages = [damage for _, _, damage in found if damage]
    console = stdout_console()
    console.print(table_of(found))
    for damage in damages:
        console.print(damage, soft_wrap=True, markup=False)
    return DataError.exit_code if damages else 0


def table_of(found: list[Examined]) -> Table:
    table = Table("checkpoint", box=None, padding=(0, 2, 0, 0))
    for heading in ("step", "train steps", "shards", "layers", "rows", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    best = next((manifest.best for _, manifest, _ in found if manifest is not None), "")
    for name, manifest, damage in found:
        state = "damaged" if damage else "whole"
        table.add_row(name, *facts_of(manifest), f"{state}, best" if name == best else state)
    return table


def facts_of(manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return ["?"] * 6
    return [
        "none" if manifest.step is None else f"{manifest.step:,}",
        f"{manifest.train_steps:,}",
        str(len(manifest.shards)),
        str(max(len(shard.layers) for shard in manifest.shards)),
        f"{manifest.num_rows:,}",
        human_bytes(manifest.nbytes),
    ]
