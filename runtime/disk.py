"""Defines the operations that write all durable files, so that tests can record them and make them fail.

What survives a loss of power, on which the order of all writes depends:

    content of a file      what was written before its last `sync`
    an entry of a folder   (a file's name, a rename, an unlink) what was done before the folder's last `sync_folder`
"""

import os
import shutil
from pathlib import Path
from typing import Protocol

Content = bytes | memoryview


class FileWrite(Protocol):
    """A file that is written from its first byte. Every method raises OSError."""

    def write(self, content: Content) -> None:
        """Appends all of `content`, or raises."""

    def sync(self) -> None:
        """Puts what was written on the disk. After an error the content is unknown, and the file must be discarded."""

    def close(self) -> None:
        """Idempotent. Does not sync."""


class Disk(Protocol):
    """Every method raises OSError."""

    def mkdir(self, path: Path) -> None: ...

    def create(self, path: Path) -> FileWrite:
        """Creates an empty file; an existing one is replaced."""

    def rename(self, source: Path, target: Path) -> None:
        """Moves a file atomically; an existing `target` is replaced."""

    def unlink(self, path: Path) -> None: ...

    def remove_tree(self, path: Path) -> None: ...

    def sync_folder(self, path: Path) -> None:
        """Puts the folder's entries on the disk."""


class RealWriting:
    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, content: Content) -> None:
        assert self._descriptor is not None, "a closed file is not written"
        rest = memoryview(content).cast("B")
        while len(rest):
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        assert self._descriptor is not None, "a closed file is not synced"
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


class RealDisk:
    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> FileWrite:
        return RealWriting(path)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
