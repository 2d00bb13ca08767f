"""Defines a link, which carries frames between two peers in order, without loss while both live, and without blocking.

If the two ends share no memory, the bytes of a message's payload follow its frame in the same message:

    | frame | payload ... | payload ... |          parts of at most MAX_PART_BYTES; none without a payload
"""

from typing import Protocol

# an unknown caller can make us allocate the largest part, so a long payload travels in several
MAX_PART_BYTES = 2**20

Payload = tuple[memoryview, ...]  # the bytes in order; may be empty


class Link(Protocol):
    """One end of a link. One thread, any one, may call `send`, and one `receive`."""

    @property
    def refused(self) -> int:
        """How many frames of strangers, and callers that were not admitted, were refused."""

    def send(self, frame: bytes, payload: memoryview | None = None) -> None:
        """Queues one frame. Never blocks: the conversation's credits bound what can be outstanding.

        `payload` is not copied at once: its bytes must not change until the peer has released them (`Released`).
        """

    def receive(self) -> tuple[bytes, Payload] | None:
        """The next frame with its payload, or None if none has arrived."""

    def close(self) -> None:
        """Sends what is queued, for a bounded time, then frees the endpoint. Idempotent."""


def parts_of(payload: memoryview) -> list[memoryview]:
    return [payload[start : start + MAX_PART_BYTES] for start in range(0, len(payload), MAX_PART_BYTES)]
