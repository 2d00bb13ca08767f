"""Implements `prefetcher verify`: finds damaged checkpoints of a run by reading every byte."""

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import DataError
from rowcast.runtime.telemetry.format_numbers import human_bytes, stdout_console


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    manifest: Manifest | None  # None: the manifest itself is damaged
    damage: str  # one sentence; "": nothing is damaged

    def cells(self) -> list[str]:
        manifest = self.manifest
        if manifest is None:
            facts = ["?"] * 6
        else:
            step = "none" if manifest.step is None else f"{manifest.step:,}"
            facts = [
                step,
                f"{manifest.train_steps:,}",
                str(len(manifest.shards)),
                str(max(len(shard.layers) for shard in manifest.shards)),
                f"{manifest.num_rows:,}",
                human_bytes(manifest.nbytes),
            ]
        return [self.name, *facts, "damaged" if self.damage else "whole"]


def verify_run(run_dir: Path, name: str | None) -> int:
    """Prints a line per checkpoint, newest first, or for `name` only. Returns the exit code: 4 if one is damaged."""
    checkpoints = Checkpoints(run_dir, Disk())
    names = checkpoints.back_from(name or "")
    verdicts = [Verdict(*found) for found in checkpoints.examined(names[:1] if name else names)]
    console = stdout_console()
    console.print(table_of(verdicts))
    for verdict in verdicts:
        if verdict.damage:
            console.print(verdict.damage, soft_wrap=True, markup=False)
    return DataError.exit_code if any(verdict.damage for verdict in verdicts) else 0


def table_of(verdicts: list[Verdict]) -> Table:
    table = Table("checkpoint", box=None, padding=(0, 2, 0, 0))
    for heading in ("step", "train steps", "shards", "layers", "rows", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for verdict in verdicts:
        table.add_row(*verdict.cells())
    return table
