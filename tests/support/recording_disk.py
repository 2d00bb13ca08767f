"""A disk that remembers every operation, and what a loss of power would have left at any moment.

A file's content up to its last `sync` is sure, and so are a folder's entries up to its last `sync_folder`. A seed
chooses what is left of later operations: an entry's change may have reached the disk or not (in the order of each
name), content may be absent, cut anywhere, cut and followed by zeros, or there.
"""

import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rowcast.runtime.disk import Content, Disk, FileWrite


@dataclass(frozen=True)
class Operation:
    kind: str  # mkdir create write sync rename unlink rmdir sync_folder
    path: Path
    target: Path | None = None  # a rename's
    content: bytes = b""  # a write's
    file: int = 0  # of create, write and sync


class RecordingWriting(FileWrite):
    def __init__(self, log: list[Operation], inner: FileWrite, path: Path, file: int) -> None:
        self._log, self._inner, self._path, self._file = log, inner, path, file

    def write(self, content: Content) -> None:
        self._inner.write(content)
        self._log.append(Operation("write", self._path, content=bytes(content), file=self._file))

    def sync(self) -> None:
        self._log.append(Operation("sync", self._path, file=self._file))

    def close(self) -> None:
        self._inner.close()


class RecordingDisk(Disk):
    """Does everything for real, but for syncs, which tests need not wait for."""

    def __init__(self) -> None:
        self.log: list[Operation] = []
        self._inner = Disk()
        self._num_files = 0

    def mkdir(self, path: Path) -> None:
        self._inner.mkdir(path)
        self.log.append(Operation("mkdir", path))

    def create(self, path: Path) -> FileWrite:
        inner = self._inner.create(path)
        self._num_files += 1
        self.log.append(Operation("create", path, file=self._num_files))
        return RecordingWriting(self.log, inner, path, self._num_files)

    def rename(self, source: Path, target: Path) -> None:
        self._inner.rename(source, target)
        self.log.append(Operation("rename", source, target))

    def unlink(self, path: Path) -> None:
        self._inner.unlink(path)
        self.log.append(Operation("unlink", path))

    def rmdir(self, path: Path) -> None:
        self._inner.rmdir(path)
        self.log.append(Operation("rmdir", path))

    def sync_folder(self, path: Path) -> None:
        assert path.is_dir(), f"{path} is synced, but it is no folder"
        self.log.append(Operation("sync_folder", path))


@dataclass
class FileNode:
    content: bytearray = field(default_factory=bytearray)
    synced: int = 0  # bytes that are sure


@dataclass
class Change:
    """Changes in one folder: names to what they mean afterwards, None where they are gone."""

    entries: dict[str, "FileNode | FolderNode | None"]


@dataclass
class FolderNode:
    durable: dict[str, "FileNode | FolderNode"] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def now(self) -> dict[str, "FileNode | FolderNode"]:
        return applied(self.durable, self.pending)

    def change(self, entries: dict[str, "FileNode | FolderNode | None"]) -> None:
        self.pending.append(Change(entries))

    def sync(self) -> None:
        self.durable, self.pending = self.now(), []


Node = FileNode | FolderNode


def applied(entries: dict[str, Node], changes: Iterable[Change]) -> dict[str, Node]:
    after = dict(entries)
    for change in changes:
        for name, node in change.entries.items():
            if node is None:
                after.pop(name, None)
            else:
                after[name] = node
    return after


class DiskModel:
    """The tree under `root`, an existing folder, and what of it is sure, after some operations."""

    def __init__(self, root: Path) -> None:
        self.top = FolderNode()
        self._root = root
        self._files: dict[int, FileNode] = {}

    def apply(self, operation: Operation) -> None:
        name = operation.path.name
        match operation.kind:
            case "mkdir":
                self._folder(operation.path.parent).change({name: FolderNode()})
            case "create":
                self._files[operation.file] = FileNode()
                self._folder(operation.path.parent).change({name: self._files[operation.file]})
            case "write":
                self._files[operation.file].content += operation.content
            case "sync":
                self._files[operation.file].synced = len(self._files[operation.file].content)
            case "rename":
                assert operation.target is not None
                assert operation.target.parent == operation.path.parent, "the model moves within a folder only"
                place = self._folder(operation.path.parent)
                place.change({name: None, operation.target.name: place.now()[name]})
            case "unlink" | "rmdir":
                self._folder(operation.path.parent).change({name: None})
            case "sync_folder":
                self._folder(operation.path).sync()

    def _folder(self, path: Path) -> FolderNode:
        node: Node = self.top
        for name in path.relative_to(self._root).parts:
            assert isinstance(node, FolderNode), f"{path} goes through a file"
            node = node.now()[name]
        assert isinstance(node, FolderNode), f"{path} is no folder"
        return node

    def lose_power(self, seed: int, out: Path) -> None:
        """Writes to `out`, a new folder, one of the states that a loss of power may leave now."""
        shutil.rmtree(out, ignore_errors=True)
        write_survivors(self.top, out, random.Random(seed))


def power_loss(root: Path, operations: Iterable[Operation], seed: int, out: Path) -> None:
    """`DiskModel.lose_power` behind `operations`."""
    model = DiskModel(root)
    for operation in operations:
        model.apply(operation)
    model.lose_power(seed, out)


def write_survivors(node: FolderNode, path: Path, chance: random.Random) -> None:
    """Writes what the power loss left of a folder to `path`, a new folder."""
    path.mkdir()
    for name, child in surviving(node, chance).items():
        if isinstance(child, FolderNode):
            write_survivors(child, path / name, chance)
        else:
            (path / name).write_bytes(surviving_content(child, chance))


def surviving(node: FolderNode, chance: random.Random) -> dict[str, Node]:
    share = chance.choice([0.0, 0.3, 0.7, 1.0])
    chosen, lost = [], set[str]()
    for change in node.pending:
        if lost.isdisjoint(change.entries) and chance.random() < share:
            chosen.append(change)
        else:
            lost |= change.entries.keys()  # later changes of these names build on this one
    return applied(node.durable, chosen)


def surviving_content(file: FileNode, chance: random.Random) -> bytes:
    cut = chance.choice([file.synced, len(file.content), chance.randint(file.synced, len(file.content))])
    kept = bytes(file.content[:cut])
    return kept if chance.random() < 0.5 else kept + bytes(len(file.content) - cut)
