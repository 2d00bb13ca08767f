"""Sends the model state through a ring, piece by piece: to the trainer at a start, from it at a barrier."""

from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from rowcast.protocol.plan import cut_bytes, is_sampled
from rowcast.protocol.transport.ring import RingSlice, RingWriter


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
