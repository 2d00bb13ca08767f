"""Describes the rows of a checkpoint, of a job or of a training script that has saved itself.

A script's records are f32: the weights of a row, its states, and a number that only the script's process uses. Records
of one width are one group, whatever their tables have in them, so readers see each table as a group.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from msgspec import structs

from rowcast.job.embedding_tables import ParameterTable
from rowcast.job.file import parse_job, parse_manifest_job
from rowcast.job.models import NO_MODEL
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, RecordPart, groups_at, whole_groups
from rowcast.prefetcher.stores.records import FirstColumns, FirstOf, of_seed
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.runtime.checkpoint_manifest import MANIFEST_NAME, Manifest, SavedScript, SavedTable
from rowcast.runtime.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTables:
    job: Job  # of a script: its tables, each with one feature of its name
    groups: tuple[GroupSpec, ...]  # of whole tables, as they are read
    written: tuple[GroupSpec, ...]  # as the files have them
    num_dense: int | None  # dense features of a sample; None: not known
    first: FirstOf  # of rows that no layer has
    in_files: frozenset[int]  # the tables of which `first` reads files
    on_demand: frozenset[int] = frozenset()  # those that no process holds whole


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
        first=of_seed(job.job.seed),
        in_files=frozenset(),
    )


def saved_groups(root: Path, manifest: Manifest) -> tuple[GroupSpec, ...]:
    """The groups of a checkpoint's rows, in pieces as they were written. Raises DataError."""
    try:
        return saved_tables(root, manifest).written
    except ConfigError as error:
        raise DataError(str(error)) from None


def of_script(script: SavedScript) -> SavedTables:
    written = groups_at(job_of(script, [table.width for table in script.tables]), ())
    groups = {table.index: seen(group, table.index, script.tables) for group in written for table in group.tables}
    job = job_of(script, [table.dim for table in script.tables])
    return SavedTables(
        job=job,
        groups=tuple(groups[t] for t in sorted(groups)),
        written=written,
        num_dense=0,
        first=ScriptFirst(script),
        in_files=frozenset(t for t, table in enumerate(script.tables) if any(each.files for each in table.first)),
        on_demand=frozenset(t for t, own in enumerate(script.tables) if any(each.is_on_demand for each in own.first)),
    )


class ScriptFirst:
    """Implements `FirstOf`. Files are opened when rows are read."""

    def __init__(self, script: SavedScript) -> None:
        self._tables = dict(enumerate(script.tables))

    @cached_property
    def _columns(self) -> FirstColumns:
        """Raises DataError."""
        tables = self._tables.items()
        return FirstColumns({t: own.first for t, own in tables}, {t: table.num_rows for t, table in tables})

    def __call__(self, group: GroupSpec, keys: Keys) -> Records:
        return self._columns.records(group, keys)


def job_of(script: SavedScript, widths: list[int]) -> Job:
    tables = [
        ParameterTable(
            name=table.name,
            features=[table.name],
            num_embeddings=table.num_rows,
            embedding_dim=width,
            pooling="none",
            rule=table.first[0].rule if table.first else None,
        )
        for table, width in zip(script.tables, widths, strict=True)
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
