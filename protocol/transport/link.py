"""A link carries frames between two peers in order, without blocking and, while both live, without loss.

If the two ends share no memory, the bytes of a message's payload follow its frame in the same message:

    | frame | payload ... | payload ... |          parts of at most MAX_PART_BYTES; none without a payload

`ZmqLink` (`zmq_link.py`) joins two processes; `InprocLink`, for tests and for both sides in one thread, is two queues.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rowcast.runtime.errors import LocalProtocolError

# an unknown caller can make us allocate the largest part, so a long payload travels in several
MAX_PART_BYTES = 2**20

Payload = tuple[memoryview, ...]  # the bytes in order; may be empty


class Link(Protocol):
    """One end of a link. Any single thread may call `send`, and any single thread `receive`."""

    @property
    def refused(self) -> int:
        """Counts the refused frames of strangers and the refused callers."""

    def send(self, frame: bytes, payload: memoryview | None = None) -> None:
        """Queues one frame. Never blocks: the conversation's credits bound what can be outstanding.

        The bytes of `payload` must not change until the peer has released them (`Released`): they are not copied at
        once."""

    def receive(self) -> tuple[bytes, Payload] | None:
        """Returns the next frame with its payload, or None if none has arrived."""

    def close(self) -> None:
        """Sends what is queued, for a bounded time, then frees the endpoint. Idempotent."""


def parts_of(payload: memoryview) -> list[memoryview]:
    return [payload[start : start + MAX_PART_BYTES] for start in range(0, len(payload), MAX_PART_BYTES)]


def silent() -> None: ...


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
