"""Implements `prefetcher run`, and of `rowcast` export, overlay, import, forget and verify. Each imports what it needs.

`prefetcher run` reads the job file before its other imports, to refuse a bad one at once.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

from rich.table import Table
from typer import Argument, Option

from rowcast.job.embedding_tables import RowType
from rowcast.job.file import load_job, load_own_job
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.command_options import (
    CheckpointName,
    Config,
    LogJson,
    LogLevel,
    MaxSteps,
    Overrides,
    RunFolder,
    Source,
    Timeline,
)
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.process import UNTRAINED, Signals
from rowcast.runtime.run_directory import note_start, pair_folder
from rowcast.runtime.stops import uncollected
from rowcast.runtime.telemetry.format_numbers import human_bytes, stdout_console
from rowcast.runtime.telemetry.logs import get_logger, setup_logging

if TYPE_CHECKING:
    from rowcast.prefetcher.checkpoints.folder import Examined


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
    above: Annotated[int, Option(help="--trained-rows holds for tables of more rows than this; others are whole.")] = 0,
) -> None:
    from rowcast.prefetcher.checkpoints.export import export_run, export_start

    if config is not None and run_dir is None and checkpoint is None and not trained_rows:
        export_start(load_job(config), out)
        return
    if run_dir is None or config is not None:
        raise ConfigError(
            "give either --run DIR, for a checkpoint of a run, or --config job.toml, for the tables that it starts from"
        )
    manifest = export_run(run_dir, out, checkpoint, trained_only=trained_rows, above=above)
    get_logger().info("exported", file=str(out), train_steps=manifest.train_steps, bytes=out.stat().st_size)


def overlay(
    source: Annotated[Path, Argument(help="A run directory; with --apply an overlay.", metavar="RUN|OVERLAY")],
    out: Annotated[Path, Option(help="The overlay to write; with --apply a new folder.", metavar="FILE|FOLDER")],
    dtype: Annotated[
        str | None, Option(help="fp32, fp16 or bf16: of the rows.", show_default="that of the released files")
    ] = None,
    apply: Annotated[
        Path | None, Option(help="The released files.", metavar="FOLDER", show_default="write an overlay")
    ] = None,
) -> None:
    from rowcast.prefetcher.checkpoints.overlay import apply_overlay, write_overlay

    if apply is not None:
        if dtype is not None:
            raise ConfigError("--dtype is of an overlay that is written; omit it with --apply")
        get_logger().info("applied", folder=str(out), files_with_new_rows=apply_overlay(source, apply, out))
        return
    if dtype not in (None, *get_args(RowType)):
        raise ConfigError(f"--dtype {dtype} is none of {', '.join(get_args(RowType))}")
    num_rows = write_overlay(source, out, cast(RowType | None, dtype))
    get_logger().info("overlay written", file=str(out), rows=num_rows, bytes=out.stat().st_size)


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
    from rowcast.prefetcher.checkpoints.import_checkpoint import import_run

    manifest = import_run(load_job(config, tuple(overrides or ())), source, fresh=fresh)
    get_logger().info(
        "imported", file=str(source), checkpoint=manifest.name, rows=manifest.num_rows, bytes=manifest.nbytes
    )


def forget(
    run_dir: RunFolder,
    untrained_for: Annotated[int, Option(min=1, help="Rows trained within this number of steps stay.", metavar="N")],
) -> None:
    from rowcast.prefetcher.checkpoints.forget import forget_rows

    manifest, rows = forget_rows(run_dir, untrained_for)
    later = f"rows that are not trained from here on go at a forget {untrained_for} or more train steps later"
    get_logger().info("forgotten", checkpoint=manifest.name, rows=rows, **({} if rows else {"because": later}))


def verify(run_dir: RunFolder, checkpoint: CheckpointName = None) -> int:
    """Prints a line per checkpoint, newest first, or for `checkpoint` only. Returns the exit code: 4 for damage."""
    from rowcast.prefetcher.checkpoints.folder import Checkpoints

    checkpoints = Checkpoints(run_dir, Disk())
    names = checkpoints.back_from(checkpoint or "")
    found = list(checkpoints.examined(names[:1] if checkpoint else names))
    damages = [damage for _, _, damage in found if damage]
    console = stdout_console()
    console.print(table_of(found))
    for damage in damages:
        console.print(damage, soft_wrap=True, markup=False)
    return DataError.exit_code if damages else 0


def table_of(found: "list[Examined]") -> Table:
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
