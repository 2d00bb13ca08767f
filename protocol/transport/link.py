"""A link carries encoded envelopes between two peers: in order, without loss while both live, and never blocking the caller."""

from typing import Protocol


class Link(Protocol):
    """One end of a conversation. `send` and `receive` are called from any one thread each."""

    def send(self, frame: bytes) -> None:
        """Queues one frame. Never blocks: the conversation's credits bound what can be outstanding."""

    def receive(self) -> bytes | None:
        """The next frame, or None when none has arrived."""

    def close(self) -> None:
        """Sends what is queued (bounded time), then frees the endpoint. Idempotent."""
