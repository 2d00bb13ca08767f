"""A disk that fails once, at the n-th operation of a kind, then works again: a writer that retried would seem fine."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rowcast.runtime.disk import Content, Disk, FileWrite

Kind = Literal["mkdir", "create", "write", "sync", "rename", "unlink", "rmdir", "sync_folder"]
Fault = Literal["ENOSPC", "EIO", "short"]
KINDS: tuple[Kind, ...] = ("mkdir", "create", "write", "sync", "rename", "unlink", "rmdir", "sync_folder")


@dataclass
class Failure:
    """`nth` counts from 0. "short": a part is written, then the disk is full."""

    kind: Kind
    nth: int
    fault: Fault
    happened: bool = False

    def check(self, kind: Kind) -> bool:
        """Whether this operation is the one."""
        if kind != self.kind:
            return False
        self.nth -= 1
        self.happened |= self.nth == -1
        return self.nth == -1

    def error(self, path: Path) -> OSError:
        number = errno.EIO if self.fault == "EIO" else errno.ENOSPC
        return OSError(number, os.strerror(number), str(path))


class FaultyWriting(FileWrite):
    def __init__(self, failure: Failure, inner: FileWrite, path: Path) -> None:
        self._failure, self._inner, self._path = failure, inner, path

    def write(self, content: Content) -> None:
        if self._failure.check("write"):
            if self._failure.fault == "short":
                self._inner.write(content[: len(content) // 2])
            raise self._failure.error(self._path)
        self._inner.write(content)

    def sync(self) -> None:
        """A failed sync loses what was not yet on the disk, and a second one would not say so."""
        if self._failure.check("sync"):
            os.truncate(self._path, self._path.stat().st_size // 2)
            raise self._failure.error(self._path)

    def close(self) -> None:
        self._inner.close()


class FaultyDisk(Disk):
    def __init__(self, failure: Failure) -> None:
        self._failure = failure
        self._inner = Disk()

    def _check(self, kind: Kind, path: Path) -> None:
        if self._failure.check(kind):
            raise self._failure.error(path)

    def mkdir(self, path: Path) -> None:
        self._check("mkdir", path)
        self._inner.mkdir(path)

    def create(self, path: Path) -> FileWrite:
        self._check("create", path)
        return FaultyWriting(self._failure, self._inner.create(path), path)

    def rename(self, source: Path, target: Path) -> None:
        self._check("rename", source)
        self._inner.rename(source, target)

    def unlink(self, path: Path) -> None:
        self._check("unlink", path)
        self._inner.unlink(path)

    def rmdir(self, path: Path) -> None:
        self._check("rmdir", path)
        self._inner.rmdir(path)

    def sync_folder(self, path: Path) -> None:
        self._check("sync_folder", path)
