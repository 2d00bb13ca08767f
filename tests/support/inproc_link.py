"""A link between both sides in one thread: two queues."""

import time
from collections import deque
from collections.abc import Callable

from rowcast.protocol.transport.ring import Payload
from rowcast.protocol.transport.zmq_ends import parts_of
from rowcast.protocol.transport.zmq_link import silent
from rowcast.runtime.errors import LocalProtocolError


class InprocLink:
    """One end of a pair; made by `inproc_pair`."""

    def __init__(self, on_receive: Callable[[], None]) -> None:
        self.last_received_s: float | None = None  # monotonic clock
        self.closed = False
        self.refused = 0  # strangers cannot send here
        self._inbox: deque[tuple[bytes, Payload]] = deque()
        self._on_receive = on_receive
        self._other: InprocLink = self

    @property
    def peer_gone(self) -> bool:
        return self._other.closed

    def send(self, frame: bytes, payload: memoryview | None = None) -> None:
        if self.closed:
            raise LocalProtocolError("a frame is sent on a closed link")
        parts = () if payload is None else tuple(memoryview(bytes(part)) for part in parts_of(payload))
        self._other._arrive(frame, parts)

    def receive(self) -> tuple[bytes, Payload] | None:
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        self.closed = True
        self._other._on_receive()

    def _arrive(self, frame: bytes, payload: Payload) -> None:
        self.last_received_s = time.monotonic()
        self._inbox.append((frame, payload))
        self._on_receive()


def inproc_pair(
    on_receive: tuple[Callable[[], None], Callable[[], None]] = (silent, silent),
) -> tuple[InprocLink, InprocLink]:
    """Returns both ends; `on_receive` has a callback for each, called when a frame arrived or the other end closed."""
    first, second = map(InprocLink, on_receive)
    first._other, second._other = second, first
    return first, second
