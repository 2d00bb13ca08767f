"""Names the unix socket of a run after its run directory, and locks it for the process that serves it."""

import fcntl
import os
import stat
from pathlib import Path

import xxhash

from rowcast.runtime.errors import ConfigError

MAX_PATH_BYTES = 107  # the kernel's limit for the path of a unix socket
NAME_BYTES = len("/") + 16 + len(".sock")


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
    """Makes the directory, or checks that it is one that only this user can reach. Raises ConfigError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must be a directory of user {os.getuid()} with mode 0700, but it belongs to user "
            f"{found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}; remove it or set XDG_RUNTIME_DIR"
        )


class EndpointLock:
    """The lock of the process that serves a socket; without it, a second bind would take the socket over silently."""

    def __init__(self, socket: Path, run_dir: Path) -> None:
        self._path = socket.with_suffix(".lock")
        self._run_dir = run_dir
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Raises ConfigError if another process holds the lock."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
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
