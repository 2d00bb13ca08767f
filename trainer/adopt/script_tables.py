"""The job of a script's collections, and whole tables: before its run, at checkpoints and after the end.

A collection has a job of its own until `rowcast.connect` joins the jobs of several into one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import msgspec
from torch import Tensor

from rowcast.job.embedding_tables import Table
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.runtime.checkpoint_manifest import newest_checkpoint
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt import run_folder, settings, table_files
from rowcast.trainer.adopt.session import ScriptSession
from rowcast.trainer.device.cuda import choose_device


class ScriptTables:
    def __init__(self, content: dict[str, Any], job_file: Path | None, default_dir: Path | None) -> None:
        """`content`: of a job file, the user's `job_file` if there is one. Raises ConfigError."""
        self._content, self._job_file = settings.plain(content), job_file
        self._job = self._parsed(self._content)
        self._has_default_dir = job_file is None and self._job.run_dir == default_dir
        try:
            self.device = choose_device(self._job.trainer.device)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.session: ScriptSession | None = None  # once the loader has begun
        self.has_tables = True  # state_dict holds the tables
        self._is_connected = False  # to a loader
        self._is_launched = False  # the loader starts the prefetcher
        self._resumes = False  # the tables begin with the newest checkpoint in the run directory
        self._loaded: dict[str, Path] = {}  # the file that each loaded table begins with

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """One job with the tables of all, in their order. Changes none of them. Raises ConfigError."""
        if not parts:
            raise ConfigError("connect: no collection is given; give one, or several in a list")
        first, *others = parts
        for part in parts:
            part._require_unconnected()
        if not others:
            return first
        if any(part.has_job_file for part in parts):
            raise ConfigError("connect: a job file has the tables of one collection; describe several by their configs")
        names = [table.name for part in parts for table in part.job.tables]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(f"connect: table {twice[0]} is in two collections; give each table a name of its own")
        for other in others:
            for section, own in first._content.items():
                theirs = other._content.get(section)
                if section != "tables" and own != theirs:
                    raise ConfigError(
                        f"connect: collections share one job, and their {section} differs: {own} and {theirs}; give "
                        "them the same optimizer, capacity, device, seed, run_dir and job"
                    )
        content = {**first._content, "tables": [table for part in parts for table in part._content["tables"]]}
        found = cls(content, None, first._job.run_dir if first._has_default_dir else None)
        found._loaded = {name: file for part in parts for name, file in part._loaded.items()}
        return found

    @property
    def job(self) -> Job:
        return self._job

    @property
    def has_job_file(self) -> bool:
        """Whether a job file of the user describes the tables, so that its prefetcher may be running already."""
        return self._job_file is not None

    @property
    def has_run(self) -> bool:
        return run_folder.newest_run(self._job.run_dir) is not None

    def says(self, section: str, key: str) -> bool:
        """Whether the user, or the job file, has set this key of the job."""
        return key in self._content.get(section, {})

    def adopt(self, changes: Mapping[str, Any], *, is_launched: bool, resumes: bool) -> Job:
        """Adds the loader's settings to the job; `connect` calls it once. Changes nothing if it raises ConfigError."""
        if self._has_default_dir:
            run_folder.check_owner(self._job.run_dir)
        content = deepcopy(self._content)
        for name, value in settings.plain(changes).items():
            settings.set_key(content, name, value)
        self._job, self._content = self._parsed(content), content
        self._is_connected, self._is_launched, self._resumes = True, is_launched, resumes
        return self._job

    def _require_unconnected(self) -> None:
        if self._is_connected:
            raise ConfigError(
                "connect: this EmbeddingBagCollection has a loader already; make another one for another run"
            )

    def write_job_file(self) -> Path:
        """Writes the job to a file for a prefetcher. Raises ConfigError."""
        path = self._job.run_dir / settings.JOB_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._has_default_dir:
                run_folder.claim(path.parent)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self._content), indent=2))
        except OSError as error:
            raise ConfigError(f"{path}: the job cannot be written ({error.strerror}); set another run_dir") from None
        return path

    def _parsed(self, content: dict[str, Any]) -> Job:
        return parse_job(content, "EmbeddingBagCollection" if self._job_file is None else str(self._job_file))

    # whole tables

    @contextmanager
    def without_tables(self) -> Iterator[None]:
        self.has_tables = False
        try:
            yield
        finally:
            self.has_tables = True

    def weights(self, tables: Sequence[Table]) -> list[Tensor]:
        """[num_embeddings, embedding_dim] of each, mapped from a file. Before a run, loaded tables as given."""
        checkpoint = self._checkpoint()
        if checkpoint is not None:
            path = table_files.exported(self._job, "--run", str(self._job.run_dir), "--checkpoint", checkpoint)
        elif self.session is not None and self.session.train_steps:
            raise RuntimeError(
                f"after {self.session.train_steps} train steps the newest rows are on the device: the tables are "
                "whole at a checkpoint, so call state_dict() after every N-th step of connect(..., save_every=N), or "
                "after the last of the loader's epochs"
            )
        else:
            loaded = self._loaded.get(tables[0].name)
            path = loaded or table_files.exported(self._job, "--config", str(self.write_job_file()))
        return table_files.read_tables(path, tables)

    def _checkpoint(self) -> str | None:
        if self.session is not None:
            return self.session.checkpoint_here()
        folder = newest_checkpoint(self._job.run_dir) if self._resumes else None
        return None if folder is None else folder.name

    def load(self, tables: Sequence[Table], weights: Sequence[Tensor]) -> None:
        """Raises RuntimeError if the run has begun, ConfigError."""
        if self.session is not None:
            raise RuntimeError(
                "tables can be loaded only before the loader yields its first batch: from then on their rows move"
            )
        if self.has_job_file and not self._is_launched:
            raise RuntimeError(
                "the prefetcher of this job file has the tables: give it a file by `prefetcher import --from` before "
                "it is started, or let connect start it, by connect(ebc, dataset)"
            )
        self.write_job_file()
        path = table_files.loaded_file(self._job, tables)
        table_files.write_tables(path, tables, weights)
        self._loaded |= {table.name: path for table in tables}

    @property
    def begins_with_tables(self) -> bool:
        """Whether the run begins with tables that were given to load_state_dict()."""
        return bool(self._loaded)

    def loaded(self) -> Path | None:
        """The file that the run's tables begin with; of several collections, theirs in one. Raises ConfigError."""
        missing = [table.name for table in self._job.tables if table.name not in self._loaded]
        if missing and self._loaded:
            raise ConfigError(
                f"tables were loaded without {missing[0]}: load all collections of connect, or none of them"
            )
        files = set(self._loaded.values())
        if len(files) > 1:
            tables = self._job.tables
            weights = [table_files.read_tables(self._loaded[table.name], [table])[0] for table in tables]
            whole = table_files.loaded_file(self._job, tables)
            table_files.write_tables(whole, tables, weights)
            return whole
        return next(iter(files), None)
