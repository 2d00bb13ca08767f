"""Finds the newest valid checkpoint of a run directory and removes files that are no longer needed.

A file is removed only when no kept manifest names it: files of a base outlive the checkpoint in whose folder they are.
A checkpoint's manifest is removed first, so no manifest ever names a missing file. Several ranks write to one folder;
only rank 0 removes other ranks' files (`commit.py`).

Only files that this run certainly wrote are removed: those with a name of `OWN_NAME`, and empty folders. A link, and a
folder with any other entry or of a different run, stay with all their content.

A fresh run replaces an earlier run once it has a checkpoint:

    <run_dir>/checkpoints            the earlier run          ->  -                    ->  the fresh run
              .checkpoints.new       the fresh run            ->  the fresh run        ->  -
              .checkpoints.replaced  -                        ->  the earlier run      ->  -
              checkpoints.left-1     -                        ->  -                    ->  what others put in it
"""

import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.checkpoints.restore import ALONE, OwnShard
from rowcast.prefetcher.checkpoints.row_files import NEW_NAME, Steps, read_rows
from rowcast.prefetcher.checkpoints.saved_tables import saved_groups
from rowcast.prefetcher.stores.records import FiniteRows
from rowcast.runtime.checkpoint_manifest import (
    FOLDER_NAME,
    MANIFEST_NAME,
    SHARD_NAME,
    DenseFile,
    Manifest,
    RowFile,
    beside,
    checked_file,
    checkpoint_folders,
    read_manifest,
    readable,
    run_of,
    shard_name,
    writer_of,
)
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.disk import Disk, is_own_file, own_files_in
from rowcast.runtime.errors import ConfigError, DataError, RowcastError, Unreadable
from rowcast.runtime.run_directory import COMPLETE
from rowcast.runtime.telemetry.logs import get_logger

CheckpointFile = RowFile | DenseFile
Examined = tuple[str, Manifest | None, str]  # a checkpoint, None if its manifest is damaged; what is damaged, or ""
FOLDER = "checkpoints"
INTERVAL_NAME = re.compile(r"interval\.json(?:\.partial)?")  # earlier versions wrote it
OWN_NAME = re.compile(rf"{NEW_NAME}|(?:{SHARD_NAME}|{re.escape(MANIFEST_NAME)})(?:\.partial)?")
# the reason of a checkpoint made from a file or another run: this run has not trained anything yet
IMPORT = "import"


def carry_out(steps: Iterable[bool]) -> None:
    """Carries out all steps at once. Raises RowcastError if the disk fails."""
    try:
        for _ in steps:
            pass
    except OSError as error:
        raise RowcastError(
            f"{error.filename}: what an earlier process has left cannot be cleaned up ({error.strerror}); "
            "let this user write there and start again"
        ) from None


NOT_REMOVED = "old checkpoints could not be removed; the next checkpoint, or the next start, tries again"


def softly(steps: Steps) -> Generator[bool, None, bool]:
    """Carries out steps that only remove something. Returns whether all succeeded; warns of a failure."""
    try:
        yield from steps
    except OSError as error:
        get_logger().warning(NOT_REMOVED, path=error.filename, error=error.strerror)
        return False
    except Unreadable as error:
        get_logger().warning(NOT_REMOVED, error=str(error))
        return False
    return True


