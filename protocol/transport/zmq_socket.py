"""The two ends of a ZMQ connection over a unix socket: the prefetcher's ROUTER, which takes one trainer, and the trainer's DEALER.

Each is opened by one thread and then used by one other. ZMQ is a pipe, not a promise: what it adds here is framing, connecting in
either order, and noticing that the peer is gone. What a gone peer had sent can still be received, but only while the socket stays
connected; so `peer_gone` is acted on after everything was received.
"""

from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.codec import MAX_FRAME_BYTES, encode
from protocol.errors import ConfigError, RemoteProtocolError
from protocol.messages import Envelope, Failure
from protocol.transport.endpoint import EndpointLock, make_private, socket_path

QUEUE_FRAMES = 2**16  # far above what credits and heartbeats can let wait
RECONNECT_MS, RECONNECT_MAX_MS = 50, 100
REFUSAL = encode(
    Envelope(
        incarnation=0,
        sequence=0,
        message=Failure(
            code=ConfigError.exit_code,
            sentence="another trainer is connected to the prefetcher of this run directory; stop it or use another run directory",
        ),
    )
)


class SocketEnd(Protocol):
    """What `ZmqLink` needs of either end."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    refused: int  # trainers turned away

    @property
    def peer_here(self) -> bool:
        """Whether frames can be sent now, or will be as soon as the connection stands."""

    @property
    def peer_gone(self) -> bool:
        """Whether the connection ended after it had stood; set by `note_events`."""

    def open(self) -> None: ...

    def note_events(self) -> None: ...

    def try_send(self, frame: bytes) -> None:
        """Raises zmq.Again where the queue is full, and zmq.ZMQError with EHOSTUNREACH where the peer is gone."""

    def try_receive(self) -> bytes | None:
        """The peer's next frame. Raises zmq.Again where there is none; None is a frame of someone else's, already dealt with."""

    def disconnect(self) -> None:
        """The peer is gone, and everything was received: no one else is wanted."""

    def close(self, linger_ms: int) -> None:
        """Waits up to `linger_ms` for what was sent to leave, then frees everything."""


class Router:
    """The prefetcher's end. Only one process may serve a run directory, and only the first trainer is taken."""

    def __init__(self, run_dir: Path, directory: Path | None) -> None:
        self.refused = 0
        self._path = socket_path(run_dir, directory)
        self._lock = EndpointLock(self._path, run_dir)
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._connections: dict[int, object] = {}  # descriptor -> the connection that has it now
        self._peer: bytes | None = None
        self._peer_connection: object | None = None
        self._peer_gone = False
        self._last_refused: bytes | None = None

    @property
    def peer_here(self) -> bool:
        return self._peer is not None

    @property
    def peer_gone(self) -> bool:
        return self._peer_gone

    def open(self) -> None:
        """Raises ConfigError where another process serves the run directory, or the socket cannot be made."""
        make_private(self._path.parent)
        self._lock.acquire()
        self._context = zmq.Context()
        self.socket = new_socket(self._context, zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self.socket.bind(f"ipc://{self._path}")
        except zmq.ZMQError as error:
            self.close(0)
            raise ConfigError(f"the socket {self._path} cannot be made ({error.strerror}); check its directory") from error

    def note_events(self) -> None:
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connections[event["value"]] = object()
            else:
                connection = self._connections.pop(event["value"], None)
                self._peer_gone |= self.peer_here and connection is self._peer_connection

    def try_send(self, frame: bytes) -> None:
        assert self._peer is not None, "the link looks at peer_here"
        self.socket.send_multipart([self._peer, frame], zmq.NOBLOCK)

    def try_receive(self) -> bytes | None:
        parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        identity = parts[0].bytes
        if self._peer is None:
            self._accept(identity, parts[-1])
        if identity != self._peer:
            self._refuse(identity)
            return None
        if len(parts) != 2:
            raise RemoteProtocolError(f"a message of {len(parts) - 1} parts arrived; each has 1")
        return parts[1].bytes

    def _accept(self, identity: bytes, frame: zmq.Frame) -> None:
        self.note_events()  # that it connected was noted before its first frame; if it left since, it is gone already
        self._peer = identity
        self._peer_connection = self._connections.get(int(frame.get(zmq.SRCFD)))
        self._peer_gone = self._peer_connection is None

    def _refuse(self, identity: bytes) -> None:
        if identity == self._last_refused:
            return
        self.refused += 1
        self._last_refused = identity
        try:
            self.socket.send_multipart([identity, REFUSAL], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise

    def disconnect(self) -> None:
        """Nothing to do: this end calls nobody."""

    def close(self, linger_ms: int) -> None:
        close_socket(self._context, self.socket, self.monitor, linger_ms)
        self._path.unlink(missing_ok=True)
        self._lock.release()


class Dealer:
    """The trainer's end. Calls until someone answers, once."""

    def __init__(self, run_dir: Path, directory: Path | None) -> None:
        self.refused = 0
        self._endpoint = f"ipc://{socket_path(run_dir, directory)}"
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._connected = False
        self._peer_gone = False

    @property
    def peer_here(self) -> bool:
        return True

    @property
    def peer_gone(self) -> bool:
        return self._peer_gone

    def open(self) -> None:
        self._context = zmq.Context()
        self.socket = new_socket(self._context, zmq.DEALER)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.socket.connect(self._endpoint)

    def note_events(self) -> None:
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            self._peer_gone |= self._connected and event["event"] == zmq.EVENT_DISCONNECTED
            self._connected |= event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def try_send(self, frame: bytes) -> None:
        self.socket.send(frame, zmq.NOBLOCK)

    def try_receive(self) -> bytes | None:
        parts = self.socket.recv_multipart(zmq.NOBLOCK)
        if len(parts) != 1:
            raise RemoteProtocolError(f"a message of {len(parts)} parts arrived; each has 1")
        return parts[0]

    def disconnect(self) -> None:
        self.socket.disconnect(self._endpoint)  # else it would call the next prefetcher of this run directory

    def close(self, linger_ms: int) -> None:
        self.note_events()
        close_socket(self._context, self.socket, self.monitor, linger_ms if self._connected else 0)


def new_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    return socket


def close_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]", linger_ms: int
) -> None:
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=linger_ms)
    context.term()
