"""One end of the link, as the stages see it: `send` from any thread, and each arriving message handed to whom it is for."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from protocol.errors import RowcastError, peer_failure
from protocol.messages import AnyMessage, Failure
from protocol.session import Session
from protocol.transport.link import Link

Handler = Callable[[Any], None]


class Conversation:
    """A stage: `advance` receives. Handlers run on its thread, and only note what arrived: they never wait."""

    def __init__(self, session: Session, link: Link) -> None:
        self.session = session
        self._failure: RowcastError | None = None  # the peer's
        self._link = link
        self._lock = threading.Lock()  # a message takes its sequence number and its place on the link together
        self._handlers: dict[type[AnyMessage], Handler] = {}

    @property
    def failure_received(self) -> bool:
        return self._failure is not None

    def listen(self, handlers: Mapping[type[Any], Handler]) -> None:
        """Says who hears of which message. A message that nobody listens for is only checked."""
        self._handlers.update(handlers)

    def send(self, message: AnyMessage) -> None:
        """Never blocks. Raises LocalProtocolError where the conversation does not allow the message now, and what the peer failed of
        where its Failure has arrived: whichever thread is first to hear of it has the same to say."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._link.send(self.session.encode(message))

    def advance(self) -> bool:
        frame = self._link.receive()
        if frame is None:
            return False
        with self._lock:
            message = self.session.decode(frame)
            if isinstance(message, Failure):
                self._failure = peer_failure(message.code, message.sentence)
                raise self._failure
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)
        return True
