"""Implements a byte ring: one side writes pieces, the other reads them there, without a copy.

There is no cursor in shared memory. A message announces each piece (`RingRef`) and `Released` frees its bytes, so the
socket's order is enough. Positions count every byte ever allocated and never repeat; a byte's offset is position %
capacity.

    | guard | payload, padded to 64 | guard | guard | payload ... | guard | (skipped tail) |
    64      ^ position                      ^ end

A piece is contiguous. If the tail is too short for it, the tail is skipped, and freed with the piece that follows. Both
guards hold the stamp that the message implies (step and piece), the position and the length, so the reader never
mistakes stale or torn bytes for the announced piece.

A payload of n bytes takes aligned(n, 64) + 128. `max_payload` is the largest n that takes at most half a ring. An empty
ring starts over at byte 0, so it always fits two payloads of `max_payload`, and any payload fits once all earlier
pieces are released. So fragmentation cannot cause a deadlock if every piece is committed, announced and released
without waiting for a later one. Holding more than two large pieces at once has no such guarantee.

Mirrors: if the two ends share no memory, each has a copy of the whole ring. The writer's end is unchanged. The reader's
is made with `mirror=True`. Before `view`, `deposit` copies the bytes of each piece from its message into the mirror.
`view` then writes the guards that `done` checks. The checksum detects torn or stale bytes, so every piece carries one
(`always_checksum`).

Threads: any thread may call any method; no method waits. The writer allocates, commits and announces pieces in the same
order. The reader views them in that order and may finish them in any order.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from rowcast.job.tables import aligned
from rowcast.protocol.messages import Released, RingRef
from rowcast.runtime.arrays import I64, Bytes
from rowcast.runtime.errors import LocalProtocolError, RemoteProtocolError

ALIGNMENT = 64
GUARD_BYTES = 64
GUARD_WORDS = 3  # stamp, position, length
MIN_CAPACITY = 16 * ALIGNMENT
Payload = tuple[memoryview, ...]  # the bytes of a piece in order, if they travel; may be empty


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RingSlice:
    """Space for one piece: write `payload`, then call `commit`."""

    position: int
    end: int
    payload: Bytes  # u8 [nbytes], 64-byte aligned in the ring


def largest_payload(ring_bytes: int) -> int:
    """The largest payload in bytes, a multiple of 64: half a ring without its guards."""
    return ring_bytes // ALIGNMENT * ALIGNMENT // 2 // ALIGNMENT * ALIGNMENT - 2 * GUARD_BYTES


def piece_bytes(nbytes: int) -> int:
    return aligned(nbytes, ALIGNMENT) + 2 * GUARD_BYTES


class RingEnd:
    """The offsets of pieces and guards in the ring, for both ends."""

    def __init__(self, buffer: Bytes) -> None:
        self.capacity = len(buffer) // ALIGNMENT * ALIGNMENT
        if self.capacity < MIN_CAPACITY:
            raise ValueError(f"a ring of {len(buffer)} bytes is too small; it needs at least {MIN_CAPACITY}")
        self.max_payload = largest_payload(self.capacity)
        self._bytes = buffer[: self.capacity]
        self._words: I64 = self._bytes.view(np.int64)
        self._lock = threading.Lock()

    def _bytes_at(self, position: int, nbytes: int) -> Bytes:
        start = position % self.capacity
        return self._bytes[start : start + nbytes]

    def _start_of(self, newest_end: int, size: int) -> int:
        """Returns the start position of a piece of `size` bytes, with guards, after the newest one."""
        fits = newest_end % self.capacity + size <= self.capacity
        return newest_end if fits else aligned(newest_end, self.capacity)

    def _write_guards(self, ref: RingRef, stamp: int) -> None:
        for guard in self._guards(ref):
            guard[:] = (stamp, ref.position, ref.nbytes)

    def _check_guards(self, ref: RingRef, stamp: int) -> None:
        for guard, side in zip(self._guards(ref), ("before", "after"), strict=True):
            words = tuple(guard.tolist())
            if words != (stamp, ref.position, ref.nbytes):
                raise RemoteProtocolError(
                    f"the guard {side} the piece at position {ref.position} of a ring holds stamp, position and length "
                    f"{words}, but {(stamp, ref.position, ref.nbytes)} was announced"
                )

    def _guards(self, ref: RingRef) -> tuple[I64, I64]:
        first = (ref.position - GUARD_BYTES) % self.capacity // 8
        second = (ref.end - GUARD_BYTES) % self.capacity // 8
        return self._words[first : first + GUARD_WORDS], self._words[second : second + GUARD_WORDS]


class RingWriter(RingEnd):
    """The writing end. `buffer` is the whole ring, u8, 64-byte aligned; bytes beyond a multiple of 64 stay unused.

    With `always_checksum` every piece carries a checksum, even if `commit` does not ask for one."""

    def __init__(self, buffer: Bytes, *, always_checksum: bool = False) -> None:
        super().__init__(buffer)
        self._always_checksum = always_checksum
        self._allocated = 0  # end of the newest piece
        self._released = 0  # everything before it is free
        self._uncommitted: deque[RingSlice] = deque()
        self._committed_ends: deque[int] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes allocated and not yet released, with guards, padding and skipped tails; 0 when the ring is empty."""
        with self._lock:
            return self._allocated - self._released

    def try_allocate(self, nbytes: int) -> RingSlice | None:
        """Returns space for a payload of `nbytes`, or None while there is too little. Raises ValueError if it can never
        fit."""
        if not 0 <= nbytes <= self.max_payload:
            raise ValueError(
                f"a payload of {nbytes} bytes does not fit a ring of {self.capacity}, "
                f"which takes 0 to {self.max_payload}"
            )
        with self._lock:
            if self._allocated == self._released:
                self._allocated = self._released = aligned(self._allocated, self.capacity)
            start = self._start_of(self._allocated, piece_bytes(nbytes))
            end = start + piece_bytes(nbytes)
            if end - self._released > self.capacity:
                return None
            self._allocated = end
            position = start + GUARD_BYTES
            piece = RingSlice(position=position, end=end, payload=self._bytes_at(position, nbytes))
            self._uncommitted.append(piece)
            return piece

    def commit(self, piece: RingSlice, stamp: int, checksum: bool) -> RingRef:
        """Seals the oldest uncommitted piece and returns the reference for the message that announces it.

        Its payload must not change afterwards. The reader will expect `stamp` (int64), which the message implies.
        Raises LocalProtocolError for any other piece."""
        digest = xxhash.xxh3_64_intdigest(piece.payload.data) if checksum or self._always_checksum else None
        ref = RingRef(position=piece.position, nbytes=len(piece.payload), end=piece.end, checksum=digest)
        with self._lock:
            oldest = self._uncommitted[0].position if self._uncommitted else None
            if oldest != piece.position:
                raise LocalProtocolError(
                    f"the piece at position {piece.position} is committed while the one at {oldest} is the oldest"
                )
            self._write_guards(ref, stamp)
            self._uncommitted.popleft()
            self._committed_ends.append(piece.end)
        return ref

    def payload(self, ref: RingRef) -> memoryview:
        """Returns the bytes of a committed piece in the ring, valid until released."""
        return self._bytes_at(ref.position, ref.nbytes).data

    def release(self, position: int) -> None:
        """Applies the peer's `Released`. Raises RemoteProtocolError if `position` does not end a piece it holds."""
        with self._lock:
            if position not in self._committed_ends:
                held = f"{self._committed_ends[0]} to {self._committed_ends[-1]}" if self._committed_ends else "none"
                raise RemoteProtocolError(
                    f"Released names position {position}; the pieces that the peer holds end at: {held}"
                )
            while self._committed_ends[0] != position:
                self._committed_ends.popleft()
            self._released = self._committed_ends.popleft()


