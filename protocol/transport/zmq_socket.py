"""What the two ends of a ZMQ connection share: the prefetcher's ROUTER (`router.py`) and the trainer's DEALER (`dealer.py`).

Each is opened by one thread and then used by one other. ZMQ is a pipe, not a promise: what it adds here is framing, connecting in
either order, noticing that the peer is gone, and over tcp encryption. What a gone peer had sent can still be received, but only while
the socket stays connected; so `peer_gone` is acted on after everything was received.
"""

from collections.abc import Sequence
from typing import Protocol

import zmq

from rowcast.protocol.codec import MAX_FRAME_BYTES
from rowcast.protocol.transport.link import MAX_PART_BYTES, Payload
from rowcast.runtime.errors import RemoteProtocolError

CURVE_BYTES = 64  # what encryption adds to a part, and a little more
# of one part: what a caller can have us allocate
MAX_MESSAGE_BYTES = max(MAX_FRAME_BYTES, MAX_PART_BYTES) + CURVE_BYTES
QUEUE_FRAMES = 2**16  # far above what credits and heartbeats can let wait
RECONNECT_MS, RECONNECT_MAX_MS = 50, 100


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
    # also for `disconnect`, which would otherwise have the context wait for a gone peer without end
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
    """Waits up to `linger_ms` for what was sent through `main`."""
    while monitor.poll(0):
        monitor.recv_multipart()  # a full one would have libzmq's thread wait for us, and us for it
    main.disable_monitor()
    monitor.close(linger=0)
    main.close(linger=linger_ms)
    for other in others:
        other.close(linger=0)
    context.term()
