"""The checkpoints of a run directory: which is the newest whole one, and which files may go.

A file goes only when no manifest that is kept names it: files of a base outlive the checkpoint in whose folder they lie. A checkpoint
is dropped by its manifest first, so that at no moment there is a manifest whose files are gone.

A fresh run takes the place of an earlier one only once it has a checkpoint:

    <run_dir>/checkpoints            the earlier run          ->  -                    ->  the fresh run
              .checkpoints.new       the fresh run            ->  the fresh run        ->  -
              .checkpoints.replaced  -                        ->  the earlier run      ->  -
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from rowcast.prefetcher.checkpoints.row_files import Steps
from rowcast.runtime.checkpoint_manifest import (
    FOLDER_NAME,
    MANIFEST_NAME,
    DenseFile,
    Manifest,
    RowFile,
    beside,
    checked_file,
    read_manifest,
)
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.disk import Disk
from rowcast.runtime.errors import ConfigError, DataError, RowcastError
from rowcast.runtime.run_directory import COMPLETE

CheckpointFile = RowFile | DenseFile
FOLDER = "checkpoints"
# the reason of a checkpoint that was made from a file or another run: nothing was trained in this one yet
IMPORT = "import"


class FolderLog(Protocol):
    def warning(self, event: str, *args: Any, **kw: Any) -> object: ...


def carry_out(steps: Steps) -> None:
    """All of them at once. Raises RowcastError where the disk does not do it."""
    try:
        for _ in steps:
            pass
    except OSError as error:
        raise RowcastError(
            f"{error.filename}: what an earlier run left cannot be put in order ({error.strerror}); see to it"
        ) from None


class Checkpoints:
    """`<run_dir>/checkpoints`. Methods that return steps change files, one a step; the others only read."""

    def __init__(self, run_dir: Path, disk: Disk) -> None:
        self.disk = disk
        self._run_dir = run_dir
        current = run_dir / FOLDER
        # the link stays, whatever takes its place
        self.root = self._current = current.resolve() if current.is_symlink() else current
        self._new, self._earlier = beside(self._current)

    # an earlier run and a fresh one

    def settle(self, log: FolderLog) -> Steps:
        """What a fresh run that was killed has left: it takes the earlier run's place if it had a whole checkpoint, and is gone if it had
        none, or only the one that it began with. By the process that holds the run directory, before anything else."""
        newest = self._newest_of_fresh(log)
        if newest is not None and newest.reason != IMPORT:
            yield from self._replace_earlier()
        elif self._earlier.exists() and not self._current.exists():
            yield from self._rename(self._earlier, self._current)
        if self._new.exists() and (newest is None or newest.reason == IMPORT):
            self.disk.remove_tree(self._new)
            yield True
        yield from self._remove_earlier()

    @property
    def are_fresh(self) -> bool:
        """Whether they have yet to take the place of an earlier run's."""
        return self.root == self._new

    def replaced_run_id(self) -> str:
        """Of the earlier run, where these are a fresh one's; "" where there is none, or none that can be read."""
        earlier = Checkpoints(self._run_dir, self.disk)
        manifests = (earlier._readable(name) for name in earlier.candidates()) if self.are_fresh else iter(())
        return next((manifest.run_id for manifest in manifests if manifest is not None), "")

    def begin_fresh(self) -> Steps:
        """From now on these are the checkpoints of a fresh run, and there is none yet. The earlier run's stay as they are. Raises
        ConfigError where they could not be replaced."""
        if self._current.is_mount():
            raise ConfigError(
                f"{self._current} is a mount point, which a fresh run cannot replace; mount {self._run_dir} instead"
            )
        self.root = self._new
        if self._new.exists():
            self.disk.remove_tree(self._new)
            yield True

    def take_over(self) -> Steps:
        """The run has a durable checkpoint: where it is a fresh one, it is the run of this directory from now on."""
        if self.are_fresh:
            yield from self._replace_earlier()
            self.root = self._current
            yield from self._remove_earlier()

    def _newest_of_fresh(self, log: FolderLog) -> Manifest | None:
        fresh = Checkpoints(self._run_dir, self.disk)
        fresh.root = self._new
        try:
            return fresh.newest_valid(log)
        except DataError:
            return None  # there is a warning for each that is damaged

    def _replace_earlier(self) -> Steps:
        complete = self._run_dir / COMPLETE
        if self._current.exists():
            yield from self._rename(self._current, self._earlier)
        if complete.exists():
            self.disk.unlink(complete)
            yield True
            self.disk.sync_folder(complete.parent)  # before the rename, with which it would be said of the fresh run
            yield True
        yield from self._rename(self._new, self._current)

    def _rename(self, source: Path, target: Path) -> Steps:
        self.disk.rename(source, target)
        yield True
        self.disk.sync_folder(source.parent)
        yield True

    def _remove_earlier(self) -> Steps:
        if self._earlier.exists() and self._current.exists():
            self.disk.remove_tree(self._earlier)
            yield True

    # one run's

    def candidates(self) -> list[str]:
        """Names of folders that hold a manifest, newest first. None of them was looked into."""
        return [folder.name for folder in self._folders(self.root) if (folder / MANIFEST_NAME).exists()]

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

    def newest_valid(self, log: FolderLog) -> Manifest | None:
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
            raise DataError(
                f"{self.root}: none of {len(names)} checkpoints is whole ({damages[0]}); restore them from a copy, or add --fresh for a "
                "new run, whose first checkpoint replaces them"
            )
        return None

    def choose(self, name: str | None, log: FolderLog) -> Manifest:
        """The checkpoint of that name, whose files are not looked at; by default the newest valid one. Raises ConfigError without any."""
        if name is None:
            newest = self.newest_valid(log)
            if newest is None:
                raise ConfigError(f"{self.root.parent} holds no checkpoint; a run writes one at its end")
            return newest
        names = self.candidates()
        if name not in names:
            raise ConfigError(
                f"{self.root} holds no checkpoint {name}; there is {', '.join(reversed(names)) or 'none'}"
            )
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
        for folder in self._folders(self.root):
            if folder.name not in unclear:  # what a damaged manifest named is not known
                yield from self._clean(folder, named)

    def _clean(self, folder: Path, named: set[str]) -> Steps:
        entries = sorted(folder.iterdir())
        left_over = [
            entry for entry in entries if entry.name != MANIFEST_NAME and f"{folder.name}/{entry.name}" not in named
        ]
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

    def _folders(self, root: Path) -> Iterator[Path]:
        """Newest first."""
        if root.is_dir():
            yield from sorted(
                (path for path in root.iterdir() if FOLDER_NAME.fullmatch(path.name) and path.is_dir()), reverse=True
            )
