"""Allocates a ring's memory: a file in /dev/shm that is always removed, or plain memory.

Plain memory serves both ends in one process, or one end's mirror of a ring whose other end is on another host.
"""

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np

from rowcast.job.schema import Transport
from rowcast.protocol.messages import RingSpec
from rowcast.runtime.arrays import Bytes
from rowcast.runtime.disk import try_lock
from rowcast.runtime.errors import ConfigError, RemoteProtocolError, advice
from rowcast.runtime.stops import AT_SUDDEN_EXIT

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rowcast-"
NAME = re.compile(rf"{PREFIX}[a-z]+-[0-9]+-[0-9a-f]{{8}}")  # of `_create_locked`
created: set[str] = set()  # paths of this process's rings that are still linked
OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def unlink_created() -> None:
    """Removes the ring files of a process that ends without closing anything."""
    for path in tuple(created):
        Path(path).unlink(missing_ok=True)


AT_SUDDEN_EXIT.append(unlink_created)


def in_memory_buffer(nbytes: int) -> Bytes:
    """Returns page-aligned zeroed u8 [nbytes] for both ends of an in-process ring."""
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)


def shared_memory(directory: Path = SHARED_MEMORY) -> tuple[int, int]:
    """Returns the size of the directory's file system, and its free space, in bytes."""
    usage = os.statvfs(directory)
    return usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize


def free_shared_memory(directory: Path = SHARED_MEMORY) -> int:
    return shared_memory(directory)[1]


class RingFile:
    """A file of `nbytes` mapped into this process. The peer attaches `path`; `buffer` is page-aligned u8 [nbytes].

    The owner holds an flock while it lives, and unlinks the file once both sides have mapped it: after that, even a
    SIGKILL leaves no file. The mapping outlives `close` while there is a view of `buffer`."""

    def __init__(self, path: str, descriptor: int, nbytes: int, owner: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        self.buffer: Bytes = np.frombuffer(mmap.mmap(descriptor, nbytes), dtype=np.uint8)
        self._descriptor: int | None = descriptor
        if owner:
            created.add(path)

    @classmethod
    def create(cls, nbytes: int, name_hint: str, directory: Path = SHARED_MEMORY) -> Self:
        """Allocates all bytes at once. Raises ConfigError before allocating if they are not free."""
        free = free_shared_memory(directory)
        if nbytes > free:
            raise _no_space(nbytes, free, name_hint, directory)
        path, descriptor = _create_locked(directory, name_hint)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls(str(path), descriptor, nbytes, owner=True)
        except OSError as error:
            path.unlink()
            os.close(descriptor)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_space(nbytes, free, name_hint, directory) from error
            raise _cannot_create(directory, error) from error

    @classmethod
    def attach(cls, path: str, nbytes: int) -> Self:
        """Maps the peer's file. Raises ConfigError if it does not exist or is not the announced one."""
        try:
            descriptor = os.open(path, OPEN_FLAGS)
        except OSError as error:
            change = advice(error.errno, "run both processes on one host, as one user, with one /dev/shm")
            raise ConfigError(f"the ring {path} cannot be opened ({error.strerror}); {change}") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_size != nbytes:
            os.close(descriptor)
            raise ConfigError(
                f"the ring {path} has {status.st_size} bytes and belongs to user {status.st_uid}, but {nbytes} bytes "
                f"of user {os.getuid()} were announced; start both processes again as one user"
            )
        return cls(path, descriptor, nbytes, owner=False)

    def close(self) -> None:
        """Unlinks the file if it still has a name, and releases the lock. Idempotent."""
        if self._descriptor is None:
            return
        if self.path in created:
            Path(self.path).unlink(missing_ok=True)
            created.discard(self.path)
        # the mapping duplicates the descriptor, which would keep the lock
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = None


class RingMemory:
    """This process's mirror of a ring, with the interface of `RingFile` and no file."""

    path = ""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.buffer: Bytes = in_memory_buffer(nbytes)

    def close(self) -> None:
        """Does nothing: the memory is freed with its last view."""


def create_ring(transport: Transport, nbytes: int, name_hint: str) -> RingFile | RingMemory:
    """The prefetcher's end: a file of `nbytes`, or over tcp a mirror. Raises ConfigError."""
    return RingMemory(transport.mirror_bytes) if transport.is_tcp else RingFile.create(nbytes, name_hint)


def attach_ring(transport: Transport, spec: RingSpec) -> RingFile | RingMemory:
    """The trainer's end. Raises RemoteProtocolError if the Welcome does not agree with this job file's transport."""
    if not transport.is_tcp and spec.path:
        return RingFile.attach(spec.path, spec.nbytes)
    if not transport.is_tcp or spec.path or spec.nbytes != transport.mirror_bytes:
        raise RemoteProtocolError(
            f"a ring of {spec.nbytes} bytes at {spec.path!r} was announced, but transport.endpoint is "
            f"{transport.endpoint!r} and rings over tcp have {transport.mirror_bytes}"
        )
    return RingMemory(spec.nbytes)


def remove_leftovers(directory: Path = SHARED_MEMORY) -> list[Path]:
    """Removes and returns this user's ring files whose owner is dead; only a kill can leave one."""
    return [path for path in sorted(directory.iterdir()) if NAME.fullmatch(path.name) and _remove_if_left(path)]


def _create_locked(directory: Path, name_hint: str) -> tuple[Path, int]:
    while True:
        path = directory / f"{PREFIX}{name_hint}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            descriptor = os.open(path, OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise _cannot_create(directory, error) from error
        with ExitStack() as stack:
            stack.callback(os.close, descriptor)
            stack.callback(path.unlink, missing_ok=True)
            if try_lock(descriptor, path) and os.fstat(descriptor).st_nlink:
                stack.pop_all()
                return path, descriptor
            # otherwise a different process took it for a leftover between the two calls


def _remove_if_left(path: Path) -> bool:
    try:
        descriptor = os.open(path, OPEN_FLAGS | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return False  # already removed, or a different user's
    except OSError:
        return False  # a link or a device, so not ours
    try:
        status = os.fstat(descriptor)
        left = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and try_lock(descriptor, path)
        if left:
            path.unlink(missing_ok=True)
        return left
    finally:
        os.close(descriptor)


def _cannot_create(directory: Path, error: OSError) -> ConfigError:
    what_to_change = advice(error.errno, "make it writable for this user")
    return ConfigError(f"cannot create a file in {directory} ({error.strerror}); {what_to_change}")


def _no_space(nbytes: int, free: int, name_hint: str, directory: Path) -> ConfigError:
    return ConfigError(
        f"the {name_hint} ring needs {nbytes} bytes in {directory}, where {free} are free; "
        f'set transport.ring = "{max(1, free // 4 >> 20)}MiB" or enlarge {directory}'
    )
