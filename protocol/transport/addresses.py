"""Binds or connects the socket: a file that only this user can reach, or a tcp port that accepts only known keys."""

from collections.abc import Sequence
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, getaddrinfo
from typing import Protocol

import zmq

from rowcast.protocol.transport.auth import DOMAIN, ClientAuth
from rowcast.protocol.transport.curve_keys import load_client, load_server
from rowcast.protocol.transport.endpoint import EndpointLock, make_private, remove_dead, socket_path
from rowcast.protocol.transport.refusals import Refusals
from rowcast.runtime.errors import ConfigError, advice

Context = zmq.Context[zmq.Socket[bytes]]
HANDSHAKE_MS = 5000  # a caller that does not prove its key within this time is cut off
BACKLOG = 64


class BindAddress(Protocol):
    """The serving side. Call `open`, then `bind`, `answer` when one of `sockets` is ready, and `close` after they are.

    The caller of `bind` polls and closes `sockets`."""

    has_payloads: bool  # True if the two ends share no memory

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        """The address's additional sockets, once bound."""

    def open(self) -> None:
        """Prepares the address, before there is a socket. Raises ConfigError if this process may not serve here."""

    def bind(self, context: Context, socket: "zmq.Socket[bytes]") -> None:
        """Raises ConfigError if the socket cannot be made."""

    def answer(self) -> None: ...

    def close(self) -> None:
        """Frees the address. Called after a failed `bind` too."""


class BindFile:
    """A unix socket named after the run directory. One process may serve it."""

    has_payloads = False
    sockets: Sequence["zmq.Socket[bytes]"] = ()

    def __init__(self, run_dir: Path, directory: Path | None) -> None:
        self._path = socket_path(run_dir, directory)
        self._lock = EndpointLock(self._path, run_dir)

    def open(self) -> None:
        make_private(self._path.parent)
        remove_dead(self._path.parent)
        self._lock.acquire()

    def bind(self, context: Context, socket: "zmq.Socket[bytes]") -> None:
        try:
            socket.bind(f"ipc://{self._path}")
        except zmq.ZMQError as error:
            change = advice(error.errno, "check its directory")
            raise ConfigError(f"the socket {self._path} cannot be made ({error.strerror}); {change}") from error

    def answer(self) -> None:
        """Does nothing: the file's mode keeps other users out."""

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._lock.release()


class BindTcp:
    """A tcp port. All traffic is encrypted, and no frame of a caller without an allowed key is read."""

    has_payloads = True

    def __init__(self, endpoint: str, keys: Path, refusals: Refusals) -> None:
        self.bound: str | None = None  # the endpoint with its numeric address and port
        self._endpoint = endpoint
        self._keys = keys
        self._auth = ClientAuth(keys, refusals)

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
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
        limit_tcp(socket, self._endpoint)
        try:
            socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            why = zmq.strerror(error.errno or 0)
            raise ConfigError(
                f"transport.endpoint = {self._endpoint!r} cannot be served ({why}); name a free port and an address "
                'of this host, or "0.0.0.0" for all of them'
            ) from error
        self.bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def answer(self) -> None:
        self._auth.answer()

    def close(self) -> None:
        """Does nothing: a port leaves nothing to remove."""


class ConnectAddress(Protocol):
    """The calling side."""

    endpoint: str
    has_payloads: bool

    def prepare(self, socket: "zmq.Socket[bytes]") -> None:
        """Sets up the socket before it connects. Raises ConfigError if this process has no usable key."""


class ConnectFile:
    has_payloads = False

    def __init__(self, run_dir: Path, directory: Path | None) -> None:
        self.endpoint = f"ipc://{socket_path(run_dir, directory)}"

    def prepare(self, socket: "zmq.Socket[bytes]") -> None:
        """Does nothing: a unix socket needs no preparation."""


class ConnectTcp:
    """Connects only to the prefetcher that has the secret of `server.key`."""

    has_payloads = True

    def __init__(self, endpoint: str, keys: Path) -> None:
        self.endpoint = endpoint
        self._keys = keys

    def prepare(self, socket: "zmq.Socket[bytes]") -> None:
        pair, server = load_client(self._keys)
        socket.curve_serverkey = server
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        limit_tcp(socket, self.endpoint)


def limit_tcp(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 0)  # our heartbeats notice earlier that a peer is gone
    socket.setsockopt(zmq.IPV6, int(is_ipv6(endpoint)))


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
