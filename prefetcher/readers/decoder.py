"""Decodes batches in a child process, so that parsing never takes the interpreter from the planner.

    child                                     parent
    schedule -> decode -> send ---- pipe ---> receiver thread -> queue -> take

The pipe holds less than a batch: when the queue is full the receiver stops reading, and the child waits in `send`. The
child is started by the standard library's spawn: arrays cross as numpy arrays, and importing torch would cost seconds
and hundreds of MB. It ignores SIGINT and SIGTERM, which a terminal or a service manager sends to the whole process
group and which the parent handles, and it exits when the parent does, however the parent ends.
"""

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

from rowcast.job.schema import Job
from rowcast.prefetcher.readers import array_pipe
from rowcast.prefetcher.readers.batch_parts import Columns, Part
from rowcast.prefetcher.readers.reader import Reader, open_reader
from rowcast.prefetcher.readers.schedule import SchedulePoint, places
from rowcast.prefetcher.readers.source import SourceInfo, source_info
from rowcast.runtime.errors import RowcastError
from rowcast.runtime.position import Position

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShare:
    """What one child decodes: `columns` of every `num_decoders`-th batch of the run, from `start` on."""

    job: Job
    columns: Columns
    max_steps: int | None
    start: Position | None
    index: int
    num_decoders: int

    def owns(self, step: int) -> bool:
        return step % self.num_decoders == self.index


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    point: SchedulePoint
    part: Part
    invalid_ids: int  # so far
    blocked_s: float  # seconds that the child spent sending, so far
    decode_s: float
    decoded_s: float  # by the performance counter, which all processes of a host share


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfBatches:
    """Every batch of the share was sent."""


Message = Delivery | EndOfBatches | RowcastError


def decode(share: DecoderShare, pipe: connection.Connection) -> None:
    """The child's main function: sends its share of the schedule, then the end or the error that ended it."""
    ignore_group_signals()
    threading.Thread(target=exit_with_parent, daemon=True, name="exit-with-parent").start()
    try:
        try:
            send_share(share, pipe)
        except RowcastError as error:
            array_pipe.send(pipe, error)
    except BrokenPipeError:  # the parent has closed its end
        return


def send_share(share: DecoderShare, pipe: connection.Connection) -> None:
    reader = open_reader(share.job, share.columns)
    array_pipe.send(pipe, source_info(share.job, reader, share.max_steps, share.start))
    blocked_s, began_s = 0.0, time.perf_counter()
    for point, part in decode_share(share, reader):
        decoded_s = time.perf_counter()
        delivery = Delivery(
            point=point,
            part=part,
            invalid_ids=reader.invalid_ids,
            blocked_s=blocked_s,
            decode_s=decoded_s - began_s,
            decoded_s=decoded_s,
        )
        array_pipe.send(pipe, delivery)
        began_s = time.perf_counter()
        blocked_s += began_s - decoded_s
    array_pipe.send(pipe, EndOfBatches())


def decode_share(share: DecoderShare, reader: Reader) -> Iterator[tuple[SchedulePoint, Part]]:
    for point, pending in places(share.job, reader, share.max_steps, share.start):
        if share.owns(point.step):
            yield point, pending()


def ignore_group_signals() -> None:
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


def exit_with_parent() -> None:
    """Ends this process at once when its parent is gone, whatever the decoder is doing."""
    parent = parent_process()
    assert parent is not None, "decode must run in a child"
    connection.wait([parent.sentinel])
    os._exit(1)


@contextmanager
def group_signals_held() -> Iterator[None]:
    """Blocks the signals, and a child started meanwhile inherits that until it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Decoder:
    """A child and its batches: at most `num_ahead` that were not taken, besides the one that it is sending."""

    def __init__(self, share: DecoderShare, num_ahead: int, on_arrival: Callable[[], None]) -> None:
        """The receiver's thread calls `on_arrival` whenever `take` may return something new: a batch, the end, an
        error."""
        self._share, self._on_arrival = share, on_arrival
        self._arrived: queue.Queue[Message] = queue.Queue(num_ahead)
        self._info: SourceInfo | None = None
        self._opened = threading.Event()  # the first message has arrived: the info, or an error
        self._closing = threading.Event()
        self._process: SpawnProcess | None = None
        self._receiver: threading.Thread | None = None
        self._num_received = 0  # batches
        self._last: EndOfBatches | RowcastError | None = None  # once taken, nothing follows

    def start(self) -> None:
        context = get_context("spawn")
        pipe, childs_end = context.Pipe(duplex=False)
        self._process = context.Process(target=decode, args=(self._share, childs_end), name="rowcast-reader")
        resource_tracker.ensure_running()  # first, as starting it would unblock the signals
        with group_signals_held():
            self._process.start()
        childs_end.close()  # so that the child's death ends the pipe
        self._receiver = threading.Thread(target=self._receive, args=(pipe,), daemon=True, name="rowcast-receiver")
        self._receiver.start()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def num_waiting(self) -> int:
        return self._arrived.qsize()

    def info(self) -> SourceInfo:
        """Waits for the info. Raises the error if there is none."""
        while not self._opened.wait(timeout=0.1) and not self._closing.is_set():
            continue
        if self._info is None:
            self.take()  # raises the error
            raise RowcastError("the batch source was closed before its data was opened")
        return self._info

    def take(self) -> Delivery | EndOfBatches | None:
        """Returns the next batch, the end, or None if nothing has arrived, without waiting.

        Raises the error that ended the child. Every later call returns or raises the same end or error.
        """
        if self._last is None and not self._closing.is_set():
            try:
                arrived = self._arrived.get_nowait()
            except queue.Empty:
                return None
            if isinstance(arrived, Delivery):
                return arrived
            self._last = arrived
        if isinstance(self._last, RowcastError):
            raise self._last
        return self._last

    def stop(self) -> None:
        self._closing.set()
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        self.stop()
        if self._receiver is not None:
            self._receiver.join(timeout=1.0)
        if self._process is not None:
            self._process.join(timeout=1.0)
        self._arrived = queue.Queue()

    def _receive(self, pipe: connection.Connection) -> None:
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

    def _message(self, pipe: connection.Connection) -> SourceInfo | Message:
        try:
            message: SourceInfo | Message = array_pipe.receive(pipe)
        except (EOFError, OSError):
            return self._death()
        except Exception as error:  # noqa: BLE001 - unpickling can raise anything, and a silent receiver would hang the run
            return RowcastError(f"the decoding process sent an unreadable message ({type(error).__name__}: {error})")
        self._num_received += isinstance(message, Delivery)
        return message

    def _enqueue(self, arrival: Message) -> None:
        while not self._closing.is_set():
            try:
                self._arrived.put(arrival, timeout=0.1)
            except queue.Full:
                continue
            return self._on_arrival()
        return None

    def _death(self) -> RowcastError:
        assert self._process is not None, "the receiver must run after start"
        self._process.join(timeout=1.0)
        code, what = (
            self._process.exitcode,
            f"the decoding process (pid {self.pid}, after {self._num_received} batches)",
        )
        if code is not None and code < 0:
            return RowcastError(
                f"{what} was killed by signal {-code}; if no one sent it, the machine ran out of memory"
            )
        return RowcastError(f"{what} ended with exit code {code}; its own error is above on stderr")
