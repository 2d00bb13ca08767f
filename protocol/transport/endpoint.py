"""Where the two ends of a run meet: a unix socket that only this user can reach, or a tcp port that accepts known keys.

    <directory>/<hash>.sock     named after the run directory; bound by the process that serves the run
                <hash>.lock     locked by it as long as it lives

A killed process leaves both files. The next process that serves any run there can take their lock, and removes them.
"""

import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, getaddrinfo

import xxhash
import zmq

from rowcast.job.schema import Transport
from rowcast.protocol.transport.callers import DOMAIN, ClientAuth, Refusals, load_client, load_server
from rowcast.runtime.disk import try_lock
from rowcast.runtime.errors import ConfigError, advice

Context = zmq.Context[zmq.Socket[bytes]]
Sockets = Sequence["zmq.Socket[bytes]"]
HANDSHAKE_MS = 5000  # a caller that does not prove its key within this time is cut off
BACKLOG = 64
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
            with ExitStack() as stack:
                stack.callback(os.close, descriptor)
                if try_lock(descriptor, self._path):
                    if os.fstat(descriptor).st_nlink:
                        stack.pop_all()
                        break
                    continue  # its holder removed the file between the two calls
                holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            if time.monotonic() > refused_s:
                raise ConfigError(
                    f"another prefetcher serves run directory {self._run_dir} (pid {holder}); "
                    "stop it or use another run directory"
                )
            time.sleep(POLL_S)
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
            with suppress(OSError, ConfigError):  # the file is not ours, or cannot be locked
                remove_if_dead(lock, lock.with_suffix(".sock"))


def remove_if_dead(lock: Path, socket: Path) -> None:
    """Raises OSError, ConfigError."""
    descriptor = os.open(lock, LOCK_FLAGS)
    try:
        if not try_lock(descriptor, lock):
            return
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            if socket.is_socket() and not socket.is_symlink():
                socket.unlink()
            lock.unlink()
    finally:
        os.close(descriptor)


class FileAddress:
    """A unix socket; the file's mode keeps other users out. The two ends share memory.

    The serving end calls `open`, `bind`, `answer` when one of `sockets` is ready, and `close` once they are closed; it
    polls and closes `sockets`. The other end calls `prepare` before it connects to `endpoint`."""

    has_payloads = False  # True if the two ends share no memory
    sockets: Sockets = ()  # of the serving end besides its own, once bound

    def __init__(self, run_dir: Path, directory: Path | None = None) -> None:
        self._path = socket_path(run_dir, directory)
        self._lock = EndpointLock(self._path, run_dir)
        self.endpoint = f"ipc://{self._path}"

    def open(self) -> None:
        """Prepares the address, before there is a socket. Raises ConfigError if this process may not serve here."""
        make_private(self._path.parent)
        remove_dead(self._path.parent)
        self._lock.acquire()

    def bind(self, context: Context, socket: "zmq.Socket[bytes]") -> None:
        """Raises ConfigError if the socket cannot be made."""
        try:
            socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            change = advice(error.errno, "check its directory")
            raise ConfigError(f"the socket {self._path} cannot be made ({error.strerror}); {change}") from error

    def answer(self) -> None: ...

    def prepare(self, socket: "zmq.Socket[bytes]") -> None: ...

    def close(self) -> None:
        """Frees the address. Called after a failed `bind` too."""
        self._path.unlink(missing_ok=True)
        self._lock.release()


class TcpAddress:
    """A tcp port. All traffic is encrypted, no frame of a caller without an allowed key is read, and a trainer connects
    only to the prefetcher that has the secret of `server.key`. Methods as of `FileAddress`."""

    has_payloads = True

    def __init__(self, endpoint: str, keys: Path, refusals: Refusals) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self._auth = ClientAuth(keys, refusals)

    @property
    def sockets(self) -> Sockets:
        return self._auth.sockets

    def open(self) -> None:
        load_server(self._keys)

    def bind(self, context: Context, socket: "zmq.Socket[bytes]") -> None:
        pair = load_server(self._keys)
        self._auth.open(context)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # otherwise a missing ZAP answer admits any caller
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        self._limit(socket)
        try:
            socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            why = zmq.strerror(error.errno or 0)
            raise ConfigError(
                f"transport.endpoint = {self.endpoint!r} cannot be served ({why}); name a free port and an address "
                'of this host, or "0.0.0.0" for all of them'
            ) from error

    def answer(self) -> None:
        self._auth.answer()

    def prepare(self, socket: "zmq.Socket[bytes]") -> None:
        """Raises ConfigError if this process has no usable key."""
        pair, socket.curve_serverkey = load_client(self._keys)
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        self._limit(socket)

    def close(self) -> None: ...

    def _limit(self, socket: "zmq.Socket[bytes]") -> None:
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 0)  # our heartbeats notice earlier that a peer is gone
        socket.setsockopt(zmq.IPV6, int(is_ipv6(self.endpoint)))


Address = FileAddress | TcpAddress


def address_of(run_dir: Path, directory: Path | None, transport: Transport | None, refusals: Refusals) -> Address:
    """`directory`: for the unix socket; by default this user's."""
    if transport is None or not transport.is_tcp:
        return FileAddress(run_dir, directory)
    assert transport.keys is not None, "checked with the job file"
    return TcpAddress(transport.endpoint, Path(transport.keys), refusals)


def is_ipv6(endpoint: str) -> bool:
    """Whether its host is an IPv6 address, or a name without any other. A name that has none yet may get IPv4."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if host.startswith("["):
        return True
    try:
        families = {found[0] for found in getaddrinfo(host, port, type=SOCK_STREAM)}
    except OSError:
        return False
    return AF_INET not in families
