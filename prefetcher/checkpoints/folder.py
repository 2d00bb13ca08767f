"""The checkpoints of a run directory: which is the newest whole one, and which files may go.

A file goes only when no manifest that is kept names it: files of a base outlive the checkpoint in whose folder they lie. A checkpoint
is dropped by its manifest first, so that at no moment there is a manifest whose files are gone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from prefetcher.checkpoints.row_files import Steps
from protocol.disk import Disk
from protocol.errors import ConfigError, DataError
from protocol.faults import crash_point
from protocol.manifest import FOLDER_NAME, MANIFEST_NAME, DenseFile, Manifest, RowFile, checked_file, read_manifest

CheckpointFile = RowFile | DenseFile


class Log(Protocol):
    def warning(self, event: str, *args: Any, **kw: Any) -> object: ...


class Checkpoints:
    """`<run_dir>/checkpoints`. Methods that return steps change files, one a step; the others only read."""

    def __init__(self, run_dir: Path, disk: Disk) -> None:
        self.disk = disk
        self.root = run_dir / "checkpoints"

    def candidates(self) -> list[str]:
        """Names of folders that hold a manifest, newest first. None of them was looked into."""
        return [folder.name for folder in self._folders() if (folder / MANIFEST_NAME).exists()]

    def load(self, name: str) -> Manifest:
        """Raises DataError where the manifest is missing or damaged."""
        return read_manifest(self.root / name)

    def verify(self, manifest: Manifest, whole: set[CheckpointFile] | None = None) -> None:
        """Reads every file; raises DataError for the first that is damaged. Files in `whole` are known to be whole, and added to it."""
        for file in manifest.files:
            if whole is None or file not in whole:
                checked_file(self.root, file)
            if whole is not None:
                whole.add(file)

    def newest_valid(self, log: Log) -> Manifest | None:
        """The newest checkpoint that is whole, None where there is no checkpoint at all. A damaged one is a warning.

        Raises DataError where there are checkpoints and all are damaged: to begin again at step 0 is for a person to decide.
        """
        names, whole, damages = self.candidates(), set[CheckpointFile](), list[str]()
        for name in names:
            try:
                manifest = self.load(name)
                self.verify(manifest, whole)
            except DataError as error:
                damages.append(str(error))
                log.warning("checkpoint is damaged, an older one is tried", checkpoint=name, damage=str(error))
            else:
                return manifest
        if names:
            raise DataError(f"{self.root}: none of {len(names)} checkpoints is whole ({damages[0]}); add --fresh to start over")
        return None

    def choose(self, name: str | None, log: Log) -> Manifest:
        """The checkpoint of that name, whose files are not looked at; by default the newest valid one. Raises ConfigError without any."""
        if name is None:
            newest = self.newest_valid(log)
            if newest is None:
                raise ConfigError(f"{self.root.parent} holds no checkpoint; a run writes one at its end")
            return newest
        names = self.candidates()
        if name not in names:
            raise ConfigError(f"{self.root} holds no checkpoint {name}; there is {', '.join(reversed(names)) or 'none'}")
        return self.load(name)

    def keep(self, n: int, newest: Manifest) -> Steps:
        """Drops all but `newest` and the n - 1 before it, and what was found damaged; then every file that nobody names."""
        older = (self._readable(name) for name in self.candidates() if name < newest.name)
        kept = {newest.name, *[manifest.name for manifest in older if manifest is not None][: n - 1]}
        for name in self.candidates():
            if name not in kept:
                self.disk.unlink(self.root / name / MANIFEST_NAME)
                crash_point("old manifest removed")
                yield True
                self.disk.sync_folder(self.root / name)
                yield True
        yield from self.collect_garbage()

    def collect_garbage(self) -> Steps:
        """Removes files that no manifest names, and folders that are left with none. Not while a checkpoint is being written."""
        if not self.root.is_dir():
            return
        names = self.candidates()
        manifests = [self._readable(name) for name in names]
        named = {file.file for manifest in manifests if manifest is not None for file in manifest.files}
        unclear = {name for name, manifest in zip(names, manifests, strict=True) if manifest is None}
        for folder in self._folders():
            if folder.name not in unclear:  # what a damaged manifest named is not known
                yield from self._clean(folder, named)

    def _clean(self, folder: Path, named: set[str]) -> Steps:
        entries = sorted(folder.iterdir())
        left_over = [entry for entry in entries if entry.name != MANIFEST_NAME and f"{folder.name}/{entry.name}" not in named]
        if len(left_over) == len(entries):
            self.disk.remove_tree(folder)
            yield True
            return
        for entry in left_over:
            if entry.is_dir() and not entry.is_symlink():
                self.disk.remove_tree(entry)
            else:
                self.disk.unlink(entry)
            crash_point("garbage removed")
            yield True

    def _readable(self, name: str) -> Manifest | None:
        try:
            return self.load(name)
        except DataError:
            return None

    def _folders(self) -> Iterator[Path]:
        """Newest first."""
        if self.root.is_dir():
            yield from sorted((path for path in self.root.iterdir() if FOLDER_NAME.fullmatch(path.name) and path.is_dir()), reverse=True)
