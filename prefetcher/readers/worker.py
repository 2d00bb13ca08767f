"""Decoding in a process of its own, so that parsing never takes the interpreter from the planner.

    child                                     parent
    schedule -> send ------- pipe ----------> receiver thread -> queue of num_ahead -> poll

The pipe holds less than a batch: when the queue is full the receiver stops reading, and the child waits in `send`. The child is
started by the standard library's spawn: arrays cross as numpy arrays, and importing torch would cost seconds and hundreds of MB.
It ignores SIGINT and SIGTERM, which a terminal or a service manager sends to the whole group and which are the parent's to decide
upon, and it exits when the parent does, however the parent ends.
"""

import atexit
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.context import SpawnProcess

from prefetcher.readers import parcels
from prefetcher.readers.base import open_reader
from prefetcher.readers.schedule import PlacedBatch, Position, schedule
from prefetcher.readers.source import SourceCounters, SourceInfo, source_info
from protocol.errors import RowcastError
from protocol.job import Job

NUM_AHEAD = 8
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    batch: PlacedBatch
    invalid_ids: int  # so far
    blocked_s: float  # that the child spent sending, so far


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfBatches:
    """Nothing follows: every batch of the run was sent."""


Arrival = Delivery | EndOfBatches | RowcastError


def decode(job: Job, max_steps: int | None, start: Position | None, pipe: connection.Connection) -> None:
    """The child's main function: the whole schedule into the pipe, then its end, or the error that ended it."""
    ignore_group_signals()
    threading.Thread(target=exit_with_parent, daemon=True, name="exit-with-parent").start()
    try:
        try:
            send_schedule(job, max_steps, start, pipe)
        except RowcastError as error:
            parcels.send(pipe, error)
    except BrokenPipeError:  # the parent has closed its end: it wants no more
        return


def send_schedule(job: Job, max_steps: int | None, start: Position | None, pipe: connection.Connection) -> None:
    reader = open_reader(job)
    parcels.send(pipe, source_info(job, reader, max_steps))
    blocked_s = 0.0
    for batch in schedule(job, reader, max_steps, start):
        began = time.monotonic()
        parcels.send(pipe, Delivery(batch=batch, invalid_ids=reader.invalid_ids, blocked_s=blocked_s))
        blocked_s += time.monotonic() - began
    parcels.send(pipe, EndOfBatches())


def ignore_group_signals() -> None:
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


def exit_with_parent() -> None:
    """Ends this process at once when its parent is gone, whatever the decoder is doing."""
    parent = parent_process()
    assert parent is not None, "decode runs in a child"
    connection.wait([parent.sentinel])
    os._exit(1)


