"""Implements the link between two processes: one thread with the ZMQ socket, and a queue in each direction.

    any thread  -> send -> outbox -> \\                      / -> the peer
                                      thread: poll, move, poll
    any thread <- receive <- inbox <- /                      \\ <- the peer

The thread blocks only in the poll. A full queue is a bug, ours or the peer's: credits bound the outstanding frames far
below its limit.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import zmq

from rowcast.job.schema import Transport
from rowcast.protocol.session import MAX_FRAME_BYTES
from rowcast.protocol.transport.endpoint import Refusals, address_of
from rowcast.protocol.transport.ring import Payload
from rowcast.protocol.transport.zmq_ends import QUEUE_FRAMES, Dealer, Router, ZmqEnd
from rowcast.runtime.errors import LocalProtocolError, RemoteProtocolError
from rowcast.runtime.run_directory import Role

CLOSE_BUDGET_S = 0.8  # how long a closing link may send what is queued
FULL_RETRY_MS = 20
RECEIVE_BATCH = 1024  # frames received before the outbox is sent
CHECK_MS = 1000  # between checks of the backlog
INBOX_BYTES = 16 * MAX_FRAME_BYTES  # frames in the inbox; the rings bound payloads separately


def silent() -> None: ...


class ZmqLink:
    """Implements `Link`. Call `start()` or use it as a context manager; any thread may call `send` and `receive`."""

    def __init__(self, end: ZmqEnd, on_receive: Callable[[], None], refusals: Refusals, limit_bytes: int) -> None:
        self.received_bytes = 0  # frames and payloads
        self.last_received_s: float | None = None  # monotonic clock
        self.peer_gone_s: float | None = None  # monotonic clock
        self._end = end
        self._on_receive = on_receive
        self._refusals = refusals
        self._outbox: deque[tuple[bytes, memoryview | None]] = deque()
        self._inbox: deque[tuple[bytes, Payload]] = deque()
        self._inbox_limit_bytes = limit_bytes
        self._bytes_taken = 0  # received_bytes - _bytes_taken is what the inbox holds
        self._error: BaseException | None = None
        self._closing = False
        self._wake: int | None = None  # eventfd; written under the lock, so that `close` cannot close it meanwhile
        self._wake_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    @classmethod
    def of(
        cls,
        role: Role,
        run_dir: Path,
        on_receive: Callable[[], None] = silent,
        directory: Path | None = None,
        transport: Transport | None = None,
    ) -> Self:
        """Makes the prefetcher's end, which serves, or the trainer's, which retries until a prefetcher answers and
        keeps the frames sent before that. `directory`: for the unix socket; by default this user's.

        The link's thread calls `on_receive` when frames have arrived or the peer is gone; it must not wait or close
        the link."""
        refusals, limit_bytes = Refusals(), INBOX_BYTES
        if transport is not None and transport.is_tcp:
            limit_bytes += transport.mirror_bytes
        kind = Router if role == "prefetcher" else Dealer
        end: ZmqEnd = kind(address_of(run_dir, directory, transport, refusals), refusals, limit_bytes)
        return cls(end, on_receive, refusals, limit_bytes)

    @property
    def peer_gone(self) -> bool:
        """Whether the peer was connected and has closed its end. The inbox then holds all that it sent."""
        return self.peer_gone_s is not None

    @property
    def peer_runs(self) -> bool:
        """Whether the peer is seen to live, on this host, and no signal has stopped it."""
        process = self._end.peer_process
        return process is not None and process.runs

    @property
    def pending(self) -> int:
        return len(self._inbox)

    @property
    def refused(self) -> int:
        return self._refusals.count

    def start(self) -> None:
        """Raises ConfigError if another prefetcher serves there, a key is unusable, or the socket cannot be made."""
        self._end.open()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread.start()

    def send(self, frame: bytes, payload: memoryview | None = None) -> None:
        """Queues a frame and its payload, without a copy. If the peer is gone, both are discarded.

        Raises the thread's error, or LocalProtocolError after `close`."""
        self._raise_error()
        if self._closing or self._wake is None:
            raise LocalProtocolError("a frame is sent on a link that is not open")
        if len(self._outbox) >= QUEUE_FRAMES:
            raise LocalProtocolError(f"{QUEUE_FRAMES} frames wait to be sent; credits should bound them")
        self._outbox.append((frame, payload))
        self._ring()

    def receive(self) -> tuple[bytes, Payload] | None:
        """Returns the next frame with its payload, or None. Raises the thread's error once every earlier frame is
        received."""
        if self._inbox:
            frame, payload = self._inbox.popleft()
            self._bytes_taken += num_bytes(frame, payload)
            return frame, payload
        self._raise_error()
        return None

    def close(self) -> None:
        """Sends what is queued while the peer accepts it, for less than a second, then joins the thread."""
        self._closing = True
        if self._wake is None:
            return
        self._ring()
        self._thread.join()
        with self._wake_lock:
            os.close(self._wake)
            self._wake = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _ring(self) -> None:
        with self._wake_lock:
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)

    # the thread

    def _run(self) -> None:
        deadline_s = time.monotonic()
        try:
            deadline_s = self._move_until_closed()
        except BaseException as error:  # noqa: BLE001 - the next caller must get any error
            self._error = error
            with suppress(Exception):  # `on_receive` itself may have failed
                self._on_receive()
        finally:
            linger_s = 0.0 if self.peer_gone or not self._end.peer_here else deadline_s - time.monotonic()
            self._end.close(max(0, round(linger_s * 1000)))

    def _move_until_closed(self) -> float:
        """Runs until `close`. Returns the monotonic time by which closing must end."""
        assert self._wake is not None, "started"
        poller = zmq.Poller()
        for source in (*self._end.sockets, self._wake):
            poller.register(source, zmq.POLLIN)
        deadline_s: float | None = None
        next_check_s, has_news = time.monotonic(), True
        while True:
            busy = has_news and self._receive()
            full = not self._send_queued()
            if self._closing:
                deadline_s = deadline_s or time.monotonic() + CLOSE_BUDGET_S
                if not full or time.monotonic() >= deadline_s:
                    return deadline_s
            ready = {source for source, _ in poller.poll(0 if busy else FULL_RETRY_MS if full else CHECK_MS)}
            if self._wake in ready:
                os.eventfd_read(self._wake)
            has_news = busy or bool(ready - {self._wake})
            if (now_s := time.monotonic()) >= next_check_s:
                self._end.check_backlog()
                next_check_s = now_s + CHECK_MS / 1000

    def _receive(self) -> bool:
        """Moves arrived frames to the inbox. Returns whether there may be more."""
        self._end.note_events()
        num_received = 0
        while num_received < RECEIVE_BATCH and self._end.has_arrived:
            arrived = self._end.receive()
            if arrived is not None:
                self._enqueue(*arrived)
            num_received += 1
        drained = num_received < RECEIVE_BATCH
        newly_gone = drained and self._end.peer_gone and not self.peer_gone
        if newly_gone:
            self._end.disconnect()
            self.peer_gone_s = time.monotonic()
        if num_received or newly_gone:
            self._on_receive()
        return not drained

    def _enqueue(self, frame: bytes, payload: Payload) -> None:
        self.last_received_s = time.monotonic()
        self.received_bytes += num_bytes(frame, payload)
        waiting = self.received_bytes - self._bytes_taken
        if len(self._inbox) >= QUEUE_FRAMES or waiting > self._inbox_limit_bytes:
            raise RemoteProtocolError(
                f"{len(self._inbox) + 1} frames of {waiting} bytes came faster than they are taken; "
                f"up to {QUEUE_FRAMES} of {self._inbox_limit_bytes} may wait"
            )
        self._inbox.append((frame, payload))

    def _send_queued(self) -> bool:
        """Moves the outbox to the socket. Returns False if the socket's queue is full."""
        while self._outbox and not self.peer_gone and self._end.peer_here:
            try:
                self._end.try_send(*self._outbox[0])
            except zmq.Again:
                return False
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                break  # the peer is gone; the monitor will report it
            self._outbox.popleft()
        if self.peer_gone:
            self._outbox.clear()
        return True


def num_bytes(frame: bytes, payload: Payload) -> int:
    return len(frame) + sum(len(part) for part in payload)