@dataclass(slots=True)
class OpenPiece:
    ref: RingRef
    stamp: int | None  # None: deposited, and not yet viewed
    done: bool = False


class RingReader(RingEnd):
    """The reading end of the same ring, or of a mirror of it."""

    def __init__(self, buffer: Bytes, *, mirror: bool = False) -> None:
        super().__init__(buffer)
        self.is_mirror = mirror
        self._newest_end = 0
        self._open: deque[OpenPiece] = deque()  # in order, from the oldest one not done

    def deposit(self, ref: RingRef, parts: Sequence[memoryview]) -> None:
        """Copies a piece's `ref.nbytes` bytes into the mirror. Call once per piece, in order, before its `view`.

        Raises RemoteProtocolError before copying if `view` would raise or the piece has no checksum, so it never
        overwrites a different piece."""
        assert self.is_mirror, "a ring that both ends share needs no deposit"
        nbytes = sum(len(part) for part in parts)
        assert nbytes == ref.nbytes, f"{nbytes} bytes are deposited as a piece of {ref.nbytes}"
        if ref.checksum is None:
            raise RemoteProtocolError(f"the piece at position {ref.position} of a ring travels without a checksum")
        with self._lock:
            self._check_place(ref)
            self._newest_end = ref.end
            self._open.append(OpenPiece(ref, None))
        start = ref.position
        for part in parts:
            self._bytes_at(start, len(part))[:] = np.frombuffer(part, dtype=np.uint8)
            start += len(part)

    def view(self, ref: RingRef, stamp: int) -> Bytes:
        """Returns the piece's payload in the ring, u8 [nbytes], valid until `done(ref)`. Call once per piece, in order.

        Raises RemoteProtocolError if `ref` does not follow the previous piece, or its bytes are not as announced."""
        with self._lock:
            if self.is_mirror:
                self._open_deposited(ref, stamp)
            else:
                self._check_place(ref)
                self._check_guards(ref, stamp)
                self._newest_end = ref.end
                self._open.append(OpenPiece(ref, stamp))
        payload = self._bytes_at(ref.position, ref.nbytes)
        if ref.checksum is not None and (digest := xxhash.xxh3_64_intdigest(payload.data)) != ref.checksum:
            raise RemoteProtocolError(
                f"the piece at position {ref.position} of a ring has checksum {digest:016x}; "
                f"{ref.checksum:016x} was announced"
            )
        return payload

    def done(self, ref: RingRef) -> int | None:
        """Marks a piece as read; pieces may finish in any order. Returns the position for `Released`, or None.

        Checks the guards again: raises RemoteProtocolError if the writer reused the bytes too early and tore what was
        read."""
        with self._lock:
            piece = next((piece for piece in self._open if piece.ref.position == ref.position), None)
            if piece is None or piece.done or piece.stamp is None:
                raise LocalProtocolError(f"the piece at position {ref.position} is not being read")
            self._check_guards(piece.ref, piece.stamp)
            piece.done = True
            frontier = None
            while self._open and self._open[0].done:
                frontier = self._open.popleft().ref.end
            return frontier

    def _open_deposited(self, ref: RingRef, stamp: int) -> None:
        piece = next((piece for piece in self._open if piece.stamp is None), None)
        if piece is None or piece.ref != ref:
            oldest = None if piece is None else piece.ref.position
            raise LocalProtocolError(
                f"the piece at position {ref.position} is viewed while the one at {oldest} is next"
            )
        self._write_guards(ref, stamp)
        piece.stamp = stamp

    def _check_place(self, ref: RingRef) -> None:
        size = ref.end - ref.position + GUARD_BYTES
        if not 0 <= ref.nbytes <= self.max_payload or size != piece_bytes(ref.nbytes):
            raise RemoteProtocolError(
                f"a piece of {ref.nbytes} bytes cannot go from {ref.position} to {ref.end}; "
                f"payloads have up to {self.max_payload} bytes"
            )
        start = ref.position - GUARD_BYTES
        follows = start == self._start_of(self._newest_end, size)
        started_over = not self._open and start == aligned(self._newest_end, self.capacity)
        if not follows and not started_over:
            raise RemoteProtocolError(
                f"a piece at position {ref.position} does not follow the one that ended at {self._newest_end}"
            )
        if self._open and ref.end - (self._open[0].ref.position - GUARD_BYTES) > self.capacity:
            raise RemoteProtocolError(
                f"a piece ends at {ref.end} and overlaps the one at {self._open[0].ref.position}, "
                "which is still being read"
            )


def release(ring: RingReader, ref: RingRef, send: Callable[[Released], None]) -> None:
    """Marks a piece as read, and announces the bytes that this frees."""
    position = ring.done(ref)
    if position is not None:
        send(Released(position=position))
