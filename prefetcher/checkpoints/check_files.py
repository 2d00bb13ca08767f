"""Implements `prefetcher verify`: finds damaged checkpoints of a run by reading every byte."""

from pathlib import Path

from rich.table import Table

from rowcast.prefetcher.checkpoints.folder import Checkpoints, Examined
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import DataError
from rowcast.runtime.telemetry.format_numbers import human_bytes, stdout_console


def verify_run(run_dir: Path, name: str | None) -> int:
    """Prints a line per checkpoint, newest first, or for `name` only. Returns the exit code: 4 if one is damaged."""
    checkpoints = Checkpoints(run_dir, Disk())
    names = checkpoints.back_from(name or "")
    found = list(checkpoints.examined(names[:1] if name else names))
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
    for name, manifest, damage in found:
        table.add_row(name, *facts_of(manifest), "damaged" if damage else "whole")
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
