"""Names the unix socket of a run after its run directory, and locks it for the process that serves it.

    <directory>/<hash>.sock     bound by the process that serves the run
                <hash>.lock     locked by it as long as it lives

A killed process leaves both files. The next process that serves any run there can take their lock, and removes them.
"""

import fcntl
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path

import xxhash

from rowcast.runtime.errors import ConfigError

MAX_PATH_BYTES = 107  # the kernel's limit for the path of a unix socket
NAME_BYTES = len("/") + 16 + len(".sock")
LOCK_NAME = re.compile(r"[0-9a-f]{16}\.lock")
LOCK_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
REMOVED_WITHIN_S = 2.0  # a lock that a different process takes to remove it
POLL_S = 0.01


def socket_directory() -> Path:
    """This user's directory for sockets: under XDG_RUNTIME_DIR if that exists and is short enough, else under /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        directory = Path(runtime) / "rowcast"
        if len(os.fsencode(directory)) + NAME_BYTES <= MAX_PATH_BYTES:
            return directory
    return Path("/tmp") / f"rowcast-{os.getuid()}"


def socket_path(run_dir: Path, directory: Path | None = None) -> Path:
    """The same path for every spelling of the run directory's path. Raises ConfigError if it is too long."""
    name = xxhash.xxh3_64_hexdigest(os.fsencode(run_dir.resolve()))
    path = (directory or socket_directory()) / f"{name}.sock"
    nbytes = len(os.fsencode(path))
    if nbytes > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} has {nbytes} bytes and may have {MAX_PATH_BYTES}; use a shorter directory"
        )
    return path


def make_private(directory: Path) -> None:
    """Makes the directory, or checks that only this user can reach it. Raises ConfigError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the directory for sockets, {directory}, cannot be made ({error.strerror}); let user {os.getuid()} write "
            f"to {directory.parent}, or set XDG_RUNTIME_DIR to a directory of that user"
        ) from error
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must be a directory of user {os.getuid()} with mode 0700, but it belongs to user "
            f"{found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}; remove it or set XDG_RUNTIME_DIR"
        )


class EndpointLock:
    """The lock of the process that serves a socket; without it, a second bind would silently replace the socket."""

    def __init__(self, socket: Path, run_dir: Path) -> None:
        self._path = socket.with_suffix(".lock")
        self._run_dir = run_dir
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Raises ConfigError if another process holds the lock."""
        refused_s = time.monotonic() + REMOVED_WITHIN_S
        while True:
            descriptor = os.open(self._path, LOCK_FLAGS | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() < refused_s:
                    os.close(descriptor)
                    time.sleep(POLL_S)
                    continue
                holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
                os.close(descriptor)
                raise ConfigError(
                    f"another prefetcher serves run directory {self._run_dir} (pid {holder}); "
                    "stop it or use another run directory"
                ) from error
            if os.fstat(descriptor).st_nlink:
                break
            os.close(descriptor)  # its holder removed the file between the two calls
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def remove_dead(directory: Path) -> None:
    """Removes the sockets and locks of processes that were killed."""
    for lock in directory.iterdir():
        if LOCK_NAME.fullmatch(lock.name):
            with suppress(OSError):  # its process lives, or the file is not ours
                remove_if_dead(lock, lock.with_suffix(".sock"))


def remove_if_dead(lock: Path, socket: Path) -> None:
    """Raises OSError if a process holds the lock."""
    descriptor = os.open(lock, LOCK_FLAGS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            if socket.is_socket() and not socket.is_symlink():
                socket.unlink()
            lock.unlink()
    finally:
        os.close(descriptor)
