"""Implements the prefetcher's end of a ZMQ connection: a ROUTER that accepts one trainer and no other caller."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from rowcast.protocol.codec import decode, encode, greeted_version
from rowcast.protocol.messages import PROTOCOL_VERSION, Envelope, Failure, Hello
from rowcast.protocol.transport.addresses import BindAddress
from rowcast.protocol.transport.flood_guard import CallerConnection
from rowcast.protocol.transport.link import Payload, parts_of
from rowcast.protocol.transport.refusals import Refusals
from rowcast.protocol.transport.zmq_socket import close_socket, new_socket, take_apart
from rowcast.runtime.errors import ConfigError, RemoteProtocolError
from rowcast.runtime.other_process import OtherProcess, at_other_end

MAX_CONNECTIONS = 64  # open at the same time; a run needs one
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


class Router:
    """The prefetcher's end. The first caller that greets becomes its trainer; it refuses all other callers.

    A connection identifies a caller, and ZMQ reconnects by itself: frames of an earlier incarnation, from a trainer
    that was stopped meanwhile, look like a stranger's. Hence the greeting."""

    def __init__(self, address: BindAddress, refusals: Refusals, limit_bytes: int) -> None:
        """`limit_bytes`: how many bytes of a peer may be sent and not yet received."""
        self._address = address
        self._refusals = refusals
        self._limit_bytes = limit_bytes
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._connections: dict[int, CallerConnection] = {}  # by current descriptor, oldest first
        self._peer: bytes | None = None
        self._peer_connection: CallerConnection | None = None
        self._peer_gone = False
        self.peer_process: OtherProcess | None = None
        self._last_refused: bytes | None = None

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        return [self.socket, self.monitor, *self._address.sockets]

    @property
    def peer_here(self) -> bool:
        return self._peer is not None

    @property
    def peer_gone(self) -> bool:
        return self._peer_gone

    def open(self) -> None:
        """Raises ConfigError if this process may not serve here, or the socket cannot be made."""
        self._address.open()
        self._context = zmq.Context()
        self.socket = new_socket(self._context, zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self._address.bind(self._context, self.socket)
        except BaseException:
            self.close(0)
            raise

    def note_events(self) -> None:
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
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connections.pop(event["value"], None)  # the dict keeps the order of arrival
                self._connections[event["value"]] = CallerConnection()
            else:
                self._note_disconnect(self._connections.pop(event["value"], None))

    def _note_disconnect(self, connection: CallerConnection | None) -> None:
        """Counts a closed connection. None: it was cut off and is already counted."""
        if connection is None:
            return
        if connection is self._peer_connection:
            self._peer_gone = True
        elif not connection.num_messages:
            self._refusals.note("a caller was refused, or left without sending a message")

    def _cut_off(self, descriptor: int, connection: CallerConnection) -> None:
        """Frees a caller's descriptor and memory, even while its time for the handshake is still running."""
        with suppress(OSError):  # already closed, as an event reports
            held = os.dup(descriptor)
            try:
                # libzmq reports a close before it closes: if none is reported now, `held` is this connection
                self._read_events()
                if self._connections.get(descriptor) is connection:
                    shut_down(held)
            finally:
                os.close(held)
        if self._connections.get(descriptor) is connection:
            self._note_disconnect(self._connections.pop(descriptor))

    def try_send(self, frame: bytes, payload: memoryview | None) -> None:
        assert self._peer is not None, "the link checks peer_here"
        self.socket.send_multipart([self._peer, frame, *parts_of(payload or memoryview(b""))], zmq.NOBLOCK)

    def try_receive(self) -> tuple[bytes, Payload] | None:
        identity, *parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        connection = self._connections.get(int(parts[0].get(zmq.SRCFD))) if parts else None
        if connection is not None:
            connection.deliver(len(parts), sum(len(part.buffer) for part in parts))
        if identity.bytes != self._peer and not self._admit(identity.bytes, parts):
            return None
        return take_apart(parts, has_payloads=self._address.has_payloads)

    def _admit(self, identity: bytes, parts: list[zmq.Frame]) -> bool:
        greets = len(parts) == 1 and is_greeting(parts[0].bytes)
        if greets and self._peer is None:
            self._accept(identity, parts[0])
            return True
        if greets:
            self._read_events()
            if self._peer_gone:  # a restarted trainer, which will connect again once this end is closed
                return False
            self._refusals.note("refused a second trainer")
            self._refuse(identity)
        else:
            self._refusals.note("dropped a message from a caller that is not this run's trainer")
        return False

    def _accept(self, identity: bytes, frame: zmq.Frame) -> None:
        self._read_events()  # it connected before its first frame: without a connection it is already gone
        self._peer = identity
        descriptor = int(frame.get(zmq.SRCFD))
        self._peer_connection, self.peer_process = self._connections.get(descriptor), at_other_end(descriptor)
        self._peer_gone = self._peer_connection is None

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

    def disconnect(self) -> None:
        """Does nothing: this end does not connect."""

    def close(self, linger_ms: int) -> None:
        close_socket(self._context, self.socket, self.monitor, self._address.sockets, linger_ms)
        self._address.close()


def is_greeting(frame: bytes) -> bool:
    """Returns whether a conversation can begin with this frame, even one of a different version, which then gets an
    answer."""
    try:
        envelope = decode(frame)
    except RemoteProtocolError:
        return greeted_version(frame) not in (None, PROTOCOL_VERSION)
    return envelope.sequence == 0 and isinstance(envelope.message, Hello)


def shut_down(descriptor: int) -> None:
    """Cuts a connection in both directions without closing the descriptor."""
    connection = socket.socket(fileno=descriptor)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    finally:
        connection.detach()
