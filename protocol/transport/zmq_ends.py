"""Both ends of a ZMQ connection: a ROUTER that accepts one trainer and no other caller, a DEALER that connects once.

One thread opens an end, and one thread then uses it. ZMQ does not guarantee delivery: it adds framing, connecting in
either order, a notice when the peer is gone, and encryption over tcp. The frames of a gone peer can be received only
while the socket stays connected, so the link acts on `peer_gone` after receiving everything.
"""

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from rowcast.protocol.codec import MAX_FRAME_BYTES, decode, encode, greeted_version
from rowcast.protocol.messages import PROTOCOL_VERSION, Envelope, Failure, Hello
from rowcast.protocol.transport.callers import CLIENTS, Refusals, has_news
from rowcast.protocol.transport.endpoint import Address
from rowcast.protocol.transport.link import MAX_PART_BYTES, Payload, parts_of
from rowcast.runtime.errors import ConfigError, RemoteProtocolError
from rowcast.runtime.machine import OtherProcess, at_other_end

CURVE_BYTES = 64  # slightly more than encryption adds to a part
# the largest frame that a caller can make us allocate
MAX_MESSAGE_BYTES = max(MAX_FRAME_BYTES, MAX_PART_BYTES) + CURVE_BYTES
QUEUE_FRAMES = 2**16  # far more frames than credits and heartbeats allow to wait
RECONNECT_MS, RECONNECT_MAX_MS = 50, 100
MAX_CONNECTIONS = 64  # open at the same time; a run needs one
PART_OVERHEAD_BYTES = 128  # upper limit for framing, encryption and a frame's fraction of the handshake
SLACK_BYTES = 16 * 2**20  # the kernel's buffer, and what libzmq is processing
BYTES_RECEIVED_AT = 128  # tcpi_bytes_received, u64, in Linux's struct tcp_info
REFUSAL = encode(
    Envelope(
        incarnation=0,
        sequence=0,
        message=Failure(
            code=ConfigError.exit_code,
            sentence="another trainer is connected to the prefetcher of this run directory; "
            "stop it or use another run directory",
        ),
    )
)


@dataclass(slots=True, eq=False)
class Connection:
    """What one caller has delivered. libzmq would store an endless message without a limit:

    received by the kernel | ....... delivered to us ....... | backlog |
    """

    num_messages: int = 0
    delivered_bytes: int = 0

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


