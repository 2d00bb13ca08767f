"""Implements the trainer's end of a ZMQ connection: a DEALER that connects only once."""

from collections.abc import Sequence
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from rowcast.protocol.transport.addresses import ConnectAddress
from rowcast.protocol.transport.curve_keys import CLIENTS
from rowcast.protocol.transport.flood_guard import CallerConnection
from rowcast.protocol.transport.link import Payload, parts_of
from rowcast.protocol.transport.refusals import Refusals
from rowcast.protocol.transport.zmq_socket import close_socket, new_socket, take_apart
from rowcast.runtime.errors import ConfigError, RemoteProtocolError
from rowcast.runtime.other_process import OtherProcess, at_other_end


class Dealer:
    """The trainer's end. It retries until a prefetcher answers, and never reconnects after that one is gone."""

    def __init__(self, address: ConnectAddress, refusals: Refusals, limit_bytes: int) -> None:
        self._address = address
        self._refusals = refusals
        self._limit_bytes = limit_bytes
        self._descriptor: int | None = None
        self._connection = CallerConnection()
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._connected = False
        self._peer_gone = False
        self.peer_process: OtherProcess | None = None

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
        """Raises ConfigError if there is no usable key or no such address."""
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
            self._address.prepare(self.socket)
            self._connect()
        except BaseException:
            self.close(0)
            raise

    def _connect(self) -> None:
        try:
            self.socket.connect(self._address.endpoint)
        except zmq.ZMQError as error:
            why = zmq.strerror(error.errno or 0)
            raise ConfigError(
                f"transport.endpoint = {self._address.endpoint!r} cannot be connected to ({why}); correct it"
            ) from error

    def note_events(self) -> None:
        """Raises ConfigError if the prefetcher refuses this trainer's key."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            kind = event["event"]
            if kind == zmq.EVENT_CONNECTED:
                self._descriptor, self._connection = event["value"], CallerConnection()
                self.peer_process = at_other_end(self._descriptor)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._descriptor = None
            self._peer_gone |= self._connected and kind == zmq.EVENT_DISCONNECTED
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

    def try_send(self, frame: bytes, payload: memoryview | None) -> None:
        self.socket.send_multipart([frame, *parts_of(payload or memoryview(b""))], zmq.NOBLOCK)

    def try_receive(self) -> tuple[bytes, Payload] | None:
        parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        self._connection.deliver(len(parts), sum(len(part.buffer) for part in parts))
        return take_apart(parts, has_payloads=self._address.has_payloads)

    def check_backlog(self) -> None:
        if not self._address.has_payloads or self._descriptor is None:
            return
        with suppress(OSError):  # already closed
            if self._connection.has_backlog(self._descriptor, self._limit_bytes):
                raise RemoteProtocolError("the prefetcher sent a message without end")

    def disconnect(self) -> None:
        self.socket.disconnect(self._address.endpoint)  # otherwise ZMQ would connect to the next prefetcher there

    def close(self, linger_ms: int) -> None:
        with suppress(ConfigError):  # already raised, or irrelevant by now
            self.note_events()
        close_socket(self._context, self.socket, self.monitor, (), linger_ms if self._connected else 0)
