"""The two ends of a ZMQ connection: the prefetcher's ROUTER, which takes one trainer, and the trainer's DEALER.

Each is opened by one thread and then used by one other. ZMQ is a pipe, not a promise: what it adds here is framing, connecting in
either order, noticing that the peer is gone, and over tcp encryption. What a gone peer had sent can still be received, but only while
the socket stays connected; so `peer_gone` is acted on after everything was received.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.codec import MAX_FRAME_BYTES, decode, encode, greeted_version
from protocol.errors import ConfigError, RemoteProtocolError
from protocol.messages import PROTOCOL_VERSION, Envelope, Failure, Hello
from protocol.transport.backlog import Connection
from protocol.transport.doors import Door, Way
from protocol.transport.keys import CLIENTS
from protocol.transport.link import MAX_PART_BYTES, Payload, parts_of
from protocol.transport.refusals import Refusals

MAX_CONNECTIONS = 64  # open at once; one is needed
CURVE_BYTES = 64  # what encryption adds to a part, and a little more
MAX_MESSAGE_BYTES = max(MAX_FRAME_BYTES, MAX_PART_BYTES) + CURVE_BYTES  # of one part: what a caller can have us allocate
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

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        """All that wake this end up."""

    @property
    def peer_here(self) -> bool:
        """Whether frames can be sent now, or will be as soon as the connection stands."""

    @property
    def peer_gone(self) -> bool:
        """Whether the connection ended after it had stood; set by `note_events`."""

    def open(self) -> None: ...

    def note_events(self) -> None: ...

    def check_backlog(self) -> None:
        """Now and then: cuts off, or raises RemoteProtocolError for, who sends a message without end."""

    def try_send(self, frame: bytes, payload: memoryview | None) -> None:
        """Copies both. Raises zmq.Again where the queue is full, and zmq.ZMQError with EHOSTUNREACH where the peer is gone."""

    def try_receive(self) -> tuple[bytes, Payload] | None:
        """The peer's next frame, with its payload. Raises zmq.Again where there is none; None is someone else's, already dealt with."""

    def disconnect(self) -> None:
        """The peer is gone, and everything was received: no one else is wanted."""

    def close(self, linger_ms: int) -> None:
        """Waits up to `linger_ms` for what was sent to leave, then frees everything."""


class Router:
    """The prefetcher's end. The first caller that greets is its trainer, and nobody else is heard.

    A caller is known by its connection, which ZMQ makes anew by itself: frames of an earlier incarnation, sent on by a trainer that was
    stopped meanwhile, come like those of a stranger. Hence the greeting.
    """

    def __init__(self, door: Door, refusals: Refusals, limit_bytes: int) -> None:
        """`limit_bytes`: what a peer may have sent that was not received yet."""
        self._door = door
        self._refusals = refusals
        self._limit_bytes = limit_bytes
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._connections: dict[int, Connection] = {}  # by the descriptor that each has now, oldest first
        self._peer: bytes | None = None
        self._peer_connection: Connection | None = None
        self._peer_gone = False
        self._last_refused: bytes | None = None

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        return [self.socket, self.monitor, *self._door.sockets]

    @property
    def peer_here(self) -> bool:
        return self._peer is not None

    @property
    def peer_gone(self) -> bool:
        return self._peer_gone

    def open(self) -> None:
        """Raises ConfigError where this process may not serve here, or the socket cannot be made."""
        self._door.open()
        self._context = zmq.Context()
        self.socket = new_socket(self._context, zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self._door.bind(self._context, self.socket)
        except BaseException:
            self.close(0)
            raise

    def note_events(self) -> None:
        self._door.answer()
        self._read_events()
        while len(self._connections) > MAX_CONNECTIONS:
            self._cut(*next(item for item in self._connections.items() if item[1] is not self._peer_connection))

    def check_backlog(self) -> None:
        if not self._door.has_payloads:
            return
        for descriptor, connection in list(self._connections.items()):
            with suppress(OSError):  # closed already
                if connection.has_backlog(descriptor, self._limit_bytes):
                    self._refusals.note("cut off a caller that sent a message without end")
                    self._cut(descriptor, connection)

    def _read_events(self) -> None:
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connections.pop(event["value"], None)  # so that it goes to the end
                self._connections[event["value"]] = Connection()
            else:
                self._left(self._connections.pop(event["value"], None))

    def _left(self, connection: Connection | None) -> None:
        """None: one that was cut off, and counted then."""
        if connection is None:
            return
        if connection is self._peer_connection:
            self._peer_gone = True
        elif not connection.num_messages:
            self._refusals.note("a caller was turned away before it had got in, or left without a word")

    def _cut(self, descriptor: int, connection: Connection) -> None:
        """So that nobody uses up this process's descriptors and memory, be it before the time for a handshake is over."""
        with suppress(OSError):  # closed already, as an event will tell or has told
            held = os.dup(descriptor)
            try:
                self._read_events()  # a close is told before it is done: if none is told now, what is held is this connection
                if self._connections.get(descriptor) is connection:
                    shut_down(held)
            finally:
                os.close(held)
        if self._connections.get(descriptor) is connection:
            self._left(self._connections.pop(descriptor))

    def try_send(self, frame: bytes, payload: memoryview | None) -> None:
        assert self._peer is not None, "the link looks at peer_here"
        self.socket.send_multipart([self._peer, frame, *parts_of(payload or memoryview(b""))], zmq.NOBLOCK)

    def try_receive(self) -> tuple[bytes, Payload] | None:
        identity, *parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        connection = self._connections.get(int(parts[0].get(zmq.SRCFD))) if parts else None
        if connection is not None:
            connection.deliver(len(parts), sum(len(part.buffer) for part in parts))
        if identity.bytes != self._peer and not self._meet(identity.bytes, parts):
            return None
        return take_apart(parts, has_payloads=self._door.has_payloads)

    def _meet(self, identity: bytes, parts: list[zmq.Frame]) -> bool:
        """Whether the caller is this end's peer from now on."""
        greets = len(parts) == 1 and is_greeting(parts[0].bytes)
        if greets and self._peer is None:
            self._accept(identity, parts[0])
            return True
        if greets:
            self._read_events()
            if self._peer_gone:  # a trainer that was started again: it will call anew, as soon as this end is closed
                return False
            self._refusals.note("refused a second trainer")
            self._refuse(identity)
        else:
            self._refusals.note("dropped a message of someone who is not this run's trainer")
        return False

    def _accept(self, identity: bytes, frame: zmq.Frame) -> None:
        self._read_events()  # that it connected was noted before its first frame; if it left since, it is gone already
        self._peer = identity
        self._peer_connection = self._connections.get(int(frame.get(zmq.SRCFD)))
        self._peer_gone = self._peer_connection is None

    def _refuse(self, identity: bytes) -> None:
        """Says why, once."""
        if identity == self._last_refused:
            return
        self._last_refused = identity
        try:
            self.socket.send_multipart([identity, REFUSAL], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise

    def disconnect(self) -> None:
        """Nothing to do: this end calls nobody."""

    def close(self, linger_ms: int) -> None:
        close_socket(self._context, self.socket, self.monitor, self._door.sockets, linger_ms)
        self._door.close()


class Dealer:
    """The trainer's end. Calls until someone answers, once."""

    def __init__(self, way: Way, refusals: Refusals, limit_bytes: int) -> None:
        """`limit_bytes`: as the Router's."""
        self._way = way
        self._refusals = refusals
        self._limit_bytes = limit_bytes
        self._descriptor: int | None = None
        self._connection = Connection()
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._connected = False
        self._peer_gone = False

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        return [self.socket, self.monitor]

    @property
    def peer_here(self) -> bool:
        return True

    @property
    def peer_gone(self) -> bool:
        return self._peer_gone

    def open(self) -> None:
        """Raises ConfigError where there is no key to show, or no such address."""
        self._context = zmq.Context()
        self.socket = new_socket(self._context, zmq.DEALER)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        try:
            self._way.prepare(self.socket)
            self._connect()
        except BaseException:
            self.close(0)
            raise

    def _connect(self) -> None:
        try:
            self.socket.connect(self._way.endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"transport.endpoint = {self._way.endpoint!r} cannot be called ({zmq.strerror(error.errno or 0)}); correct it"
            ) from error

    def note_events(self) -> None:
        """Raises ConfigError where the prefetcher refuses this trainer's key."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            kind = event["event"]
            if kind == zmq.EVENT_CONNECTED:
                self._descriptor, self._connection = event["value"], Connection()
            elif kind == zmq.EVENT_DISCONNECTED:
                self._descriptor = None
            self._peer_gone |= self._connected and kind == zmq.EVENT_DISCONNECTED
            self._connected |= kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ConfigError(
                    f"the prefetcher at {self._way.endpoint} refuses this trainer's key; put its public part into {CLIENTS}/ of the "
                    f"prefetcher's transport.keys"
                )
            if kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._refusals.note("the prefetcher broke off; is its server.key another one?", endpoint=self._way.endpoint)

    def try_send(self, frame: bytes, payload: memoryview | None) -> None:
        self.socket.send_multipart([frame, *parts_of(payload or memoryview(b""))], zmq.NOBLOCK)

    def try_receive(self) -> tuple[bytes, Payload] | None:
        parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        self._connection.deliver(len(parts), sum(len(part.buffer) for part in parts))
        return take_apart(parts, has_payloads=self._way.has_payloads)

    def check_backlog(self) -> None:
        if not self._way.has_payloads or self._descriptor is None:
            return
        with suppress(OSError):  # closed already
            if self._connection.has_backlog(self._descriptor, self._limit_bytes):
                raise RemoteProtocolError("the prefetcher sent a message without end")

    def disconnect(self) -> None:
        self.socket.disconnect(self._way.endpoint)  # else it would call the next prefetcher that serves there

    def close(self, linger_ms: int) -> None:
        with suppress(ConfigError):  # said before, or nobody asks any more
            self.note_events()
        close_socket(self._context, self.socket, self.monitor, (), linger_ms if self._connected else 0)


def is_greeting(frame: bytes) -> bool:
    """Whether a conversation can begin with this frame, be it that of another version, which will be told so."""
    try:
        envelope = decode(frame)
    except RemoteProtocolError:
        return greeted_version(frame) not in (None, PROTOCOL_VERSION)
    return envelope.sequence == 0 and isinstance(envelope.message, Hello)


def take_apart(parts: Sequence[zmq.Frame], *, has_payloads: bool) -> tuple[bytes, Payload]:
    if len(parts) > 1 and not has_payloads:
        raise RemoteProtocolError(f"a message of {len(parts)} parts arrived; each has 1")
    frame, *payload = parts
    return frame.bytes, tuple(part.buffer for part in payload)


def shut_down(descriptor: int) -> None:
    """Cuts a connection in both directions; the descriptor stays its owner's."""
    connection = socket.socket(fileno=descriptor)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    finally:
        connection.detach()


def new_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    made = context.socket(kind)
    made.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
    made.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    made.setsockopt(zmq.LINGER, 0)  # also for `disconnect`, which would otherwise have the context wait for a gone peer without end
    made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    return made


def close_socket(
    context: "zmq.Context[zmq.Socket[bytes]]",
    main: "zmq.Socket[bytes]",
    monitor: "zmq.Socket[bytes]",
    others: Sequence["zmq.Socket[bytes]"],
    linger_ms: int,
) -> None:
    """Waits up to `linger_ms` for what was sent through `main`."""
    while monitor.poll(0):
        monitor.recv_multipart()  # a full one would have libzmq's thread wait for us, and us for it
    main.disable_monitor()
    monitor.close(linger=0)
    main.close(linger=linger_ms)
    for other in others:
        other.close(linger=0)
    context.term()
