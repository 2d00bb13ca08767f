"""Manages the checkpoints of a run directory: finds the newest valid one and removes files that are no longer needed.

A file is removed only when no kept manifest names it: files of a base outlive the checkpoint in whose folder they are.
A checkpoint's manifest is removed first, so that there is never a manifest whose files are gone. Several ranks write to
one folder; only rank 0 removes what others wrote (`commit.py`).

A fresh run replaces an earlier one only once it has a checkpoint:

    <run_dir>/checkpoints            the earlier run          ->  -                    ->  the fresh run
              .checkpoints.new       the fresh run            ->  the fresh run        ->  -
              .checkpoints.replaced  -                        ->  the earlier run      ->  -
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from rowcast.prefetcher.checkpoints.own_shard import ALONE, OwnShard
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
from rowcast.runtime.shard_file import shard_name, writer_of

CheckpointFile = RowFile | DenseFile
FOLDER = "checkpoints"
# the reason of a checkpoint made from a file or another run: this run has not trained anything yet
IMPORT = "import"


class FolderLog(Protocol):
    def warning(self, event: str, *args: Any, **kw: Any) -> object: ...


def carry_out(steps: Steps) -> None:
    """Carries out all steps at once. Raises RowcastError if the disk fails."""
    try:
        for _ in steps:
            pass
    except OSError as error:
        raise RowcastError(
            f"{error.filename}: files of an earlier run cannot be cleaned up ({error.strerror}); repair this by hand"
        ) from None


class Checkpoints:
    """`<run_dir>/checkpoints`. Methods that return steps change files, one per step; the others only read."""

    def __init__(self, run_dir: Path, disk: Disk) -> None:
        self.disk = disk
        self._run_dir = run_dir
        current = run_dir / FOLDER
        # a link stays, whatever it points to
        self.root = self._current = current.resolve() if current.is_symlink() else current
        self._new, self._earlier = beside(self._current)

    # an earlier run and a fresh one

    def settle(self, log: FolderLog) -> Steps:
        """Finishes or removes what a killed fresh run has left: it replaces the earlier run if it had a checkpoint of
        its own training, and is removed if not. The process that holds the run directory must call it first."""
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
        """Whether these are a fresh run's checkpoints, which have yet to replace an earlier run's."""
        return self.root == self._new

    def replaced_run_id(self) -> str:
        """The run id of the earlier run that these will replace; "" if there is none or none is readable."""
        earlier = Checkpoints(self._run_dir, self.disk)
        manifests = (earlier.readable(name) for name in earlier.candidates()) if self.are_fresh else iter(())
        return next((manifest.run_id for manifest in manifests if manifest is not None), "")

    def begin_fresh(self, shard: OwnShard = ALONE) -> Steps:
        """Makes these the checkpoints of a fresh run, which has none yet. The earlier run's stay as they are. Only rank
        0 calls it; the others see the folder. Raises ConfigError if they could not be replaced."""
        if self._current.is_mount():
            raise ConfigError(
                f"{self._current} is a mount point, which a fresh run cannot replace; mount {self._run_dir} instead"
            )
        self.root = self._new
        if self._new.exists():
            self.disk.remove_tree(self._new)
            yield True
        if shard.count > 1:
            self.disk.mkdir(self._new)
            yield True

    def take_over(self) -> Steps:
        """Called once the run has a durable checkpoint: a fresh run then replaces the earlier one."""
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
            return None  # each damaged one was logged as a warning

    def _replace_earlier(self) -> Steps:
        complete = self._run_dir / COMPLETE
        if self._current.exists():
            yield from self._rename(self._current, self._earlier)
        if complete.exists():
            self.disk.unlink(complete)
            yield True
            self.disk.sync_folder(complete.parent)  # before the rename: the mark must not apply to the fresh run
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
        """Names of folders that hold a manifest, newest first. The manifests may be damaged."""
        return [folder.name for folder in self._folders(self.root) if (folder / MANIFEST_NAME).exists()]

    def load(self, name: str) -> Manifest:
        """Raises DataError if the manifest is missing or damaged."""
        return read_manifest(self.root / name)

    def verify(self, manifest: Manifest, whole: set[CheckpointFile] | None = None) -> None:
        """Reads every file. Raises DataError for the first damaged one. Skips files in `whole`, and adds to it."""
        for file in manifest.files:
            if whole is None or file not in whole:
                checked_file(self.root, file)
            if whole is not None:
                whole.add(file)

    def newest_valid(self, log: FolderLog) -> Manifest | None:
        """Returns the newest undamaged checkpoint, or None if there is none at all. Warns of damaged ones.

        Raises DataError if all are damaged: starting again from step 0 is for a person to decide.
        """
        names, whole, damages = self.candidates(), set[CheckpointFile](), list[str]()
        for name in names:
            try:
                manifest = self.load(name)
                self.verify(manifest, whole)
            except DataError as error:
                damages.append(str(error))
                log.warning("checkpoint is damaged; trying an older one", checkpoint=name, damage=str(error))
            else:
                return manifest
        if names:
            raise DataError(
                f"{self.root}: none of {len(names)} checkpoints is whole ({damages[0]}); restore them from a copy, "
                "or add --fresh for a new run, whose first checkpoint replaces them"
            )
        return None

    def choose(self, name: str | None, log: FolderLog) -> Manifest:
        """Returns the checkpoint of that name, without checking its files; by default the newest valid one. Raises
        ConfigError if there is none."""
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

    def newest_for_ranks(self, known: Manifest | None, log: FolderLog) -> Manifest | None:
        """Like `newest_valid`, for one of several ranks: looks whether a fresh run is under way, and for checkpoints
        that others have made. Does not read the files of `known`, the newest that this process knows, again."""
        self.root = self._new if self._new.exists() else self._current
        names = self.candidates()
        newest = self.readable(names[0]) if names else None
        if known is not None and newest is not None and newest.checksum == known.checksum:
            return known
        return self.newest_valid(log)

    def committed(self, name: str, replaced: Manifest | None) -> Manifest | None:
        """Returns the manifest of that name that rank 0 has written, where a fresh run has then replaced the earlier
        one. None while there is none but `replaced`, which was there before."""
        try:
            manifest = read_manifest(self._current / name)
        except DataError:
            return None
        is_new = replaced is None or manifest.checksum != replaced.checksum
        return manifest if is_new else None

    def taken_over(self) -> None:
        """Rank 0 has done what `take_over` does."""
        self.root = self._current

    def withdraw(self, shard: OwnShard) -> Steps:
        """Removes what this rank has said about checkpoints that never were. Must be called before an attempt begins,
        while the writer of the attempt before is not busy."""
        for folder in (*self._folders(self._current), *self._folders(self._new)):
            path = folder / shard_name(shard.number)
            if path.exists():
                self.disk.unlink(path)
                yield True

    def keep(self, n: int, newest: Manifest, shard: OwnShard = ALONE) -> Steps:
        """Drops all but `newest`, the n - 1 before it and damaged ones; then removes files that no manifest names.
        Where there are several ranks, only rank 0 calls it, and others may write to the folder of `newest` and later
        ones."""
        older = (self.readable(name) for name in self.candidates() if name < newest.name)
        kept = {newest.name, *[manifest.name for manifest in older if manifest is not None][: n - 1]}
        for name in self.candidates():
            if name not in kept:
                self.disk.unlink(self.root / name / MANIFEST_NAME)
                crash_point("old manifest removed")
                yield True
                self.disk.sync_folder(self.root / name)
                yield True
        named, unclear = self._named()
        for folder in self._folders(self.root):
            if folder.name not in unclear and (shard.count == 1 or folder.name < newest.name):
                yield from self._clean(folder, named, ALONE)

    def collect_garbage(self, shard: OwnShard = ALONE, current: str = "") -> Steps:
        """Removes files that no manifest names, and empty folders, before the first checkpoint of an attempt. Where
        there are several ranks, that is in the folder `current`: there each removes its own files, and rank 0 all
        else."""
        named, unclear = self._named()
        for folder in self._folders(self.root):
            is_shared = shard.count > 1 and folder.name == current
            if folder.name not in unclear and (is_shared or shard.number == 0):
                yield from self._clean(folder, named, shard if is_shared else ALONE)

    def _named(self) -> tuple[set[str], set[str]]:
        """Returns the files that manifests name, and the folders of damaged ones, which may name any of their files."""
        names = self.candidates()
        manifests = [self.readable(name) for name in names]
        named = {file.file for manifest in manifests if manifest is not None for file in manifest.files}
        return named, {name for name, manifest in zip(names, manifests, strict=True) if manifest is None}

    def _clean(self, folder: Path, named: set[str], shard: OwnShard) -> Steps:
        entries = sorted(folder.iterdir())
        left_over = [
            entry
            for entry in entries
            if entry.name != MANIFEST_NAME
            and f"{folder.name}/{entry.name}" not in named
            and writer_of(entry.name, shard.count) == shard.number
        ]
        if len(left_over) == len(entries) and shard.count == 1:
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

    def readable(self, name: str) -> Manifest | None:
        """The manifest of that name; None if there is none or it is damaged."""
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
