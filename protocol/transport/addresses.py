"""Where the prefetcher's socket can be found: a file that only this user can reach, or a tcp port where only known keys get in."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq

from rowcast.protocol.transport.auth import DOMAIN, ClientAuth
from rowcast.protocol.transport.curve_keys import load_client, load_server
from rowcast.protocol.transport.endpoint import EndpointLock, make_private, socket_path
from rowcast.protocol.transport.refusals import Refusals
from rowcast.runtime.errors import ConfigError

Context = zmq.Context[zmq.Socket[bytes]]
HANDSHAKE_MS = 5000  # a caller that has not proved its key by then is cut off
BACKLOG = 64


class BindAddress(Protocol):
    """The serving side. `open`, then `bind`; `answer` when one of `sockets` is ready; `close` when they and their context are closed."""

    has_payloads: bool  # whether the two ends share no memory

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        """The door's own, once it is bound; whoever bound it polls and closes them."""

    def open(self) -> None:
        """Before there is a socket. Raises ConfigError where this process may not serve here."""

    def bind(self, context: Context, socket: "zmq.Socket[bytes]") -> None:
        """Raises ConfigError where the socket cannot be made."""

    def answer(self) -> None: ...

    def close(self) -> None:
        """Also after a `bind` that failed."""


class BindFile:
    """A unix socket named by the run directory, which one process may serve."""

    has_payloads = False
    sockets: Sequence["zmq.Socket[bytes]"] = ()

    def __init__(self, run_dir: Path, directory: Path | None) -> None:
        self._path = socket_path(run_dir, directory)
        self._lock = EndpointLock(self._path, run_dir)

    def open(self) -> None:
        make_private(self._path.parent)
        self._lock.acquire()

    def bind(self, context: Context, socket: "zmq.Socket[bytes]") -> None:
        try:
            socket.bind(f"ipc://{self._path}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"the socket {self._path} cannot be made ({error.strerror}); check its directory"
            ) from error

    def answer(self) -> None:
        """Nobody asks."""

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._lock.release()


class BindTcp:
    """A tcp port. Everything is encrypted, and a caller that holds no allowed key is never heard."""

    has_payloads = True

    def __init__(self, endpoint: str, keys: Path, refusals: Refusals) -> None:
        self.bound: str | None = None  # the endpoint in numbers
        self._endpoint = endpoint
        self._keys = keys
        self._gatekeeper = ClientAuth(keys, refusals)

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        return self._gatekeeper.sockets

    def open(self) -> None:
        load_server(self._keys)

    def bind(self, context: Context, socket: "zmq.Socket[bytes]") -> None:
        pair = load_server(self._keys)
        self._gatekeeper.open(context)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it, no answer from the gatekeeper would let everybody in
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        limit_tcp(socket, self._endpoint)
        try:
            socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            why = zmq.strerror(error.errno or 0)
            raise ConfigError(
                f"transport.endpoint = {self._endpoint!r} cannot be served ({why}); name a free port and an address of this host, "
                'or "0.0.0.0" for all of them'
            ) from error
        self.bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def answer(self) -> None:
        self._gatekeeper.answer()

    def close(self) -> None:
        """A port has nothing to take away."""


class ConnectAddress(Protocol):
    """The calling side."""

    endpoint: str
    has_payloads: bool

    def prepare(self, socket: "zmq.Socket[bytes]") -> None:
        """Before it connects. Raises ConfigError where this process has no key to show."""


class ConnectFile:
    has_payloads = False

    def __init__(self, run_dir: Path, directory: Path | None) -> None:
        self.endpoint = f"ipc://{socket_path(run_dir, directory)}"

    def prepare(self, socket: "zmq.Socket[bytes]") -> None:
        """A unix socket needs nothing."""


class ConnectTcp:
    """To the prefetcher that holds the secret of `server.key`, and no other."""

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
    socket.setsockopt(zmq.TCP_KEEPALIVE, 0)  # our own heartbeats notice a peer that is gone, and sooner
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
