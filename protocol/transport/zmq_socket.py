"""Holds the common code of both ends of a ZMQ connection: the ROUTER in `router.py` and the DEALER in `dealer.py`.

One thread opens an end, and one thread then uses it. ZMQ does not guarantee delivery: it adds framing, connecting in
either order, a notice when the peer is gone, and encryption over tcp. The frames of a gone peer can be received only
while the socket stays connected, so the link acts on `peer_gone` after receiving everything.
"""

from collections.abc import Sequence
from typing import Protocol

import zmq

from rowcast.protocol.codec import MAX_FRAME_BYTES
from rowcast.protocol.transport.link import MAX_PART_BYTES, Payload
from rowcast.runtime.errors import RemoteProtocolError
from rowcast.runtime.other_process import OtherProcess

CURVE_BYTES = 64  # slightly more than encryption adds to a part
# the largest frame that a caller can make us allocate
MAX_MESSAGE_BYTES = max(MAX_FRAME_BYTES, MAX_PART_BYTES) + CURVE_BYTES
QUEUE_FRAMES = 2**16  # far more frames than credits and heartbeats allow to wait
RECONNECT_MS, RECONNECT_MAX_MS = 50, 100


class SocketEnd(Protocol):
    """The interface of either end for `ZmqLink`."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]

    @property
    def sockets(self) -> Sequence["zmq.Socket[bytes]"]: ...

    @property
    def peer_here(self) -> bool:
        """Whether frames can be sent now, or will leave once the connection is made."""

    @property
    def peer_gone(self) -> bool:
        """Whether the connection was made and has ended; set by `note_events`."""

    @property
    def peer_process(self) -> OtherProcess | None:
        """None before the connection, and if it cannot be seen from here."""

    def open(self) -> None: ...

    def note_events(self) -> None: ...

    def check_backlog(self) -> None:
        """Cuts off a caller that sends an endless message. Raises RemoteProtocolError if the peer sends one."""

    def try_send(self, frame: bytes, payload: memoryview | None) -> None:
        """Copies both. Raises zmq.Again if the queue is full, zmq.ZMQError with EHOSTUNREACH if the peer is gone."""

    def try_receive(self) -> tuple[bytes, Payload] | None:
        """Returns the peer's next frame with its payload; None for a stranger's. Raises zmq.Again if there is no
        frame."""

    def disconnect(self) -> None:
        """Disconnects a gone peer after everything is received, so that no other peer connects."""

    def close(self, linger_ms: int) -> None:
        """Waits up to `linger_ms` for sent frames to leave, then frees everything."""


def take_apart(parts: Sequence[zmq.Frame], *, has_payloads: bool) -> tuple[bytes, Payload]:
    if len(parts) > 1 and not has_payloads:
        raise RemoteProtocolError(f"a message of {len(parts)} parts arrived; each has 1")
    frame, *payload = parts
    return frame.bytes, tuple(part.buffer for part in payload)


def new_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    made = context.socket(kind)
    made.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
    made.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # otherwise the context would wait forever for a gone peer after `disconnect`
    made.setsockopt(zmq.LINGER, 0)
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
    while monitor.poll(0):
        monitor.recv_multipart()  # with a full monitor, libzmq's thread and this one would wait for each other
    main.disable_monitor()
    monitor.close(linger=0)
    main.close(linger=linger_ms)
    for other in others:
        other.close(linger=0)
    context.term()