class Checkpoints:
    """`<run_dir>/checkpoints`. Methods that return steps change files, one per step; the others only read."""

    def __init__(self, run_dir: Path, disk: Disk) -> None:
        self.disk = disk
        self._run_dir = run_dir
        self._warned: set[Path] = set()  # of folders that stay
        self._unsynced: set[Path] = set()  # folders whose removed manifest may reappear after a power loss
        current = run_dir / FOLDER
        # a link stays, whatever its target
        self.root = self._current = current.resolve() if current.is_symlink() else current
        self._new, self._earlier = beside(self._current)

    # an earlier run and a fresh run

    def settle(self) -> Steps:
        """Finishes or removes what a killed fresh run left: with a checkpoint of its training it replaces the earlier
        run, else it is removed. The process that holds the run directory must call this first."""
        newest = self._newest_of_fresh()
        if newest is not None and newest.reason != IMPORT:
            yield from self._replace_earlier()
        elif self._earlier.exists() and not self._current.exists():
            yield from self._rename(self._earlier, self._current)
        if newest is None or newest.reason == IMPORT:
            yield from self._clear(self._new)
        yield from softly(self.remove_earlier())

    @property
    def are_fresh(self) -> bool:
        """Whether these are a fresh run's checkpoints and an earlier run's are still there."""
        return self.root == self._new

    def replaced_run_id(self) -> str:
        """The run id of the earlier run that these will replace; "" if there is none or none is readable."""
        earlier = Checkpoints(self._run_dir, self.disk)
        manifests = (earlier.readable(name) for name in earlier.candidates()) if self.are_fresh else iter(())
        return next((manifest.run_id for manifest in manifests if manifest is not None), "")

    def begin_fresh(self, shard: OwnShard = ALONE) -> Steps:
        """Makes these the checkpoints of a fresh run, which has none yet. The earlier run's stay. Only rank 0 calls it;
        the other ranks see the folder. Raises ConfigError if the earlier ones could not be replaced."""
        if self._current.is_mount():
            raise ConfigError(
                f"{self._current} is a mount point, which a fresh run cannot replace; mount {self._run_dir} instead"
            )
        self.root = self._new
        yield from self._clear(self._new)
        if shard.count > 1:
            self.disk.mkdir(self._new)
            yield True

    def take_over(self) -> Steps:
        """Makes a fresh run replace the earlier one. Called once it has a durable checkpoint; `remove_earlier` or
        `keep` then removes the earlier run."""
        if self.are_fresh:
            yield from self._replace_earlier()
            self.root = self._current

    def remove_earlier(self) -> Steps:
        """Removes the run that a fresh run has replaced."""
        if self._current.exists():
            yield from self._clear(self._earlier)

    def _newest_of_fresh(self) -> Manifest | None:
        if self._new.is_symlink():
            return None  # not made by a run
        fresh = Checkpoints(self._run_dir, self.disk)
        fresh.root = self._new
        try:
            return fresh.newest_valid()
        except DataError:
            return None  # each damaged one was logged as a warning

    def _replace_earlier(self) -> Steps:
        complete = self._run_dir / COMPLETE
        if self._current.exists():
            yield from self._leave(self._earlier)  # one that was not removable
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

    def _clear(self, root: Path) -> Steps:
        """Removes all checkpoints of a run. Moves other files to `<run_dir>/checkpoints.left-<n>`."""
        if root.is_dir() and not root.is_symlink():
            runs = {run_of(folder) for folder in self._folders(root)} - {None}
            if len(runs) <= 1:  # of several, the replaced one is unknown
                yield from self._remove(root, next(iter(runs), None), set())
                for file in own_files_in(root, INTERVAL_NAME):
                    self.disk.unlink(file)
                    yield True
            if not any(root.iterdir()):
                self.disk.rmdir(root)
                yield True
        yield from self._leave(root)

    def _leave(self, root: Path) -> Steps:
        """Renames what is still there to a name that is never removed."""
        if os.path.lexists(root):
            names = (self._current.with_name(f"{self._current.name}.left-{number}") for number in count(1))
            place = next(name for name in names if not os.path.lexists(name))
            get_logger().warning("files of an earlier run stay, as it did not write all of them", folder=str(place))
            yield from self._rename(root, place)

    # one run

    def candidates(self) -> list[str]:
        """Returns folders that hold a manifest, newest first. The manifests may be damaged."""
        return [folder.name for folder in checkpoint_folders(self.root)]

    def back_from(self, name: str) -> list[str]:
        """Returns the names of a checkpoint and of those before it; "" for the newest. Raises ConfigError if there is
        none."""
        names = self.candidates()
        if not names or name not in ("", *names):
            none = "a run writes one at its end" if self.root.parent.is_dir() else "there is no such folder"
            held = f"there is {', '.join(reversed(names))}" if names else none
            raise ConfigError(f"{self.root} holds no checkpoint{f' {name}' if name else ''}; {held}")
        return names[names.index(name) :] if name else names

    def load(self, name: str) -> Manifest:
        """Raises DataError if the manifest is missing or damaged."""
        return read_manifest(self.root / name)

    def verify(self, manifest: Manifest, whole: set[CheckpointFile] | None = None) -> None:
        """Reads every file. Raises DataError for the first that is damaged or holds a row that is not finite. Skips
        files in `whole`, and adds to it."""
        groups = {group.name: group for group in saved_groups(self.root, manifest)}
        for table in () if manifest.script is None else manifest.script.tables:
            for columns in table.first:
                if columns.released is None:  # released files may be elsewhere by now, and are checked when read
                    columns.check()
        for file in manifest.files:
            if whole is None or file not in whole:
                if isinstance(file, RowFile):
                    check_rows(self.root, groups, file)
                else:
                    checked_file(self.root, file)
            if whole is not None:
                whole.add(file)

    def examined(self, names: Iterable[str]) -> Iterator[Examined]:
        """Reads every file of checkpoints, and shared files only once."""
        whole = set[CheckpointFile]()
        for name in names:
            manifest, damage = None, ""
            try:
                manifest = self.load(name)
                self.verify(manifest, whole)
            except DataError as error:
                damage = str(error)
            yield name, manifest, damage

    def newest_valid(self) -> Manifest | None:
        """Returns the newest undamaged checkpoint, or None if there is none at all. Warns of damaged ones.

        Raises DataError if all are damaged: a restart from step 0 is the user's decision."""
        names, damages = self.candidates(), list[str]()
        for name, manifest, damage in self.examined(names):
            if not damage:
                return manifest
            damages.append(damage)
            get_logger().warning("checkpoint is damaged; trying an older one", checkpoint=name, damage=damage)
        if names:
            raise DataError(
                f"{self.root}: none of {len(names)} checkpoints is whole ({damages[0]}); restore them from a copy, "
                "or add --fresh for a new run, whose first checkpoint replaces them"
            )
        return None

    def choose(self, chosen: str | None) -> Manifest:
        """Returns a checkpoint with all its files whole. `chosen`: its name, maybe with @ and its checksum; if None,
        that of the best evaluation if the run keeps it, else the newest. Raises ConfigError if there is none, DataError
        if it is damaged or was replaced."""
        name, _, checksum = (chosen or "").partition("@")
        names = self.back_from(name)
        newest = self.readable(names[0])
        if not name and newest is not None and newest.best:
            names = self.back_from(newest.best)
        examined = self.examined(names)
        _, manifest, damage = next(examined)
        if manifest is None or damage:
            whole = next((name for name, _, damage in examined if not damage), None)
            other = "no older one is whole" if whole is None else f"the next whole one is {whole}, for --checkpoint"
            raise DataError(f"{damage}; {other}")
        if checksum not in ("", manifest.checksum):
            raise DataError(
                f"{self.root / manifest.name} was replaced by another checkpoint in the meantime; start again"
            )
        return manifest

    def newest_for_ranks(self, known: Manifest | None) -> Manifest | None:
        """Like `newest_valid`, for one of several ranks: also looks for a fresh run, and for checkpoints by other
        ranks. Does not reread the files of `known`, the newest that this process knows."""
        self.root = self._new if self._new.exists() else self._current
        names = self.candidates()
        newest = self.readable(names[0]) if names else None
        if known is not None and newest is not None and newest.checksum == known.checksum:
            return known
        return self.newest_valid()

    def committed(self, name: str, replaced: Manifest | None) -> Manifest | None:
        """Returns the manifest of that name once rank 0 has written it and a fresh run has replaced the earlier one.
        None while there is only `replaced`, which was there before."""
        manifest = readable(self._current / name)
        return None if manifest is None or (replaced and manifest.checksum == replaced.checksum) else manifest

    def taken_over(self) -> None:
        """Notes that rank 0 has done `take_over`."""
        self.root = self._current

    def withdraw(self, shard: OwnShard) -> Steps:
        """Removes this rank's shard files of checkpoints that were not completed. Must be called before an attempt
        begins, when the writer of the previous attempt is not busy."""
        for folder in (*self._folders(self._current), *self._folders(self._new)):
            path = folder / shard_name(shard.number)
            if path.exists():
                self.disk.unlink(path)
                yield True

    def keep(self, n: int, newest: Manifest, shard: OwnShard = ALONE) -> Steps:
        """Drops all but `newest`, the n - 1 of its run before it, and those that these name as the best. Then removes
        files that no manifest names, and the run that this one replaced. Of several ranks, only rank 0 calls it, while
        others may write to the folder of `newest` and later ones."""
        own = (folder.name for folder in self._folders(self.root) if self._is_own(folder, newest.run_id))
        older = (self.readable(name) for name in own if name < newest.name)
        kept = [newest, *islice(filter(None, older), n - 1)]
        names = {name for manifest in kept for name in (manifest.name, manifest.best)}
        yield from self._remove(self.root, newest.run_id, names, "" if shard.count == 1 else newest.name)
        if not self.are_fresh:
            yield from self.remove_earlier()

    def collect_garbage(self, run_id: str, shard: OwnShard = ALONE, current: str = "") -> Steps:
        """Removes files that no manifest names, and empty folders, before the first checkpoint of an attempt. Several
        ranks share the folder `current`: there each rank removes its files, and rank 0 all others."""
        named, unclear = self._named(self.root)
        for folder in self._folders(self.root):
            is_shared = shard.count > 1 and folder.name == current
            may_clean = folder.name not in unclear and (is_shared or shard.number == 0)
            if may_clean and self._is_own(folder, run_id):
                yield from self._clean(folder, named, shard if is_shared else ALONE)

    def _remove(self, root: Path, run_id: str | None, kept: set[str], before: str = "") -> Steps:
        """Removes a run's checkpoints except those named in `kept`, then files that no manifest names. `before`: only
        in folders before that one; "": in all."""
        folders = [folder for folder in self._folders(root) if self._is_own(folder, run_id)]
        for folder in folders:
            if folder.name not in kept and (folder / MANIFEST_NAME).exists():
                self._unsynced.add(folder)
                self.disk.unlink(folder / MANIFEST_NAME)
                crash_point("old manifest removed")
                yield True
        for folder in sorted(self._unsynced):
            if folder.is_dir():
                self.disk.sync_folder(folder)
                yield True
            self._unsynced.remove(folder)
        named, unclear = self._named(root)
        for folder in folders:
            if folder.name not in unclear and (not before or folder.name < before):
                yield from self._clean(folder, named, ALONE)

    def _is_own(self, folder: Path, run_id: str | None) -> bool:
        """Returns whether this run may have written everything in a folder. Warns once of each other folder."""
        reason = why_foreign(folder, run_id)
        if reason is not None and folder not in self._warned:
            self._warned.add(folder)
            get_logger().warning("a folder stays with all its files", folder=str(folder), because=reason)
        return reason is None

    def _named(self, root: Path) -> tuple[set[str], set[str]]:
        """Returns the files that manifests name, and the folders of damaged manifests, which may name any file
        there."""
        manifests = {folder.name: readable(folder) for folder in checkpoint_folders(root)}
        named = {file.file for manifest in manifests.values() if manifest is not None for file in manifest.files}
        return named, {name for name, manifest in manifests.items() if manifest is None}

    def _clean(self, folder: Path, named: set[str], shard: OwnShard) -> Steps:
        entries = sorted(folder.iterdir())
        left_over = [
            entry
            for entry in entries
            if entry.name != MANIFEST_NAME
            and f"{folder.name}/{entry.name}" not in named
            and writer_of(entry.name, shard.count) == shard.number
        ]
        for entry in left_over:
            self.disk.unlink(entry)
            crash_point("garbage removed")
            yield True
        if len(left_over) == len(entries) and shard.count == 1:
            self.disk.rmdir(folder)
            yield True

    def readable(self, name: str) -> Manifest | None:
        """Returns the manifest of that name; None if it is missing or damaged."""
        return readable(self.root / name)

    def _folders(self, root: Path) -> Iterator[Path]:
        """Newest first."""
        if root.is_dir():
            yield from sorted(
                (path for path in root.iterdir() if FOLDER_NAME.fullmatch(path.name) and path.is_dir()), reverse=True
            )


def check_rows(root: Path, groups: Mapping[str, GroupSpec], file: RowFile) -> None:
    if file.group not in groups:
        raise DataError(f"{root / file.file}: rows of group {file.group}, which the manifest's job does not have")
    if fault := FiniteRows(groups[file.group]).fault(*read_rows(root, groups[file.group], file)):
        raise DataError(
            f"{root / file.file}: {fault}; training had diverged before this checkpoint: continue from an older one, "
            "with a lower optimizer.sparse.lr"
        )


def why_foreign(folder: Path, run_id: str | None) -> str | None:
    """Returns why a run did not write everything in a folder; None if it may have. `run_id`: None if the run has no
    checkpoint."""
    if folder.is_symlink():
        return "it is a link"
    try:
        found = run_of(folder)
    except Unreadable as error:
        return str(error)
    if found not in (None, run_id):
        return f"it holds a checkpoint of run {found or '(unreadable)'}"
    name = next((entry.name for entry in sorted(folder.iterdir()) if not is_own_file(entry, OWN_NAME)), None)
    return None if name is None else f"rowcast did not write {name} in it"
