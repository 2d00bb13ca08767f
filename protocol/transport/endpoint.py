"""Where the two ends of a run meet: a unix socket that only this user can reach, or a tcp port that accepts known keys.

    <directory>/<hash>.sock     named after the run directory; bound by the process that serves the run
                <hash>.lock     locked by it as long as it lives

A killed process leaves both files. The next process that serves any run there can take their lock, and removes them.

    keys/                    0700
      server.key             the prefetcher's public key: a trainer connects to no other prefetcher
      server.key_secret      0600, only on the prefetcher's host
      clients/               0700
        NAME.key             a trainer that may connect; removing the file excludes it
        NAME.key_secret      0600, only on that trainer's host

Files have the format of `zmq.auth` certificates. On one host both sides may use the same folder; a trainer on another
host needs only `server.key` and its `clients/NAME.key_secret`. `prefetcher keys` makes and checks them.

    caller -- CURVE handshake --> socket -- ZAP request: address, public key --> ClientAuth.answer, on the link's thread
                                         <-- 200, or 400 --------------------
"""

import hashlib
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, getaddrinfo

import xxhash
import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from rowcast.job.schema import Transport
from rowcast.runtime.disk import try_lock
from rowcast.runtime.errors import ConfigError, advice
from rowcast.runtime.telemetry.logs import get_logger

ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # RFC 27
ZAP_VERSION = b"1.0"
DOMAIN = b"rowcast"
SERVER = "server"
CLIENTS = "clients"
PUBLIC_END, SECRET_END = ".key", ".key_secret"
KEY_BYTES = 32
LOG_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPair:
    public: bytes  # z85, 40 characters
    secret: bytes = field(repr=False)  # z85, 40 characters


def fingerprint(public: bytes) -> str:
    """Names a key in logs: 16 hex digits of the SHA-256 of the z85 public key."""
    return hashlib.sha256(public).hexdigest()[:16]


def load_server(keys: Path) -> KeyPair:
    """Returns the prefetcher's pair. Raises ConfigError."""
    check_folder(keys)
    check_folder(keys / CLIENTS)
    return load_pair(keys / f"{SERVER}{SECRET_END}")


def load_client(keys: Path) -> tuple[KeyPair, bytes]:
    """Returns the trainer's pair and the prefetcher's public key. Raises ConfigError."""
    check_folder(keys)
    check_folder(keys / CLIENTS)
    secrets = sorted((keys / CLIENTS).glob(f"*{SECRET_END}"))
    if len(secrets) != 1:
        raise ConfigError(
            f"{keys / CLIENTS} holds {len(secrets)} secret keys (*{SECRET_END}); "
            "leave this trainer's own there, and no other"
        )
    return load_pair(secrets[0]), load_public(keys / f"{SERVER}{PUBLIC_END}")


def allowed_clients(keys: Path) -> dict[bytes, str]:
    """Maps the public key of every trainer that may connect now to its name. A bad file admits no trainer."""
    allowed = {}
    for path in sorted((keys / CLIENTS).glob(f"*{PUBLIC_END}")):
        try:
            allowed[load_public(path)] = path.stem
        except ConfigError:
            continue  # `prefetcher keys --check` names it
    return allowed


def load_pair(path: Path) -> KeyPair:
    """Raises ConfigError if other users could read the secret, or the two keys do not match."""
    _check_owned(path, stat.S_IFREG, 0o600, "a file", f"chmod 600 {path}")
    public, secret = _load(path)
    if secret is None or not _is_key(secret):
        raise ConfigError(f"{path} holds no secret key; make a new one with `prefetcher keys`")
    if zmq.curve_public(secret) != public:
        raise ConfigError(
            f"the public and the secret key in {path} do not belong together; make new ones with `prefetcher keys`"
        )
    return KeyPair(public=public, secret=secret)


def load_public(path: Path) -> bytes:
    """Raises ConfigError if other users could have changed the file, or if it holds a secret, which must not be
    copied."""
    _check_owned(path, stat.S_IFREG, 0o755, "a file", f"chmod 644 {path}")
    public, secret = _load(path)
    if secret is not None:
        raise ConfigError(f"{path} is for a public key, but holds a secret one; make new ones with `prefetcher keys`")
    return public


def check_folder(folder: Path) -> None:
    """Raises ConfigError if other users could add keys there."""
    _check_owned(folder, stat.S_IFDIR, 0o755, "a folder", f"chmod 700 {folder}")


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} holds no key ({error}); make a new one with `prefetcher keys`") from error
    if not _is_key(public):
        raise ConfigError(f"{path} holds no public key of 40 characters; make a new one with `prefetcher keys`")
    return public, secret


