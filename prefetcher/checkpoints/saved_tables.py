"""What the rows of a checkpoint are: those of a job, or of a training script that has saved itself.

A script's records are f32: the weights of a row, its states, and a number that only the script's process uses. Records
of one width are one group, whatever their tables have in them, so readers see each table as a group.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from rowcast.job.embedding_tables import ParameterTable
from rowcast.job.file import parse_job, parse_manifest_job
from rowcast.job.models import NO_MODEL
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, RecordPart, groups_at, whole_groups
from rowcast.runtime.checkpoint_manifest import MANIFEST_NAME, Manifest, SavedScript, SavedTable
from rowcast.runtime.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTables:
    job: Job  # of a script: its tables, each with one feature of its name
    groups: tuple[GroupSpec, ...]  # of whole tables, as they are read
    written: tuple[GroupSpec, ...]  # as the files have them
    num_dense: int | None  # dense features of a sample; None: not known


def saved_tables(root: Path, manifest: Manifest) -> SavedTables:
    """Raises ConfigError if the job has keys of another rowcast."""
    if manifest.script is not None:
        return of_script(manifest.script)
    job = parse_manifest_job(manifest.job, f"{root / manifest.name}/{MANIFEST_NAME}")
    was = manifest.trained_on
    return SavedTables(
        job=job,
        groups=whole_groups(job),
        written=groups_at(job, manifest.points),
        num_dense=None if was is None or was.num_dense < 0 else was.num_dense,
    )


def saved_groups(root: Path, manifest: Manifest) -> tuple[GroupSpec, ...]:
    """The groups of a checkpoint's rows, in pieces as they were written. Raises DataError."""
    try:
        return saved_tables(root, manifest).written
    except ConfigError as error:
        raise DataError(str(error)) from None


def of_script(script: SavedScript) -> SavedTables:
    written = groups_at(job_of(script, [own.width for own in script.tables]), ())
    groups = {table.index: seen(group, table.index, script.tables) for group in written for table in group.tables}
    job = job_of(script, [own.dim for own in script.tables])
    return SavedTables(job=job, groups=tuple(groups[t] for t in sorted(groups)), written=written, num_dense=0)


def job_of(script: SavedScript, widths: list[int]) -> Job:
    tables = [
        ParameterTable(
            name=own.name, features=[own.name], num_embeddings=own.num_rows, embedding_dim=width, pooling="none"
        )
        for own, width in zip(script.tables, widths, strict=True)
    ]
    return structs.replace(parse_job(SCRIPT), tables=tables)


SCRIPT = {
    "job": {"run_dir": "-"},
    "data": {"format": "synthetic"},
    "tables": [{"name": "any", "features": ["any"], "num_embeddings": 1, "embedding_dim": 1}],
    "model": {"kind": NO_MODEL},
    "optimizer": {"sparse": {"kind": "sgd", "lr": 0.0}, "dense": {"kind": "sgd", "lr": 0.0}},
    "cache": {"capacity": "1 rows"},
}


def seen(group: GroupSpec, index: int, tables: tuple[SavedTable, ...]) -> GroupSpec:
    own = tables[index]
    fields = ("weight", *own.states)
    parts = [
        RecordPart(name=name, dtype="fp32", offset=4 * own.dim * at, width=own.dim, initial=None)
        for at, name in enumerate(fields)
    ]
    [table] = [table for table in group.tables if table.index == index]
    return replace(group, tables=(replace(table, embedding_dim=own.dim),), embedding_dim=own.dim, parts=tuple(parts))
