"""Decodes batches in a child process, so that parsing never holds the planner's GIL.

    child                                     parent
    schedule -> decode -> send == shared memory ==> receiver thread -> queue -> take

When the queue is full the receiver takes nothing more, and the child waits in `send`. The child starts by spawn:
importing torch would cost seconds and hundreds of MB. It
ignores stop signals, which a terminal or a service manager sends to the whole process group and the parent handles. It
exits when the parent does, however the parent ends.
"""

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.batch_parts import Columns, Part
from rowcast.prefetcher.readers.reader import Reader, open_reader
from rowcast.prefetcher.readers.schedule import SchedulePoint, places
from rowcast.prefetcher.readers.shared_arrays import ArrayReceiver, ArraySender
from rowcast.prefetcher.readers.source import SourceInfo, source_info
from rowcast.runtime.checkpoint_manifest import Position
from rowcast.runtime.children import killed_by
from rowcast.runtime.errors import DataError, RowcastError
from rowcast.runtime.stops import STOPS, held, release


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
    decoded_s: float  # by the performance counter, the same in all processes of a host


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfBatches:
    """All batches were sent."""


Message = Delivery | EndOfBatches | RowcastError


class FileState(NamedTuple):
    path: Path
    size: int
    changed_ns: int


def state_of(path: Path) -> FileState:
    try:
        found = path.stat()
    except OSError:  # it was removed
        return FileState(path, 0, 0)
    return FileState(path, found.st_size, found.st_mtime_ns)


def decode(share: DecoderShare, pipe: connection.Connection) -> None:
    """Runs in the child: sends its batches of the schedule, then the end or the error that ended it."""
    ignore_group_signals()
    threading.Thread(target=exit_with_parent, daemon=True, name="exit-with-parent").start()
    sender = ArraySender(pipe)
    try:
        try:
            send_share(share, sender)
        except RowcastError as error:
            sender.send(error)
    except BrokenPipeError:  # the parent has closed its end
        return


def send_share(share: DecoderShare, sender: ArraySender) -> None:
    reader = open_reader(share.job, share.columns)
    sender.send(source_info(share.job, reader, share.max_steps, share.start))
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
        sender.send(delivery)
        began_s = time.perf_counter()
        blocked_s += began_s - decoded_s
    sender.send(EndOfBatches())


def decode_share(share: DecoderShare, reader: Reader) -> Iterator[tuple[SchedulePoint, Part]]:
    for point, pending in places(share.job, reader, share.max_steps, share.start):
        if share.owns(point.step):
            yield point, pending()


def ignore_group_signals() -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    release()


def exit_with_parent() -> None:
    """Ends this process at once when its parent is gone."""
    parent = parent_process()
    assert parent is not None, "decode must run in a child"
    connection.wait([parent.sentinel])
    os._exit(1)


class Decoder:
    """A child and its batches: at most `num_ahead` not yet taken, and the one that it is sending."""

    def __init__(self, share: DecoderShare, num_ahead: int, on_arrival: Callable[[], None]) -> None:
        """The receiver's thread calls `on_arrival` when `take` may return something new: a batch, the end, an error."""
        self._share, self._on_arrival = share, on_arrival
        self._arrived: queue.Queue[Message] = queue.Queue(num_ahead)
        self._info: SourceInfo | None = None
        self._file_states: list[FileState] = []  # as the child has opened them
        self._opened = threading.Event()  # the first message arrived: the info, or an error
        self._closing = threading.Event()
        self._process: SpawnProcess | None = None
        self._receiver: threading.Thread | None = None
        self._num_received = 0  # batches
        self._last: EndOfBatches | RowcastError | None = None  # once taken, nothing follows

    def start(self) -> None:
        context = get_context("spawn")
        pipe, childs_end = context.Pipe()
        self._process = context.Process(target=decode, args=(self._share, childs_end), name="rowcast-reader")
        resource_tracker.ensure_running()  # first: starting it would unblock the signals
        with held():
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
            arrays = ArrayReceiver(pipe)
            while not self._closing.is_set():
                message = self._message(arrays)
                if isinstance(message, SourceInfo):
                    self._info, self._file_states = message, list(map(state_of, message.paths))
                else:
                    self._enqueue(message)
                self._opened.set()
                if isinstance(message, EndOfBatches | RowcastError):
                    return

    def _message(self, arrays: ArrayReceiver) -> SourceInfo | Message:
        try:
            message: SourceInfo | Message = arrays.receive()
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
        if code == -signal.SIGBUS:
            changed = ", ".join(str(state.path) for state in self._file_states if state != state_of(state.path))
            return DataError(
                f"{what} was killed by SIGBUS: a data file became shorter ({changed or 'but none has changed'}), or "
                "its disk failed; leave data files as they are while a run reads them"
            )
        if code is not None and code < 0:
            return RowcastError(f"{what} {killed_by(-code)}")
        return RowcastError(f"{what} ended with exit code {code}; its own error is above on stderr")
