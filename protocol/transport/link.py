"""A link carries frames between two peers in order, without blocking and, while both live, without loss.

If the two ends share no memory, the bytes of a message's payload follow its frame in the same message:

    | frame | payload ... | payload ... |          parts of at most MAX_PART_BYTES; none without a payload

`ZmqLink` (`zmq_link.py`) joins two processes; `tests/support/inproc_link.py`, both sides in one thread.
"""

from typing import Protocol

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
