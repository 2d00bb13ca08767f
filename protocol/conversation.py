"""Sends messages from any thread, and hands each arriving message to its handler.

If the two ends share no memory, each has a copy of both rings, and a message carries the bytes that it announces:

    shared    writer -> ring <- reader                      the message holds only the position
    mirrored  writer -> ring -> link -> ring <- reader      it also holds the bytes, copied before any handler runs

Only the conversation knows which of the two applies.

Sends the model state through a ring, piece by piece: to the trainer at a start, from it at a barrier.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xxhash

from rowcast.protocol.messages import AnyMessage, Failure, RingRef
from rowcast.protocol.plan import cut_bytes, is_sampled
from rowcast.protocol.session import Session
from rowcast.protocol.transport.link import Link, Payload
from rowcast.protocol.transport.ring import RingReader, RingSlice, RingWriter
from rowcast.runtime.errors import Mismatch, RemoteProtocolError, peer_failure


class DensePieces:
    """Cuts the model state into pieces, on the thread that writes the ring."""

    def __init__(self, content: bytes, ring: RingWriter, stamp: Callable[[int], int]) -> None:
        self._content = np.frombuffer(content, np.uint8)
        self._ring = ring
        self._stamp = stamp
        self._spans = cut_bytes(len(content), ring.max_payload)
        self._checksum = xxhash.xxh3_64_intdigest(content)
        self._sent = 0

    @property
    def complete(self) -> bool:
        """Whether every piece is in the ring."""
        return self._sent == len(self._spans)

    def room(self) -> RingSlice | None:
        """Returns space for the next piece; None if the ring is full."""
        return self._ring.try_allocate(self._spans[self._sent].nbytes)

    def put(self, room: RingSlice) -> dict[str, Any]:
        """Writes the next piece; returns the fields of the DensePiece that announces it."""
        piece, span = self._sent, self._spans[self._sent]
        room.payload[:] = self._content[span.offset : span.offset + span.nbytes]
        self._sent += 1
        stamp = self._stamp(piece)
        return {
            "piece": piece,
            "num_pieces": len(self._spans),
            "nbytes": len(self._content),
            "checksum": self._checksum,
            "payload": self._ring.commit(room, stamp, checksum=is_sampled(stamp)),
            "span": span,
        }


Handler = Callable[[Any], None]


class Conversation:
    """A stage: `advance` receives. Handlers run on its thread; they only note what arrived and never wait."""

    def __init__(self, session: Session, link: Link) -> None:
        self.session = session
        # called with the type of each message once its handler has run
        self.on_message: Callable[[type[AnyMessage]], None] = lambda kind: None
        self._failure: Failure | None = None  # the peer's
        self._link = link
        self._lock = threading.Lock()  # a message gets its sequence number and its turn on the link together
        self._handlers: dict[type[AnyMessage], Handler] = {}
        self._outgoing: RingWriter | None = None
        self._incoming: RingReader | None = None
        self._num_refused = 0  # messages from the peer

    @property
    def failure_received(self) -> bool:
        return self._failure is not None

    @property
    def frames_refused(self) -> int:
        """Counts the peer's invalid messages and what the link refused: frames of strangers, callers without a key."""
        return self._num_refused + self._link.refused

    def listen(self, handlers: Mapping[type[Any], Handler]) -> None:
        """Sets the handler of each message type. A message without a handler is only checked."""
        self._handlers.update(handlers)

    def close(self) -> None:
        """Drops the handlers and the objects that they hold. Call it after the last receive."""
        self._handlers.clear()

    def carry(self, outgoing: RingWriter, incoming: RingReader) -> None:
        """Makes payloads travel with their messages, for ends that share no memory; `incoming` is a mirror.

        Call it before the first message with a payload is sent or received."""
        self._outgoing, self._incoming = outgoing, incoming

    def send(self, message: AnyMessage) -> None:
        """Never blocks. Raises LocalProtocolError if the conversation does not allow the message now.

        Raises the peer's error once its Failure has arrived, so that every thread reports the same sentence."""
        with self._lock:
            if self._failure is not None:
                # made anew, because the traceback of one that is kept would hold the caller's objects
                raise peer_failure(self._failure.code, self._failure.sentence)
            frame = self.session.encode(message)
            ref = payload_ref(message)
            if self._outgoing is None or ref is None:
                self._link.send(frame)
            else:
                self._link.send(frame, self._outgoing.payload(ref))

    def advance(self) -> bool:
        arrived = self._link.receive()
        if arrived is None:
            return False
        try:
            message = self._received(*arrived)
        except (RemoteProtocolError, Mismatch):
            self._num_refused += 1
            raise
        if isinstance(message, Failure):
            raise peer_failure(message.code, message.sentence)
        return True

    def _received(self, frame: bytes, payload: Payload) -> AnyMessage:
        with self._lock:
            message = self.session.decode(frame)
            if isinstance(message, Failure):
                self._failure = message
        self._deposit(message, payload)
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)
        self.on_message(type(message))
        return message

    def _deposit(self, message: AnyMessage, payload: Payload) -> None:
        """Raises RemoteProtocolError before it copies anything if the number of bytes is not the announced one."""
        ref = payload_ref(message)
        travels = self._incoming is not None and ref is not None
        expected = ref.nbytes if ref is not None and travels else 0
        found = sum(len(part) for part in payload)
        if found != expected:
            raise RemoteProtocolError(
                f"a {type(message).__name__} came with {found} bytes of payload instead of {expected}"
            )
        if self._incoming is not None and ref is not None:
            self._incoming.deposit(ref, payload)


def payload_ref(message: AnyMessage) -> RingRef | None:
    """Returns the ring bytes that the message announces, or None."""
    return getattr(message, "payload", None)
