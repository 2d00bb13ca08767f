"""Both ends of a ZMQ connection: a ROUTER that accepts one trainer and no other caller, a DEALER that connects once.

One thread opens an end, and one thread then uses it. ZMQ does not guarantee delivery: it adds framing, connecting in
either order, a notice when the peer is gone, and encryption over tcp. The frames of a gone peer can be received only
while the socket stays connected, so the link acts on `peer_gone` after receiving everything.

If the two ends share no memory, the bytes of a message's payload follow its frame in the same message:

    | frame | payload ... | payload ... |          parts of at most MAX_PART_BYTES; none without a payload
"""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from socket import IPPROTO_TCP, SHUT_RDWR, TCP_INFO, socket

import zmq
from zmq.utils.monitor import recv_monitor_message

from rowcast.protocol.messages import PROTOCOL_VERSION, Envelope, Failure, Hello
from rowcast.protocol.session import MAX_FRAME_BYTES, decode, encode, greeted_version
from rowcast.protocol.transport.endpoint import CLIENTS, Address, Refusals
from rowcast.protocol.transport.ring import Payload
from rowcast.runtime.errors import ConfigError, RemoteProtocolError
from rowcast.runtime.machine import OtherProcess, at_other_end

# an unknown caller can make us allocate the largest part, so a long payload travels in several
MAX_PART_BYTES = 2**20
MOST_STRANGERS = 64
PART_OVERHEAD_BYTES = 128  # upper limit for framing, encryption and a frame's fraction of the handshake
SLACK_BYTES = 16 * 2**20  # the kernel's buffer, and what libzmq is processing
BYTES_RECEIVED_AT = 128  # tcpi_bytes_received, u64, in Linux's struct tcp_info
CURVE_BYTES = 64  # slightly more than encryption adds to a part
# the largest frame that a caller can make us allocate
MAX_MESSAGE_BYTES = max(MAX_FRAME_BYTES, MAX_PART_BYTES) + CURVE_BYTES
QUEUE_FRAMES = 2**16  # far more frames than credits and heartbeats allow to wait
RECONNECT_MS, RECONNECT_MAX_MS = 50, 100
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


def has_news(zmq_socket: "zmq.Socket[bytes]") -> bool:
    """Costs less than a poll, and than an error where nothing has arrived."""
    return bool(int(zmq_socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def next_message(zmq_socket: "zmq.Socket[bytes]") -> list[zmq.Frame]:
    """Returns [] if there is none. Of a message in parts, a broken connection leaves only its event."""
    try:
        return zmq_socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return []


@dataclass(slots=True, eq=False)
class OpenConnection:
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
            info = connection.getsockopt(IPPROTO_TCP, TCP_INFO, BYTES_RECEIVED_AT + 8)
        received = int(struct.unpack_from("Q", info, BYTES_RECEIVED_AT)[0])
        return received - self.delivered_bytes > limit_bytes + SLACK_BYTES


@contextmanager
def borrowed(descriptor: int) -> Iterator[socket]:
    """The socket of a descriptor that stays open."""
    connection = socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


class Connections:
    """The connections of a socket that listens. Above a limit, the oldest strangers' are cut off.

    libzmq accepts whoever connects, and keeps a caller without a key until its time for the handshake is over. The
    run's callers are those whose messages were taken (`is_known`): they are never cut off. Used by the thread that has
    the socket."""

    EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
    monitor: "zmq.Socket[bytes]"  # of the socket, for EVENTS; set before the first call

    def __init__(self, most: int, refusals: Refusals, on_end: Callable[[OpenConnection], None]) -> None:
        """`most`: that may be open. Calls `on_end` once for each that was cut off or has ended."""
        self._most, self._refusals, self._on_end = most, refusals, on_end
        self._open: dict[int, OpenConnection] = {}  # by current descriptor, oldest first

    def of(self, frame: zmq.Frame) -> OpenConnection | None:
        """Returns the connection that a frame came from; None if it has ended."""
        return self._open.get(int(frame.get(zmq.SRCFD)))

    def read_events(self) -> None:
        while has_news(self.monitor):
            event = recv_monitor_message(self.monitor)
            ended = self._open.pop(event["value"], None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open[event["value"]] = OpenConnection()  # the dict keeps the order of arrival
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

    def _cut_off(self, descriptor: int, connection: OpenConnection) -> None:
        """Frees a caller's descriptor and memory, even while its time for the handshake is still running."""
        with suppress(OSError):  # already closed, as an event reports
            held = os.dup(descriptor)
            try:
                # libzmq reports a close before it closes: if none is reported now, `held` is this connection
                self.read_events()
                if self._open.get(descriptor) is connection:
                    with borrowed(held) as caller:
                        caller.shutdown(SHUT_RDWR)
            finally:
                os.close(held)
        if self._open.get(descriptor) is connection:
            self._on_end(self._open.pop(descriptor))


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
        """Returns the peer's next frame with its payload; None for a stranger's."""
        message = next_message(self.socket)
        parts = self._heard(message) if message else None
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
    events = Connections.EVENTS

    def __init__(self, address: Address, refusals: Refusals, limit_bytes: int) -> None:
        super().__init__(address, refusals, limit_bytes)
        self._connections = Connections(MOST_STRANGERS, refusals, self._note_end)
        self._peer: bytes | None = None
        self._last_refused: bytes | None = None

    @property
    def peer_here(self) -> bool:
        return self._peer is not None

    def _attach(self) -> None:
        self._connections.monitor = self.monitor
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._address.bind(self._context, self.socket)

    def note_events(self) -> None:
        if self._address.sockets:
            self._address.answer()
        self._connections.limit()

    def check_backlog(self) -> None:
        if self._address.has_payloads:
            self._connections.cut_off_endless(self._limit_bytes)

    def _note_end(self, connection: OpenConnection) -> None:
        if connection.is_known:
            self.peer_gone = True
        elif not connection.num_messages:
            self._refusals.note("a caller was refused, or left without sending a message")

    def _to(self) -> list[bytes]:
        assert self._peer is not None, "the link checks peer_here"
        return [self._peer]

    def _heard(self, parts: list[zmq.Frame]) -> list[zmq.Frame] | None:
        identity, *parts = parts
        connection = self._connections.of(parts[0]) if parts else None
        if connection is not None:
            connection.deliver(parts)
        return parts if identity.bytes == self._peer or self._admit(identity.bytes, parts) else None

    def _admit(self, identity: bytes, parts: list[zmq.Frame]) -> bool:
        greets = len(parts) == 1 and is_greeting(parts[0].bytes)
        if greets and self._peer is None:
            self._accept(identity, parts[0])
            return True
        if greets:
            self._connections.read_events()
            if self.peer_gone:  # a restarted trainer, which will connect again once this end is closed
                return False
            self._refusals.note("refused a second trainer")
            self._refuse(identity)
        else:
            self._refusals.note("dropped a message from a caller that is not this run's trainer")
        return False

    def _accept(self, identity: bytes, frame: zmq.Frame) -> None:
        self._connections.read_events()  # it connected before its first frame: without a connection it is already gone
        self._peer, self.peer_process = identity, at_other_end(int(frame.get(zmq.SRCFD)))
        connection = self._connections.of(frame)
        self.peer_gone = connection is None
        if connection is not None:
            connection.is_known = True

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
        self._connection = OpenConnection()
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
                self._descriptor, self._connection = event["value"], OpenConnection()
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


def parts_of(payload: memoryview) -> list[memoryview]:
    return [payload[start : start + MAX_PART_BYTES] for start in range(0, len(payload), MAX_PART_BYTES)]
