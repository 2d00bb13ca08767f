"""The file of a mapped store: locked by one process, fully reserved on the disk, with a durable header."""

import errno
import fcntl
import mmap
import os
import re
import stat
from pathlib import Path
from typing import Self

from rowcast.job.tables import GROUP_NAME
from rowcast.prefetcher.stores.table_header import HEADER_BYTES, TableHeader
from rowcast.protocol.transport.ring_file import try_lock
from rowcast.runtime.errors import ConfigError

NAME = re.compile(rf"{GROUP_NAME}\.rows")
FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class TableFile:
    """Holds an flock until `close`; the kernel frees the lock of a process that is killed."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens or makes the file and its folder. Raises ConfigError if that fails or another process has the file."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(path, lock_named(path))
        except OSError as error:
            raise ConfigError(
                f"the table file {path} cannot be opened ({error.strerror}); set store.path to another folder"
            ) from None

    @property
    def nbytes(self) -> int:
        return os.fstat(self._open).st_size

    def read_header(self) -> TableHeader | None:
        return TableHeader.decode(os.pread(self._open, HEADER_BYTES, 0))

    def write_header(self, header: TableHeader) -> None:
        """The header is durable when this returns. Raises OSError."""
        page = header.encode()
        written = os.pwrite(self._open, page, 0)
        if written != len(page):
            raise OSError(errno.EIO, f"{written} of {len(page)} bytes of the header were written", str(self.path))
        os.fsync(self._open)

    def begin(self, header: TableHeader, nbytes: int, *, keep: bool) -> None:
        """Reserves `nbytes` for the file, after a durable header. Zeroes them unless `keep`.

        Without reserved space, a write to a hole on a full disk kills the process with SIGBUS. Reserving reads and
        fills nothing: unwritten bytes read as zeros. If the file system cannot reserve, glibc writes to each block,
        which is slower and as safe. Other C libraries report an error, and then the space was only checked: a disk that
        fills up later kills the process.

        Raises ConfigError if there is too little space, before changing anything. Removes a file that it could not
        make."""
        self._check_space(nbytes)
        try:
            self.write_header(header)
            if not keep:
                os.ftruncate(self._open, HEADER_BYTES)
            reserve(self._open, 0, nbytes)
        except OSError as error:
            self.path.unlink()
            if error.errno in NO_SPACE:
                raise self._too_little(nbytes, self._free_bytes()) from None
            raise ConfigError(
                f"the table file {self.path} of {nbytes} bytes cannot be made ({error.strerror}); "
                "set store.path to another disk"
            ) from None

    def map(self, nbytes: int) -> mmap.mmap:
        """Maps the whole file until no array uses it, also after `close`. Raises ConfigError."""
        try:
            return mmap.mmap(self._open, nbytes)
        except (OSError, OverflowError, ValueError):
            raise ConfigError(
                f"the table file {self.path} of {nbytes} bytes is more than this machine can address; "
                "use fewer rows or a smaller embedding_dim"
            ) from None

    def sync(self) -> None:
        os.fsync(self._open)

    def close(self) -> None:
        """Releases the lock. Idempotent."""
        if self._descriptor is not None:
            # a mapping duplicates the descriptor, which would keep the lock
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def _open(self) -> int:
        assert self._descriptor is not None, f"{self.path} is closed"
        return self._descriptor

    def _free_bytes(self) -> int:
        found, disk = os.fstat(self._open), os.fstatvfs(self._open)
        return found.st_blocks * 512 + disk.f_bavail * disk.f_frsize

    def _check_space(self, nbytes: int) -> None:
        free = self._free_bytes()
        if nbytes > free:
            if self.nbytes == 0:
                self.path.unlink()  # made a moment ago
            raise self._too_little(nbytes, free)

    def _too_little(self, nbytes: int, free: int) -> ConfigError:
        return ConfigError(
            f"the table file {self.path} needs {nbytes} bytes, but {free} are free; "
            "free space there or set store.path to a larger disk"
        )


def lock_named(path: Path) -> int:
    """Returns a locked descriptor of the file of this name. Raises ConfigError if another process has it, OSError."""
    while True:
        descriptor = os.open(path, FLAGS, 0o600)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path} is not a file; set store.path to another folder")
            if not try_lock(descriptor):
                raise ConfigError(
                    f"the table file {path} is in use by another process; end it or set store.path to another folder"
                )
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last owner removed the file between the two calls


def reserve(descriptor: int, start: int, nbytes: int) -> None:
    """Reserves `nbytes` on the disk for a file, from `start` on. Raises OSError."""
    try:
        os.posix_fallocate(descriptor, start, nbytes)
    except OSError as error:
        if error.errno not in NO_FALLOCATE:
            raise
        os.ftruncate(descriptor, start + nbytes)


def table_path(folder: Path, group: str) -> Path:
    return folder / f"{group}.rows"


def remove_left(path: Path) -> None:
    """Removes a table file. Raises ConfigError if another process has it, OSError."""
    descriptor = lock_named(path)
    try:
        path.unlink()
    finally:
        os.close(descriptor)
