"""Sends messages from any thread, and hands each arriving message to its handler.

If the two ends share no memory, each has a copy of both rings, and a message carries the bytes that it announces:

    shared    writer -> ring <- reader                      the message holds only the position
    mirrored  writer -> ring -> link -> ring <- reader      it also holds the bytes, copied before any handler runs

Only the conversation knows which of the two applies.

Sends the model state through a ring, piece by piece: to the trainer at a start, from it at a barrier. `PeerWatch`
checks that the peer connects, stays and makes progress, on a thread that a busy main loop does not delay.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from rowcast.job.schema import Transport
from rowcast.job.units import parse_seconds
from rowcast.protocol.messages import AnyMessage, Failure, Heartbeat, RingRef
from rowcast.protocol.plan import cut_bytes, is_sampled
from rowcast.protocol.session import Session
from rowcast.protocol.transport.ring import Payload, RingReader, RingSlice, RingWriter
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.errors import (
    Mismatch,
    PeerKilled,
    PeerLost,
    PeerNeverCame,
    RemoteProtocolError,
    RowcastError,
    peer_failure,
    told,
)
from rowcast.runtime.telemetry.logs import get_logger


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


class Link(Protocol):
    """One end of a link, which carries frames in order, without blocking and, while both ends live, without loss. Any
    single thread may call `send`, and any single thread `receive`."""

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


Handler = Callable[[Any], None]


class Conversation:
    """A stage: `advance` receives. Handlers run on its thread; they only note what arrived and never wait."""

    def __init__(self, session: Session, link: Link) -> None:
        self.session = session
        # called with the type of each message once its handler has run
        self.on_message: Callable[[type[AnyMessage]], None] = lambda kind: None
        self._failure: Failure | None = None  # the peer's
        self._link = link
        self._lock = threading.Lock()  # a message gets its sequence number and its turn on the link together
        self._handlers: dict[type[AnyMessage], Handler] = {}
        self._outgoing: RingWriter | None = None
        self._incoming: RingReader | None = None
        self._num_refused = 0  # messages from the peer

    @property
    def failure_received(self) -> bool:
        return self._failure is not None

    @property
    def frames_refused(self) -> int:
        """Counts the peer's invalid messages and what the link refused: frames of strangers, callers without a key."""
        return self._num_refused + self._link.refused

    def listen(self, handlers: Mapping[type[Any], Handler]) -> None:
        """Sets the handler of each message type. A message without a handler is only checked."""
        self._handlers.update(handlers)

    def close(self) -> None:
        """Drops the handlers and the objects that they hold. Call it after the last receive."""
        self._handlers.clear()

    def carry(self, outgoing: RingWriter, incoming: RingReader) -> None:
        """Makes payloads travel with their messages, for ends that share no memory; `incoming` is a mirror.

        Call it before the first message with a payload is sent or received."""
        self._outgoing, self._incoming = outgoing, incoming

    def send(self, message: AnyMessage) -> None:
        """Never blocks. Raises LocalProtocolError if the conversation does not allow the message now.

        Raises the peer's error once its Failure has arrived, so that every thread reports the same sentence."""
        with self._lock:
            if self._failure is not None:
                # made anew, because the traceback of one that is kept would hold the caller's objects
                raise peer_failure(self._failure.code, self._failure.sentence)
            frame = self.session.encode(message)
            ref: RingRef | None = getattr(message, "payload", None)
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
            raise peer_failure(message.code, message.sentence)
        return True

    def _received(self, frame: bytes, payload: Payload) -> AnyMessage:
        with self._lock:
            message = self.session.decode(frame)
            if isinstance(message, Failure):
                self._failure = message
        self._deposit(message, payload)
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(message)
        self.on_message(type(message))
        return message

    def _deposit(self, message: AnyMessage, payload: Payload) -> None:
        """Raises RemoteProtocolError before it copies anything if the number of bytes is not the announced one."""
        ref: RingRef | None = getattr(message, "payload", None)
        travels = self._incoming is not None and ref is not None
        expected = ref.nbytes if ref is not None and travels else 0
        arrived = sum(len(part) for part in payload)
        if arrived != expected:
            raise RemoteProtocolError(
                f"a {type(message).__name__} came with {arrived} bytes of payload instead of {expected}"
            )
        if self._incoming is not None and ref is not None:
            self._incoming.deposit(ref, payload)


HEARTBEAT_EVERY_S = 1.0
PAUSE_S = 2.0  # a longer time between two ticks means that this process itself was stopped and received nothing
GONE_GRACE_S = 0.5  # our queues may still hold what the peer sent before it left
REPORT_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessProgress:
    """This process's progress. Each tick compares it with the last one."""

    step_begun: int | None
    step_done: int | None
    work: int  # grows with all other progress
    waiting_for: str
    ended: bool  # only the peer's Bye is still expected
    ready: bool = True  # this process can greet a peer


