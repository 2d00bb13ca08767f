"""A disk that fails at its n-th operation from now, whatever that is, and remembers enough to lose power."""

import errno
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rowcast.runtime.disk import Content, Disk, FileWrite
from tests.support.recording_disk import Operation, RecordingDisk, power_loss

DiskFaultKind = Literal["ENOSPC", "EIO", "short"]
DISK_FAULTS: tuple[DiskFaultKind, ...] = get_args(DiskFaultKind)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskFault:
    kind: DiskFaultKind  # "short": a part is written, then the disk is full
    at: int  # operations before it
    lasting: bool  # everything fails from then on, until somebody sees to it

    def __str__(self) -> str:
        return f"{self.kind} at disk operation {self.at}{' and ever after' if self.lasting else ''}"


class SimulatedDisk(Disk):
    """A disk for the files below `root`."""

    def __init__(self, root: Path) -> None:
        self.failed: str | None = None  # what the fault has happened to
        self._root = root
        self._inner = RecordingDisk()
        self._fault: DiskFault | None = None
        self._operations = 0

    def plan(self, fault: DiskFault | None) -> None:
        """Counts operations from now on."""
        self._fault, self._operations, self.failed = fault, 0, None

    def lose_power(self, chance: random.Random) -> None:
        """What was not synced is there, or in part, or not."""
        survivors = self._root.with_name("survivors")
        power_loss(self._root, self._inner.log, chance.randrange(2**32), survivors)
        shutil.rmtree(self._root)
        survivors.rename(self._root)
        self.assume_durable()

    def assume_durable(self) -> None:
        """What lies below the root now is what every later loss of power begins with."""
        self._inner.log = list(operations_that_make(self._root))

    def check(self, kind: str, path: Path) -> None:
        """Raises OSError where this operation fails. Short writes are the writer's part."""
        number, self._operations = self._operations, self._operations + 1
        fault = self._fault
        if fault is None or number < fault.at or (number > fault.at and not fault.lasting):
            return
        self.failed = self.failed or f"{kind} {path.name}"
        code = errno.EIO if fault.kind == "EIO" else errno.ENOSPC
        raise OSError(code, os.strerror(code), str(path))

    @property
    def writes_short(self) -> bool:
        return self._fault is not None and self._fault.kind == "short"

    def mkdir(self, path: Path) -> None:
        self.check("mkdir", path)
        self._inner.mkdir(path)

    def create(self, path: Path) -> FileWrite:
        self.check("create", path)
        return SimulatedWriting(self, self._inner.create(path), path)

    def rename(self, source: Path, target: Path) -> None:
        self.check("rename", source)
        self._inner.rename(source, target)

    def unlink(self, path: Path) -> None:
        self.check("unlink", path)
        self._inner.unlink(path)

    def rmdir(self, path: Path) -> None:
        self.check("rmdir", path)
        self._inner.rmdir(path)

    def sync_folder(self, path: Path) -> None:
        self.check("sync_folder", path)
        self._inner.sync_folder(path)


class SimulatedWriting(FileWrite):
    def __init__(self, disk: SimulatedDisk, inner: FileWrite, path: Path) -> None:
        self._disk, self._inner, self._path = disk, inner, path

    def write(self, content: Content) -> None:
        try:
            self._disk.check("write", self._path)
        except OSError:
            if self._disk.writes_short:
                self._inner.write(content[: len(content) // 2])
            raise
        self._inner.write(content)

    def sync(self) -> None:
        """A failed sync loses what was not yet on the disk, and a second one would not say so."""
        try:
            self._disk.check("sync", self._path)
        except OSError:
            os.truncate(self._path, self._path.stat().st_size // 2)
            raise
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


def operations_that_make(root: Path) -> list[Operation]:
    """A log after which everything below `root` is there and durable."""
    log: list[Operation] = []
    for number, path in enumerate(sorted(root.rglob("*")), 1):
        if path.is_dir():
            log.append(Operation("mkdir", path))
        else:
            log += [
                Operation("create", path, file=-number),
                Operation("write", path, content=path.read_bytes(), file=-number),
                Operation("sync", path, file=-number),
            ]
    folders = [path for path in [root, *sorted(root.rglob("*"))] if path.is_dir()]
    return log + [Operation("sync_folder", folder) for folder in folders]
