"""Checks that the peer connects, stays and makes progress, on a thread that a busy main loop does not delay."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from rowcast.job.schema import Transport
from rowcast.job.units import parse_seconds
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import Failure, Heartbeat
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.errors import PeerKilled, PeerLost, PeerNeverCame, RowcastError, told
from rowcast.runtime.telemetry.logs import get_logger

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
        self._allow_for_pause(now_s)
        progress = self._progress()
        if not self._connected():
            self._check_failed()
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

    def _allow_for_pause(self, now_s: float) -> None:
        if now_s - self._last_tick_s > PAUSE_S:
            self._listening_since_s = self._last_change_s = now_s
        self._last_tick_s = now_s

    def _check_failed(self) -> None:
        failure = self._failure()
        if failure is not None and not isinstance(failure, PeerKilled):  # a killed one is started again
            raise failure

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

    Also sends it to a peer that was given up: it may only be slow, and then reports why it was left."""
    if conversation.failure_received or (isinstance(error, RowcastError) and error.is_peers):
        return
    code, sentence = told(error)
    try:
        conversation.send(Failure(code=code, sentence=sentence))
    except RowcastError:
        get_logger().warning("the peer could not be told", sentence=sentence)
