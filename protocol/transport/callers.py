"""Who may call: loads the CURVE keys of a run, checks that other users cannot change them, and admits callers by them.

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

The connections of a socket that listens. Above a limit, the oldest strangers' are cut off.

libzmq accepts whoever connects, and keeps a caller without a key until its time for the handshake is over. The run's
callers are those whose messages were taken (`is_known`): they are never cut off.
"""

import hashlib
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from rowcast.runtime.errors import ConfigError
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
    found = sorted((keys / CLIENTS).glob(f"*{SECRET_END}"))
    if len(found) != 1:
        raise ConfigError(
            f"{keys / CLIENTS} holds {len(found)} secret keys (*{SECRET_END}); "
            "leave this trainer's own there, and no other"
        )
    return load_pair(found[0]), load_public(keys / f"{SERVER}{PUBLIC_END}")


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
        found = path.stat()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be used ({error.strerror}); set transport.keys to a folder that `prefetcher keys` made"
        ) from error
    if stat.S_IFMT(found.st_mode) != kind or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & ~most:
        raise ConfigError(
            f"{path} must be {name} of user {os.getuid()} with no more than mode {most:04o}, but it belongs to user "
            f"{found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}; {remedy}"
        )


def has_news(own: "zmq.Socket[bytes]") -> bool:
    """Costs less than a poll, and than an error where nothing has arrived."""
    return bool(int(own.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def next_message(own: "zmq.Socket[bytes]") -> list[zmq.Frame]:
    """Returns [] if there is none: of a message in parts, a connection that broke leaves nothing but the news."""
    try:
        return own.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return []


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
            while has_news(asked):
                asked.send_multipart(self._answer_to(asked.recv_multipart(zmq.NOBLOCK)))

    def _answer_to(self, request: list[bytes]) -> list[bytes]:
        _, request_id, _, address, _, mechanism, *credentials = request  # RFC 27, version 1.0, from our own libzmq
        name = self._name_of(credentials[0]) if mechanism == b"CURVE" and credentials else None
        if name is None:
            self._refuse(address.decode(errors="replace"), credentials)
        status = self.REFUSED if name is None else (b"200", b"OK")
        return [ZAP_VERSION, request_id, *status, (name or "").encode(), b""]

    def _name_of(self, raw_key: bytes) -> str | None:
        try:
            return allowed_clients(self._keys).get(z85.encode(raw_key))
        except (OSError, ValueError):
            return None

    def _refuse(self, address: str, credentials: list[bytes]) -> None:
        key = fingerprint(z85.encode(credentials[0])) if credentials else "none"
        # the router counts it when it disconnects
        self._refusals.say(f"refused a caller whose key is not in {CLIENTS}/", address=address, key=key)


MOST_STRANGERS = 64
PART_OVERHEAD_BYTES = 128  # upper limit for framing, encryption and a frame's fraction of the handshake
SLACK_BYTES = 16 * 2**20  # the kernel's buffer, and what libzmq is processing
BYTES_RECEIVED_AT = 128  # tcpi_bytes_received, u64, in Linux's struct tcp_info


@dataclass(slots=True, eq=False)
class Connection:
    """What one caller has delivered. libzmq would store an endless message without a limit:

    received by the kernel | ....... delivered to us ....... | backlog |
    """

    num_messages: int = 0
    delivered_bytes: int = 0
    is_known: bool = False

    def deliver(self, parts: Sequence[zmq.Frame]) -> None:
        self.num_messages += 1
        self.delivered_bytes += sum(len(part.buffer) + PART_OVERHEAD_BYTES for part in parts)

    def has_backlog(self, descriptor: int, limit_bytes: int) -> bool:
        """Returns whether more than `limit_bytes` are outstanding: our messages never need that. Raises OSError if the
        descriptor is not a connection."""
        with borrowed(descriptor) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED_AT + 8)
        received = int(struct.unpack_from("Q", info, BYTES_RECEIVED_AT)[0])
        return received - self.delivered_bytes > limit_bytes + SLACK_BYTES


@contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The socket of a descriptor that stays open."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


class Connections:
    """Used by the thread that has the socket."""

    EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
    monitor: "zmq.Socket[bytes]"  # of the socket, for EVENTS; set before the first call

    def __init__(self, most: int, refusals: Refusals, on_end: Callable[[Connection], None]) -> None:
        """`most`: that may be open. Calls `on_end` once for each that was cut off or has ended."""
        self._most, self._refusals, self._on_end = most, refusals, on_end
        self._open: dict[int, Connection] = {}  # by current descriptor, oldest first

    def of(self, frame: zmq.Frame) -> Connection | None:
        """Returns the connection that a frame came from; None if it has ended."""
        return self._open.get(int(frame.get(zmq.SRCFD)))

    def read_events(self) -> None:
        while has_news(self.monitor):
            event = recv_monitor_message(self.monitor)
            ended = self._open.pop(event["value"], None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open[event["value"]] = Connection()  # the dict keeps the order of arrival
            elif ended is not None:  # otherwise it was cut off
                self._on_end(ended)

    def limit(self) -> None:
        """Reads events, and cuts off the oldest strangers above the limit."""
        self.read_events()
        strangers = [item for item in self._open.items() if not item[1].is_known]
        for descriptor, connection in strangers[: max(0, len(self._open) - self._most)]:
            self._refusals.say("cut off the oldest caller, as too many were connected", most=self._most)
            self._cut_off(descriptor, connection)

    def cut_off_endless(self, limit_bytes: int) -> None:
        """Cuts off callers with more than `limit_bytes` outstanding."""
        for descriptor, connection in list(self._open.items()):
            with suppress(OSError):  # already closed
                if connection.has_backlog(descriptor, limit_bytes):
                    self._refusals.note("cut off a caller that sent a message without end")
                    self._cut_off(descriptor, connection)

    def _cut_off(self, descriptor: int, connection: Connection) -> None:
        """Frees a caller's descriptor and memory, even while its time for the handshake is still running."""
        with suppress(OSError):  # already closed, as an event reports
            held = os.dup(descriptor)
            try:
                # libzmq reports a close before it closes: if none is reported now, `held` is this connection
                self.read_events()
                if self._open.get(descriptor) is connection:
                    with borrowed(held) as caller:
                        caller.shutdown(socket.SHUT_RDWR)
            finally:
                os.close(held)
        if self._open.get(descriptor) is connection:
            self._on_end(self._open.pop(descriptor))