class PeerWatch:
    """A stage that sends heartbeats. It raises PeerLost, with what it waited for and how long, or the peer's error."""

    def __init__(
        self,
        peer: str,
        conversation: Conversation,
        link: ZmqLink,
        transport: Transport,
        progress: Callable[[], ProcessProgress],
        connected: Callable[[], bool],
        failure: Callable[[], RowcastError | None],
        is_starting: Callable[[], bool],
    ) -> None:
        """`failure` returns the error of a peer that failed before it could connect, or None. `is_starting`: whether
        the peer is seen to start."""
        self._peer = peer
        self._conversation = conversation
        self._link = link
        self._connect_timeout_s = parse_seconds(transport.connect_timeout)
        self._stall_timeout_s = parse_seconds(transport.stall_timeout)
        self._silence_timeout_s = parse_seconds(transport.silence_timeout)
        self._progress = progress
        self._connected = connected
        self._failure, self._is_starting = failure, is_starting
        self._peer_waits_for = "nothing yet"
        self._peer_progress: tuple[int | None, ...] = ()
        self._started_s = time.monotonic()
        self._listening_since_s = self._last_tick_s = self._started_s
        self._next_beat_s = self._started_s
        self._gone_since_s: float | None = None
        self._reached: tuple[int | None, ...] | None = None  # the progress of both sides
        self._last_change_s = self._started_s
        self._next_report_s = REPORT_EVERY_S
        conversation.listen({Heartbeat: self._heard})

    def advance(self) -> bool:
        now_s = time.monotonic()
        # after a pause of this process it has received nothing, whatever the peer did
        if now_s - self._last_tick_s > PAUSE_S:
            self._listening_since_s = self._last_change_s = now_s
        self._last_tick_s = now_s
        progress = self._progress()
        if not self._connected():
            failure = self._failure()
            if failure is not None and not isinstance(failure, PeerKilled):  # a killed one is started again
                raise failure
            self._check_gone(now_s)
            self._check_coming(progress, now_s)
        elif not progress.ended:
            self._check_gone(now_s)
            self._check_silence(now_s)
            self._check_progress(progress, now_s)
        if now_s >= self._next_beat_s and self._link.last_received_s is not None:
            self._next_beat_s = now_s + HEARTBEAT_EVERY_S
            self._conversation.send(
                Heartbeat(
                    step_begun=progress.step_begun,
                    step_done=progress.step_done,
                    work=progress.work,
                    waiting_for=progress.waiting_for,
                )
            )
        return False

    def _heard(self, message: Heartbeat) -> None:
        self._peer_waits_for = message.waiting_for
        self._peer_progress = (message.step_begun, message.step_done, message.work)

    def _check_coming(self, progress: ProcessProgress, now_s: float) -> None:
        """Checks the time-out, which starts when this side is ready, and again whenever the peer is seen to start and
        at each frame of a peer that is not ready yet."""
        self._last_change_s = now_s
        if not progress.ready or self._is_starting():
            self._started_s = now_s
        if now_s - max(self._started_s, self._link.last_received_s or 0.0) > self._connect_timeout_s:
            raise PeerNeverCame(
                f"no {self._peer} came within {self._connect_timeout_s:g} s; start it with the same job file, "
                f"or raise transport.connect_timeout"
            )

    def _check_gone(self, now_s: float) -> None:
        if not self._link.peer_gone or self._link.pending:  # its last frames say why it left
            return
        self._gone_since_s = self._gone_since_s or now_s
        if now_s - self._gone_since_s > GONE_GRACE_S:
            noted = self._failure()
            gone = PeerLost(f"the {self._peer} went away; its log or output says why. Start again")
            raise noted if isinstance(noted, PeerKilled) else gone

    def _check_silence(self, now_s: float) -> None:
        silent_s = now_s - max(self._link.last_received_s or self._started_s, self._listening_since_s)
        if silent_s <= self._silence_timeout_s:
            return
        if not self._link.peer_runs:
            raise PeerLost(
                f"the {self._peer} has been silent for {silent_s:.1f} s (transport.silence_timeout); "
                "it was stopped, or its host is overloaded"
            )
        if silent_s > self._stall_timeout_s:
            raise PeerLost(
                f"the {self._peer} has been silent for {silent_s:.0f} s (transport.stall_timeout), although it lives; "
                "it hangs, or this host is overloaded"
            )

    def _check_progress(self, progress: ProcessProgress, now_s: float) -> None:
        reached = (progress.step_begun, progress.step_done, progress.work, *self._peer_progress)
        if reached != self._reached:
            self._last_change_s, self._next_report_s = now_s, REPORT_EVERY_S
        self._reached = reached
        stalled_s = now_s - self._last_change_s
        if stalled_s > self._stall_timeout_s:
            raise PeerLost(
                f"no progress for {stalled_s:.0f} s (transport.stall_timeout) after step {progress.step_done}: "
                f"the {self._conversation.session.role} waits for {progress.waiting_for}, "
                f"the {self._peer} for {self._peer_waits_for}"
            )
        if stalled_s > self._next_report_s:
            self._next_report_s += REPORT_EVERY_S
            get_logger().warning(
                "no progress", seconds=round(stalled_s), step_done=progress.step_done, waiting_for=progress.waiting_for,
                peer_waits_for=self._peer_waits_for,
            )  # fmt: skip


def tell_peer(conversation: Conversation, error: BaseException) -> None:
    """Makes the peer end with the same sentence and exit code, unless the error came from the peer.

    Also sends it to a peer that was given up, which may only be slow and then reports why it was left."""
    if conversation.failure_received or (isinstance(error, RowcastError) and error.is_peers):
        return
    code, sentence = told(error)
    try:
        conversation.send(Failure(code=code, sentence=sentence))
    except RowcastError:
        get_logger().warning("the peer could not be told", sentence=sentence)
