"""A link carries encoded envelopes between two peers: in order, without loss while both live, and never blocking the caller.

Where the two ends share no memory, the bytes of a message's payload travel behind its frame, in the same message:

    | frame | payload ... | payload ... |          parts of at most MAX_PART_BYTES, none where the message has no payload
"""

from typing import Protocol

# what an unknown caller can make us allocate goes by the largest part, so a long payload travels in several
MAX_PART_BYTES = 2**20

Payload = tuple[memoryview, ...]  # the bytes in order; empty where there are none


class Link(Protocol):
    """One end of a conversation. `send` and `receive` are called from any one thread each."""

    @property
    def refused(self) -> int:
        """Frames of strangers, and callers who never got in."""

    def send(self, frame: bytes, payload: memoryview | None = None) -> None:
        """Queues one frame. Never blocks: the conversation's credits bound what can be outstanding.

        `payload` is not copied at once: its bytes stay as they are until the peer has answered to them (`Released`).
        """

    def receive(self) -> tuple[bytes, Payload] | None:
        """The next frame with its payload, or None when none has arrived."""

    def close(self) -> None:
        """Sends what is queued (bounded time), then frees the endpoint. Idempotent."""


def parts_of(payload: memoryview) -> list[memoryview]:
    return [payload[start : start + MAX_PART_BYTES] for start in range(0, len(payload), MAX_PART_BYTES)]
