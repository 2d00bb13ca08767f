"""The connections of a socket that listens. Above a limit, the oldest strangers' are cut off.

libzmq accepts whoever connects, and keeps a caller without a key until its time for the handshake is over. The run's
callers are those whose messages were taken (`is_known`): they are never cut off.
"""

import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from rowcast.protocol.transport.callers import Refusals, has_news

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