def _is_key(text: bytes) -> bool:
    try:
        return len(z85.decode(text)) == KEY_BYTES
    except (ValueError, KeyError, struct.error):
        return False


def _check_owned(path: Path, kind: int, most: int, name: str, remedy: str) -> None:
    """Raises ConfigError unless the path is of this kind, belongs to this user, and has no mode bits beyond `most`."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be used ({error.strerror}); set transport.keys to a folder that `prefetcher keys` made"
        ) from error
    if stat.S_IFMT(status.st_mode) != kind or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & ~most:
        raise ConfigError(
            f"{path} must be {name} of user {os.getuid()} with no more than mode {most:04o}, but it belongs to user "
            f"{status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}; {remedy}"
        )


class Refusals:
    """Counts refused frames and callers, and logs them at a limited rate, so that no caller can flood the log.

    Used by the link's thread; any thread may read `count`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0  # frames of strangers, and refused callers
        self._clock = clock
        # sentence -> time of its last log line, and number of lines suppressed since
        self._logged: dict[str, tuple[float, int]] = {}

    def note(self, what: str, **context: object) -> None:
        self.count += 1
        self.say(what, **context)

    def say(self, what: str, **context: object) -> None:
        """Logs `what`, a fixed sentence, at most once in `LOG_EVERY_S`, with the number suppressed since."""
        last_s, num_suppressed = self._logged.get(what, (None, 0))
        now_s = self._clock()
        if last_s is not None and now_s - last_s < LOG_EVERY_S:
            self._logged[what] = (last_s, num_suppressed + 1)
            return
        self._logged[what] = (now_s, 0)
        get_logger().warning(what, **context, more=num_suppressed)


class ClientAuth:
    """The prefetcher's ZAP handler. Call `open` before the guarded socket is bound; close `sockets` after that socket.

    The keys are reread for each caller, so removing a file excludes its holder without a restart. Any error refuses the
    caller."""

    REFUSED = (b"400", b"this key is not allowed")  # the caller does not try again

    def __init__(self, keys: Path, refusals: Refusals) -> None:
        self.sockets: list[zmq.Socket[bytes]] = []  # the socket that receives requests, once it is open
        self._keys = keys
        self._refusals = refusals

    def open(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.sockets.append(context.socket(zmq.REP))
        self.sockets[0].bind(ZAP_ENDPOINT)

    def answer(self) -> None:
        for asked in self.sockets:
            while int(asked.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                # RFC 27, version 1.0, from our own libzmq
                _, request_id, _, address, _, mechanism, *credentials = asked.recv_multipart(zmq.NOBLOCK)
                name = self._name_of(credentials[0]) if mechanism == b"CURVE" and credentials else None
                if name is None:
                    self._refuse(address.decode(errors="replace"), credentials)
                status = self.REFUSED if name is None else (b"200", b"OK")
                asked.send_multipart([ZAP_VERSION, request_id, *status, (name or "").encode(), b""])

    def _name_of(self, raw_key: bytes) -> str | None:
        try:
            return allowed_clients(self._keys).get(z85.encode(raw_key))
        except (OSError, ValueError):
            return None

    def _refuse(self, address: str, credentials: list[bytes]) -> None:
        key = fingerprint(z85.encode(credentials[0])) if credentials else "none"
        # the router counts it when it disconnects
        self._refusals.say(f"refused a caller whose key is not in {CLIENTS}/", address=address, key=key)


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
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must be a directory of user {os.getuid()} with mode 0700, but it belongs to user "
            f"{status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}; remove it or set XDG_RUNTIME_DIR"
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


def remove_if_dead(lock: Path, socket: Path) -> None:
    """Raises OSError, ConfigError."""
    descriptor = os.open(lock, LOCK_FLAGS)
    try:
        if not try_lock(descriptor, lock):
            return
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
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
        for lock in self._path.parent.iterdir():  # left by processes that were killed
            if LOCK_NAME.fullmatch(lock.name):
                with suppress(OSError, ConfigError):  # the file is not ours, or cannot be locked
                    remove_if_dead(lock, lock.with_suffix(".sock"))
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
        self.sockets: Sockets = self._auth.sockets

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
        families = {address[0] for address in getaddrinfo(host, port, type=SOCK_STREAM)}
    except OSError:
        return False
    return AF_INET not in families