class ZmqEnd:
    """What both ends share."""

    kind: int  # of the socket
    events: int  # that its monitor reports
    serves: bool

    def __init__(self, address: Address, refusals: Refusals, limit_bytes: int) -> None:
        """`limit_bytes`: how many bytes of a peer may be sent and not yet received."""
        self.peer_gone = False  # the connection was made and has ended; set by `note_events`
        self.peer_process: OtherProcess | None = None  # None before the connection, and if it is not visible from here
        self._address, self._refusals, self._limit_bytes = address, refusals, limit_bytes

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        return [self.socket, self.monitor, *(self._address.sockets if self.serves else ())]

    @property
    def peer_here(self) -> bool:
        """Whether frames can be sent now, or will leave once the connection is made."""
        return True

    def open(self) -> None:
        """Raises ConfigError if this process may not serve here, has no usable key, or cannot make the socket."""
        if self.serves:
            self._address.open()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        made = self.socket = self._context.socket(self.kind)
        made.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
        made.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # otherwise the context would wait forever for a gone peer after `disconnect`
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self.monitor = made.get_monitor_socket(self.events)
        try:
            self._attach()
        except BaseException:
            self.close(0)
            raise

    def _attach(self) -> None:
        """Binds or connects the socket."""
        raise NotImplementedError

    def note_events(self) -> None:
        """Reads what the monitor reports."""
        raise NotImplementedError

    def check_backlog(self) -> None:
        """Cuts off a caller that sends an endless message. Raises RemoteProtocolError if the peer sends one."""
        raise NotImplementedError

    def try_send(self, frame: bytes, payload: memoryview | None) -> None:
        """Copies both. Raises zmq.Again if the queue is full, zmq.ZMQError with EHOSTUNREACH if the peer is gone."""
        parts = [] if payload is None else parts_of(payload)
        self.socket.send_multipart([*self._to(), frame, *parts], zmq.NOBLOCK)

    def _to(self) -> list[bytes]:
        return []

    @property
    def has_arrived(self) -> bool:
        """Whether `receive` would return at once."""
        return has_news(self.socket)

    def receive(self) -> tuple[bytes, Payload] | None:
        """Returns the peer's next frame with its payload; None for a stranger's. Call it only if one has arrived."""
        parts = self._heard(self.socket.recv_multipart(zmq.NOBLOCK, copy=False))
        if parts is None:
            return None
        if len(parts) > 1 and not self._address.has_payloads:
            raise RemoteProtocolError(f"a message of {len(parts)} parts arrived; each has 1")
        return parts[0].bytes, tuple(part.buffer for part in parts[1:])

    def _heard(self, parts: list[zmq.Frame]) -> list[zmq.Frame] | None:
        """The peer's own parts of a message; None if it is a stranger's."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """Disconnects a gone peer after everything is received, so that no other peer connects."""

    def close(self, linger_ms: int) -> None:
        """Waits up to `linger_ms` for sent frames to leave, then frees everything."""
        while has_news(self.monitor):
            self.monitor.recv_multipart()  # with a full monitor, libzmq's thread and this one would wait for each other
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)
        for other in self._address.sockets if self.serves else ():
            other.close(linger=0)
        self._context.term()
        if self.serves:
            self._address.close()


class Router(ZmqEnd):
    """The prefetcher's end. The first caller that greets becomes its trainer; it refuses all other callers.

    A connection identifies a caller, and ZMQ reconnects by itself: frames of an earlier incarnation, from a trainer
    that was stopped meanwhile, look like a stranger's. Hence the greeting."""

    kind, serves = zmq.ROUTER, True
    events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

    def __init__(self, address: Address, refusals: Refusals, limit_bytes: int) -> None:
        super().__init__(address, refusals, limit_bytes)
        self._connections: dict[int, Connection] = {}  # by current descriptor, oldest first
        self._peer: bytes | None = None
        self._peer_connection: Connection | None = None
        self._last_refused: bytes | None = None

    @property
    def peer_here(self) -> bool:
        return self._peer is not None

    def _attach(self) -> None:
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._address.bind(self._context, self.socket)

    def note_events(self) -> None:
        if self._address.sockets:
            self._address.answer()
        self._read_events()
        while len(self._connections) > MAX_CONNECTIONS:
            self._cut_off(*next(item for item in self._connections.items() if item[1] is not self._peer_connection))

    def check_backlog(self) -> None:
        if not self._address.has_payloads:
            return
        for descriptor, connection in list(self._connections.items()):
            with suppress(OSError):  # already closed
                if connection.has_backlog(descriptor, self._limit_bytes):
                    self._refusals.note("cut off a caller that sent a message without end")
                    self._cut_off(descriptor, connection)

    def _read_events(self) -> None:
        while has_news(self.monitor):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connections.pop(event["value"], None)  # the dict keeps the order of arrival
                self._connections[event["value"]] = Connection()
            else:
                self._note_disconnect(self._connections.pop(event["value"], None))

    def _note_disconnect(self, connection: Connection | None) -> None:
        """Counts a closed connection. None: it was cut off and is already counted."""
        if connection is None:
            return
        if connection is self._peer_connection:
            self.peer_gone = True
        elif not connection.num_messages:
            self._refusals.note("a caller was refused, or left without sending a message")

    def _cut_off(self, descriptor: int, connection: Connection) -> None:
        """Frees a caller's descriptor and memory, even while its time for the handshake is still running."""
        with suppress(OSError):  # already closed, as an event reports
            held = os.dup(descriptor)
            try:
                # libzmq reports a close before it closes: if none is reported now, `held` is this connection
                self._read_events()
                if self._connections.get(descriptor) is connection:
                    with borrowed(held) as caller:
                        caller.shutdown(socket.SHUT_RDWR)
            finally:
                os.close(held)
        if self._connections.get(descriptor) is connection:
            self._note_disconnect(self._connections.pop(descriptor))

    def _to(self) -> list[bytes]:
        assert self._peer is not None, "the link checks peer_here"
        return [self._peer]

    def _heard(self, parts: list[zmq.Frame]) -> list[zmq.Frame] | None:
        identity, *parts = parts
        connection = self._connections.get(int(parts[0].get(zmq.SRCFD))) if parts else None
        if connection is not None:
            connection.deliver(parts)
        return parts if identity.bytes == self._peer or self._admit(identity.bytes, parts) else None

    def _admit(self, identity: bytes, parts: list[zmq.Frame]) -> bool:
        greets = len(parts) == 1 and is_greeting(parts[0].bytes)
        if greets and self._peer is None:
            self._accept(identity, int(parts[0].get(zmq.SRCFD)))
            return True
        if greets:
            self._read_events()
            if self.peer_gone:  # a restarted trainer, which will connect again once this end is closed
                return False
            self._refusals.note("refused a second trainer")
            self._refuse(identity)
        else:
            self._refusals.note("dropped a message from a caller that is not this run's trainer")
        return False

    def _accept(self, identity: bytes, descriptor: int) -> None:
        self._read_events()  # it connected before its first frame: without a connection it is already gone
        self._peer = identity
        self._peer_connection, self.peer_process = self._connections.get(descriptor), at_other_end(descriptor)
        self.peer_gone = self._peer_connection is None

    def _refuse(self, identity: bytes) -> None:
        """Sends the caller the reason, once."""
        if identity == self._last_refused:
            return
        self._last_refused = identity
        try:
            self.socket.send_multipart([identity, REFUSAL], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise


class Dealer(ZmqEnd):
    """The trainer's end. It retries until a prefetcher answers, and never reconnects after that one is gone."""

    kind, serves = zmq.DEALER, False
    events = (
        zmq.EVENT_CONNECTED
        | zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    )

    def __init__(self, address: Address, refusals: Refusals, limit_bytes: int) -> None:
        super().__init__(address, refusals, limit_bytes)
        self._descriptor: int | None = None
        self._connection = Connection()
        self._connected = False

    def _attach(self) -> None:
        self._address.prepare(self.socket)
        try:
            self.socket.connect(self._address.endpoint)
        except zmq.ZMQError as error:
            why = zmq.strerror(error.errno or 0)
            raise ConfigError(
                f"transport.endpoint = {self._address.endpoint!r} cannot be connected to ({why}); correct it"
            ) from error

    def note_events(self) -> None:
        """Raises ConfigError if the prefetcher refuses this trainer's key."""
        while has_news(self.monitor):
            event = recv_monitor_message(self.monitor)
            kind = event["event"]
            if kind == zmq.EVENT_CONNECTED:
                self._descriptor, self._connection = event["value"], Connection()
                self.peer_process = at_other_end(self._descriptor)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._descriptor = None
            self.peer_gone |= self._connected and kind == zmq.EVENT_DISCONNECTED
            self._connected |= kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ConfigError(
                    f"the prefetcher at {self._address.endpoint} refuses this trainer's key; "
                    f"put its public part into {CLIENTS}/ of the prefetcher's transport.keys"
                )
            if kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._refusals.note(
                    "the prefetcher ended the handshake; does it have another server.key?",
                    endpoint=self._address.endpoint,
                )

    def check_backlog(self) -> None:
        if not self._address.has_payloads or self._descriptor is None:
            return
        with suppress(OSError):  # already closed
            if self._connection.has_backlog(self._descriptor, self._limit_bytes):
                raise RemoteProtocolError("the prefetcher sent a message without end")

    def _heard(self, parts: list[zmq.Frame]) -> list[zmq.Frame] | None:
        self._connection.deliver(parts)
        return parts

    def disconnect(self) -> None:
        self.socket.disconnect(self._address.endpoint)  # otherwise ZMQ would connect to the next prefetcher there

    def close(self, linger_ms: int) -> None:
        with suppress(ConfigError):  # already raised, or irrelevant by now
            self.note_events()
        super().close(linger_ms if self._connected else 0)


def is_greeting(frame: bytes) -> bool:
    """Returns whether a conversation can begin with this frame, even one of a different version, which then gets an
    answer."""
    try:
        envelope = decode(frame)
    except RemoteProtocolError:
        return greeted_version(frame) not in (None, PROTOCOL_VERSION)
    return envelope.sequence == 0 and isinstance(envelope.message, Hello)
