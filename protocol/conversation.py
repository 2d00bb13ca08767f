"""One end of the link, as the stages see it: `send` from any thread, and each arriving message handed to whom it is for.

Where the two ends share no memory, each has both rings in memory of its own, and the bytes travel with the message that announces them:

    shared    writer -> ring <- reader              the message holds the place alone
    mirrored  writer -> ring -> link -> ring <- reader      ... and the piece's bytes, which are put in place before anyone hears of it

So nobody but the conversation knows which of the two it is.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from rowcast.protocol.messages import AnyMessage, Failure, RingRef
from rowcast.protocol.session import Session
from rowcast.protocol.transport.link import Link, Payload
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.runtime.errors import Mismatch, RemoteProtocolError, RowcastError, peer_failure

Handler = Callable[[Any], None]


class Conversation:
    """A stage: `advance` receives. Handlers run on its thread, and only note what arrived: they never wait."""

    def __init__(self, session: Session, link: Link) -> None:
        self.session = session
        self._failure: RowcastError | None = None  # the peer's
        self._link = link
        self._lock = threading.Lock()  # a message takes its sequence number and its place on the link together
        self._handlers: dict[type[AnyMessage], Handler] = {}
        self._outgoing: RingWriter | None = None
        self._incoming: RingReader | None = None
        self._num_refused = 0  # messages of the peer

    @property
    def failure_received(self) -> bool:
        return self._failure is not None

    @property
    def frames_refused(self) -> int:
        """Messages that the peer should not have sent, and whatever the link turned away: frames of strangers, callers without a key."""
        return self._num_refused + self._link.refused

    def listen(self, handlers: Mapping[type[Any], Handler]) -> None:
        """Says who hears of which message. A message that nobody listens for is only checked."""
        self._handlers.update(handlers)

    def carry(self, outgoing: RingWriter, incoming: RingReader) -> None:
        """From now on payloads travel with their messages: for ends that share no memory. `incoming` is a mirror. Called before the first
        message with a payload is sent or received."""
        self._outgoing, self._incoming = outgoing, incoming

    def send(self, message: AnyMessage) -> None:
        """Never blocks. Raises LocalProtocolError where the conversation does not allow the message now, and what the peer failed of
        where its Failure has arrived: whichever thread is first to hear of it has the same to say."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
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
            raise self._failure or peer_failure(message.code, message.sentence)
        return True

    def _received(self, frame: bytes, payload: Payload) -> AnyMessage:
        with self._lock:
            message = self.session.decode(frame)
            if isinstance(message, Failure):
                self._failure = peer_failure(message.code, message.sentence)
        self._deposit(message, payload)
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)
        return message

    def _deposit(self, message: AnyMessage, payload: Payload) -> None:
        """Raises RemoteProtocolError where the bytes that came are not those announced, before any is copied."""
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
    """Where the bytes that the message announces stand in the sender's ring, if it announces any."""
    return getattr(message, "payload", None)