@contextmanager
def group_signals_held() -> Iterator[None]:
    """A child started within inherits the mask and is safe until it ignores them; this thread gets its own afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class BatchSource:
    """A `Source` (see `source.py`) that decodes in a child process, at most `num_ahead` batches ahead of `poll`."""

    def __init__(
        self,
        job: Job,
        max_steps: int | None = None,
        start: Position | None = None,
        *,
        num_ahead: int = NUM_AHEAD,
        on_arrival: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_arrival` is called by the receiver's thread whenever `poll` may have something new: a batch, the end, an error."""
        self.counters = SourceCounters()
        self._on_arrival = on_arrival
        self._arguments = (job, max_steps, start)
        self._arrived: queue.Queue[Arrival] = queue.Queue(num_ahead)
        self._info: SourceInfo | None = None
        self._opened = threading.Event()  # the first message has arrived: the info, or why there is none
        self._closing = threading.Event()
        self._process: SpawnProcess | None = None
        self._receiver: threading.Thread | None = None
        self._failure: RowcastError | None = None
        self._ended = False
        self._starved_since: float | None = None

    def start(self) -> None:
        context = get_context("spawn")
        pipe, childs_end = context.Pipe(duplex=False)
        self._process = context.Process(target=decode, args=(*self._arguments, childs_end), name="rowcast-reader")
        resource_tracker.ensure_running()  # starting it would end the hold
        with group_signals_held():
            self._process.start()
        childs_end.close()  # so that the child's death ends the pipe
        atexit.register(self.close)  # before multiprocessing's own, which would wait for a child that ignores SIGTERM
        self._receiver = threading.Thread(target=self._receive, args=(pipe,), daemon=True, name="rowcast-receiver")
        self._receiver.start()

    @property
    def pid(self) -> int | None:
        """Of the child, once started."""
        return None if self._process is None else self._process.pid

    def info(self) -> SourceInfo:
        while not self._opened.wait(timeout=0.1) and not self._closing.is_set():
            continue
        if self._info is None:
            self._take()  # raises why there is none
            raise RowcastError("the batch source was closed before its data was opened")
        return self._info

    def poll(self) -> PlacedBatch | None:
        delivery = self._take()
        if delivery is None:
            return None
        self.counters.batches += 1
        self.counters.invalid_ids, self.counters.decoder_blocked_s = delivery.invalid_ids, delivery.blocked_s
        return delivery.batch

    @property
    def ended(self) -> bool:
        return self._ended

    def close(self) -> None:
        atexit.unregister(self.close)
        self._closing.set()
        if self._process is not None:
            self._process.kill()
        if self._receiver is not None:
            self._receiver.join(timeout=1.0)
        if self._process is not None:
            self._process.join(timeout=1.0)
        self._arrived = queue.Queue()

    def _take(self) -> Delivery | None:
        if self._failure is not None:
            raise self._failure
        if self._ended or self._closing.is_set():
            return None
        try:
            arrived = self._arrived.get_nowait()
        except queue.Empty:
            self._starved_since = self._starved_since or time.monotonic()
            return None
        finally:
            self.counters.queue_depth = self._arrived.qsize()
        self._end_starvation()
        if isinstance(arrived, RowcastError):
            self._failure = arrived
            raise arrived
        self._ended = isinstance(arrived, EndOfBatches)
        return None if isinstance(arrived, EndOfBatches) else arrived

    def _end_starvation(self) -> None:
        if self._starved_since is not None:
            self.counters.planner_blocked_s += time.monotonic() - self._starved_since
            self._starved_since = None

    def _receive(self, pipe: connection.Connection) -> None:
        """The receiver thread: from the pipe to the queue until the end, an error, or the child's death."""
        with pipe:
            while not self._closing.is_set():
                message = self._message(pipe)
                if isinstance(message, SourceInfo):
                    self._info = message
                else:
                    self._enqueue(message)
                self._opened.set()
                if isinstance(message, EndOfBatches | RowcastError):
                    return

    def _message(self, pipe: connection.Connection) -> SourceInfo | Arrival:
        try:
            message: SourceInfo | Arrival = parcels.receive(pipe)
        except (EOFError, OSError):
            return self._death()
        except Exception as error:  # noqa: BLE001 - unpickling can raise anything, and a silent receiver would hang the run
            return RowcastError(f"the decoding process sent what cannot be read ({type(error).__name__}: {error})")
        return message

    def _enqueue(self, arrival: Arrival) -> None:
        while not self._closing.is_set():
            try:
                self._arrived.put(arrival, timeout=0.1)
            except queue.Full:
                continue
            return self._on_arrival()
        return None

    def _death(self) -> RowcastError:
        """Why the pipe has ended before the batches did."""
        assert self._process is not None, "the receiver runs after start"
        self._process.join(timeout=1.0)
        code, what = self._process.exitcode, f"the decoding process (pid {self.pid}, after {self.counters.batches} batches)"
        if code is not None and code < 0:
            return RowcastError(f"{what} was killed by signal {-code}; if nobody sent it, the machine ran out of memory")
        return RowcastError(f"{what} ended with exit code {code}; its own error stands above on stderr")
