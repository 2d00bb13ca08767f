"""Defines the operations that write durable files, so that tests can record them and make them fail.

What survives a power loss, which decides the order of all writes:

    content of a file      writes before its last `sync`
    an entry of a folder   (a file's name, a rename, an unlink) changes before the folder's last `sync_folder`
"""

import os
from pathlib import Path

Content = bytes | memoryview
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW  # a link's target is not ours


class FileWrite:
    """A file that is written from its first byte. Every method raises OSError."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, WRITE_FLAGS, 0o666)

    def write(self, content: Content) -> None:
        """Appends all of `content`, or raises."""
        assert self._descriptor is not None, "a closed file is not written"
        rest = memoryview(content).cast("B")
        while len(rest):
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """Makes what was written durable. After an error the content is unknown, and the file must be discarded."""
        assert self._descriptor is not None, "a closed file is not synced"
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file without syncing it. Idempotent."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


class Disk:
    """Every method raises OSError."""

    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> FileWrite:
        """Creates an empty file; an existing one is replaced."""
        return FileWrite(path)

    def rename(self, source: Path, target: Path) -> None:
        """Moves a file atomically; an existing `target` is replaced."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def rmdir(self, path: Path) -> None:
        """Removes an empty folder."""
        path.rmdir()

    def sync_folder(self, path: Path) -> None:
        """Makes the folder's entries durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
