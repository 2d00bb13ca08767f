"""Decodes batches in prefetcher.workers child processes, with the order and the bits of a single process.

    decoder 0: steps 0, 3, 6, ...  --> queue --+
    decoder 1: steps 1, 4, 7, ...  --> queue --+--> take: step 0 of the first, step 1 of the second, ...
    decoder 2: steps 2, 5, 8, ...  --> queue --+

    child                                     parent
    schedule -> decode -> send == shared memory ==> receiver thread -> queue -> take

Each message wakes threads on both sides, so small batches travel together. Every child iterates the whole schedule and
skips the others' batches. So an error appears in its batch's turn, and the end in the turn of the missing batch.
Parsing never holds the planner's GIL. When a queue is full its receiver takes nothing more until half of it is taken,
and the child waits in `send`. A child starts by spawn: importing torch would cost seconds and hundreds of MB. It
ignores stop signals, which a terminal or a service manager sends to the whole process group and the parent handles. It
exits when the parent does, however the parent ends.
"""

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from msgspec import structs
from structlog.typing import EventDict, WrappedLogger

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.readers.data_files import FileState, file_state
from rowcast.prefetcher.readers.follow import Arrivals, FilesRead, ReadFile, checksum_of, open_followed
from rowcast.prefetcher.readers.reader import Columns, Part, Reader, can_share, open_reader, places, stream_columns
from rowcast.prefetcher.readers.shared_arrays import ArrayReceiver, ArraySender
from rowcast.prefetcher.readers.source import Source, SourceCounters, SourceInfo, source_info
from rowcast.protocol.batch import Scheduled
from rowcast.protocol.parts import UNDIVIDED, Rank, owner_of
from rowcast.runtime.checkpoint_manifest import NOTHING_READ, Position, TrainingData
from rowcast.runtime.errors import ConfigError, DataError, RowcastError
from rowcast.runtime.process import killed_by
from rowcast.runtime.stages import Doorbell
from rowcast.runtime.stops import STOPS, held, release
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.timeline import Timeline

NUM_AHEAD = 8  # batches of a stream that all decoders together decode ahead; of small ones, four times as many
REMOVED = FileState(0, 0, 0, 0)
LEAST_AHEAD = 2  # per decoder, so that it decodes one batch while another waits
ENOUGH_BYTES = 2**20  # of batches in a message
DYING_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShare:
    """What one child decodes: `columns` of every `num_decoders`-th batch of the run, from `start` on. Of each, only the
    rank's samples, but of the first `num_whole` all."""

    job: Job
    columns: Columns
    max_steps: int | None
    start: Position | None
    rank: Rank = UNDIVIDED
    num_whole: int = 0
    trained_on: TrainingData = NOTHING_READ  # of the checkpoint from which a run with data.follow goes on
    index: int
    num_decoders: int
    most_together: int = 1  # batches in a message

    def owns(self, step: int) -> bool:
        return step % self.num_decoders == self.index

    def rank_at(self, step: int) -> Rank:
        return UNDIVIDED if step < (self.start or Position()).step + self.num_whole else self.rank


@dataclass(frozen=True, kw_only=True)  # no slots: Python would unpickle them field by field
class Delivery:
    scheduled: Scheduled[Part]
    invalid_ids: int  # so far
    blocked_s: float  # seconds that the child spent sending, so far
    decode_s: float
    decoded_s: float  # by the performance counter, the same in all processes of a host
    files: tuple[ReadFile, ...]  # with data.follow, of the batch


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfBatches:
    """All batches were sent."""


class Waiting(NamedTuple):
    """The child has sent everything, and waits for a file."""


class LogLine(NamedTuple):
    """What the child logs; the parent's set-up shows it."""

    level: str
    values: dict[str, Any]


Message = Delivery | EndOfBatches | RowcastError  # batches come as a tuple of deliveries


def state_of(path: Path) -> FileState:
    try:
        return file_state(path)
    except ConfigError:
        return REMOVED


def decode(share: DecoderShare, pipe: connection.Connection) -> None:
    """Runs in the child: sends its batches of the schedule, then the end or the error that ended it."""
    for number in STOPS:  # a group's signals are the parent's
        signal.signal(number, signal.SIG_IGN)
    release()
    threading.Thread(target=exit_with_parent, daemon=True, name="exit-with-parent").start()
    sender = ArraySender(pipe)
    structlog.configure(processors=[partial(pass_on, sender)])
    try:
        try:
            send_share(share, sender)
        except RowcastError as error:
            sender.send(error)
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - it ends the run, with a sentence
            traceback.print_exception(error)
            sender.send(RowcastError(f"decoding failed, see above ({type(error).__name__}: {error})"))
    except BrokenPipeError:  # the parent has closed its end
        return


def pass_on(sender: ArraySender, logger: WrappedLogger, level: str, values: EventDict) -> EventDict:
    sender.send(LogLine(level, dict(values)))
    raise structlog.DropEvent


def send_share(share: DecoderShare, sender: ArraySender) -> None:
    blocked_s, began_s, together, most = 0.0, time.perf_counter(), list[Delivery](), 1

    def before_wait() -> None:
        if together:
            sender.send(tuple(together))
            together.clear()
        sender.send(Waiting())

    arrivals = Arrivals(share.trained_on, before_wait)
    is_followed = share.job.data.follow
    reader = open_followed(share.job, share.columns, arrivals) if is_followed else open_reader(share.job, share.columns)
    sender.send(source_info(share.job, reader, share.max_steps, share.start))
    try:
        for scheduled in decode_share(share, reader):
            decoded_s = time.perf_counter()
            together.append(
                Delivery(
                    scheduled=scheduled,
                    invalid_ids=reader.invalid_ids,
                    blocked_s=blocked_s,
                    decode_s=decoded_s - began_s,
                    decoded_s=decoded_s,
                    files=arrivals.files,
                )
            )
            if len(together) >= most:
                batch = tuple(together)
                together.clear()
                most = min(share.most_together, max(1, ENOUGH_BYTES * len(batch) // sender.send(batch)))
            began_s = time.perf_counter()
            blocked_s += began_s - decoded_s
    finally:
        if together:  # they come before the error or the end
            sender.send(tuple(together))
    sender.send(EndOfBatches())


def decode_share(share: DecoderShare, reader: Reader) -> Iterator[Scheduled[Part]]:
    for place in places(share.job, reader, share.max_steps, share.start):
        if share.owns(place.step):
            yield place.holding(place.batch(share.rank_at(place.step)))


def exit_with_parent() -> None:
    """Ends this process at once when its parent is gone."""
    parent = parent_process()
    assert parent is not None, "decode must run in a child"
    connection.wait([parent.sentinel])
    os._exit(1)


class DecodingProcess:
    """A child and its batches. Those of a message arrive once fewer than `num_ahead` wait to be taken."""

    def __init__(self, share: DecoderShare, num_ahead: int, on_arrival: Callable[[], None]) -> None:
        """The receiver's thread calls `on_arrival` when `take` may return something new: a batch, the end, an error."""
        self._on_arrival = on_arrival
        self._share = replace(share, most_together=num_ahead if can_share(share.job) else 1)
        self._arrived, self._num_ahead, self._room = deque[Message](), num_ahead, Doorbell()
        self._info: SourceInfo | None = None
        self._file_states: dict[Path, FileState] = {}  # as the child has opened them
        self._opened = threading.Event()  # the first message arrived: the info, or an error
        self._closing = threading.Event()
        self._process: SpawnProcess | None = None
        self._receiver: threading.Thread | None = None
        self._num_received = 0  # batches
        self.awaits_file = False
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
        return len(self._arrived)

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
            if not self._arrived:
                return None
            arrived = self._arrived.popleft()
            if len(self._arrived) <= self._num_ahead // 2:
                self._room.ring()
            if isinstance(arrived, Delivery):
                return arrived
            self._last = arrived
        if isinstance(self._last, RowcastError):
            raise self._last
        return self._last

    def stop(self) -> None:
        self._closing.set()
        self._room.ring()
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        self.stop()
        if self._receiver is not None:
            self._receiver.join(timeout=1.0)
        if self._process is not None:
            self._process.join(timeout=1.0)
        self._arrived.clear()

    def _receive(self, pipe: connection.Connection) -> None:
        with pipe:
            arrays = ArrayReceiver(pipe)
            while not self._closing.is_set():
                message = self._message(arrays)
                if isinstance(message, SourceInfo):
                    self._info, self._file_states = message, {path: state_of(path) for path in message.paths}
                    self._opened.set()
                elif isinstance(message, Waiting):
                    self.awaits_file = True
                elif isinstance(message, tuple):
                    self._enqueue(message)
                else:
                    self._enqueue((message,))
                    return

    def _message(
        self, arrays: ArrayReceiver
    ) -> SourceInfo | Waiting | tuple[Delivery, ...] | EndOfBatches | RowcastError:
        try:
            while isinstance(message := arrays.receive(), LogLine):
                getattr(get_logger(), message.level)(**message.values)
        except (EOFError, OSError):
            return self._death()
        except Exception as error:  # noqa: BLE001 - unpickling can raise anything, and a silent receiver would hang the run
            return RowcastError(f"the decoding process sent an unreadable message ({type(error).__name__}: {error})")
        received: SourceInfo | Waiting | tuple[Delivery, ...] | EndOfBatches | RowcastError = message
        return received

    def _enqueue(self, arrivals: Sequence[Message]) -> None:
        while len(self._arrived) >= self._num_ahead and not self._closing.is_set():
            self._room.wait(1.0)
        self._num_received += sum(isinstance(own, Delivery) for own in arrivals)
        self._arrived.extend(arrivals)
        self.awaits_file = False
        self._opened.set()
        self._on_arrival()

    def _death(self) -> RowcastError:
        assert self._process is not None, "the receiver must run after start"
        self._process.join(timeout=DYING_S)  # the pipe is closed: it ends, perhaps with a large core file
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        code, what = (
            self._process.exitcode,
            f"the decoding process (pid {self.pid}, after {self._num_received} batches)",
        )
        if code == -signal.SIGBUS:
            changed = ", ".join(str(path) for path, state in self._file_states.items() if state != state_of(path))
            return DataError(
                f"{what} was killed by SIGBUS: a data file became shorter ({changed or 'but none has changed'}), or "
                "its disk failed; leave data files as they are while a run reads them"
            )
        if code is not None and code < 0:
            return RowcastError(f"{what} {killed_by(-code)}")
        return RowcastError(f"{what} ended with exit code {code}; its own error is above on stderr")


class DecodedStream:
    """A `BatchStream` of `num_decoders` processes."""

    def __init__(
        self,
        share: DecoderShare,
        *,
        num_ahead: int,
        on_arrival: Callable[[], None],
        timeline: Timeline | None,
        read: FilesRead,
    ) -> None:
        """`share`: of the first process. `read`: of all streams."""
        self.counters = SourceCounters()
        self._read = read
        self._timeline, self._columns, num_decoders = timeline, share.columns, share.num_decoders
        self._decoded_s: list[float | None] = [None] * num_decoders  # when each decoder had its last batch
        ahead = max(-(-num_ahead // num_decoders), min(LEAST_AHEAD, num_ahead))
        shares = [replace(share, index=index) for index in range(num_decoders)]
        self._decoders = [DecodingProcess(share, ahead, on_arrival) for share in shares]
        self._next_step = (share.start or Position()).step
        self._invalid_ids, self._blocked_s = [0] * num_decoders, [0.0] * num_decoders  # of each decoder
        self.ended = False

    def start(self) -> None:
        atexit.register(self.close)  # before multiprocessing's, which would wait for children that ignore SIGTERM
        for decoder in self._decoders:
            decoder.start()

    @property
    def pids(self) -> list[int]:
        return [decoder.pid for decoder in self._decoders if decoder.pid is not None]

    def info(self) -> SourceInfo:
        return self._decoders[0].info()

    def take(self) -> Scheduled[Part] | None:
        index = self._next_step % len(self._decoders)
        delivery = self._decoders[index].take()
        self.counters.queue_depth = sum(decoder.num_waiting for decoder in self._decoders)
        self.counters.awaits_file = delivery is None and self._decoders[index].awaits_file
        if delivery is None:
            return None
        if isinstance(delivery, EndOfBatches):
            self.ended = True
            return None
        step = delivery.scheduled.step
        assert step == self._next_step, f"decoder {index} gave step {step}, but step {self._next_step} follows"
        self._next_step += 1
        self._read.add(delivery.files)
        self.counters.files = checksum_of(delivery.files)
        self._show(index, delivery)
        self.counters.invalid_ids += delivery.invalid_ids - self._invalid_ids[index]
        self._invalid_ids[index], self._blocked_s[index] = delivery.invalid_ids, delivery.blocked_s
        self.counters.batches += 1
        return delivery.scheduled

    def close(self) -> None:
        atexit.unregister(self.close)
        for decoder in self._decoders:
            decoder.stop()
        for decoder in self._decoders:
            decoder.close()

    def _show(self, index: int, delivery: Delivery) -> None:
        """Records a batch's decoding on the timeline, and before it the child's wait to send the previous one."""
        if self._timeline is None:
            return
        track, before_s = f"decoder {index}" + (" (dense)" if self._columns == "dense" else ""), self._decoded_s[index]
        if before_s is not None:
            blocked_s = delivery.blocked_s - self._blocked_s[index]
            self._timeline.add("wait", "queue", blocked_s, ended_s=before_s + blocked_s, track=track)
        self._timeline.add(
            "work", "decode", delivery.decode_s, delivery.scheduled.step, ended_s=delivery.decoded_s, track=track
        )
        self._decoded_s[index] = delivery.decoded_s


def owns_tables(job: Job, rank: Rank) -> bool:
    """Returns whether the rank owns a placed table, so that it needs the ids of all samples."""
    tables = [table for group in group_specs(job) for table in group.tables]
    return any(owner_of(table, rank.count) == rank.number for table in tables)


class WorkerSource(Source):
    """A `Source` that decodes in child processes, at most about `num_ahead` batches ahead of the polls."""

    def __init__(
        self,
        job: Job,
        max_steps: int | None = None,
        start: Position | None = None,
        *,
        rank: Rank = UNDIVIDED,
        num_whole: int = 0,
        num_ahead: int = NUM_AHEAD,
        on_arrival: Callable[[], None] = lambda: None,
        timeline: Timeline | None = None,
        trained_on: TrainingData = NOTHING_READ,
    ) -> None:
        """`rank`: whose samples are decoded, after `num_whole` batches of all samples. If it owns placed tables, the
        ids of all samples are decoded always. The receivers' threads call `on_arrival` whenever a poll may return
        something new: a batch, the end, an error."""
        self._job = job
        self._share = DecoderShare(
            job=job,
            columns="all",
            max_steps=max_steps,
            start=start,
            rank=rank,
            num_whole=num_whole,
            trained_on=trained_on,
            index=0,
            num_decoders=job.prefetcher.workers if can_share(job) else 1,
        )
        self.read = FilesRead(trained_on)
        self._stream = partial(
            DecodedStream, num_ahead=num_ahead, on_arrival=on_arrival, timeline=timeline, read=self.read
        )
        self._decoded = self._new_streams()
        super().__init__(self._decoded[0], self._decoded[1] if len(self._decoded) > 1 else None)

    def _new_streams(self) -> list[DecodedStream]:
        ids = replace(self._share, num_whole=sys.maxsize) if owns_tables(self._job, self._share.rank) else self._share
        dense = replace(self._share, num_decoders=1)  # dense features are little work, not far ahead
        return [
            self._stream(replace(dense if columns == "dense" else ids, columns=columns))
            for columns in stream_columns(self._job)
        ]

    def place(self, job: Job, start: Position) -> None:
        """Decodes what the rank needs with the tables of `job`, which only places them otherwise. All batches before
        `start` have been returned and put back."""
        before, self._job = self._job, structs.replace(self._job, tables=job.tables)
        if owns_tables(before, self._share.rank) == owns_tables(job, self._share.rank):
            return
        for stream in self._decoded:
            stream.close()
        self._share = replace(self._share, job=self._job, start=start, num_whole=0)
        self._decoded = self._new_streams()
        self._go_on_with(self._decoded[0], self._decoded[1] if len(self._decoded) > 1 else None)
        super().start()

    def start(self) -> None:
        if self._job.prefetcher.workers > 1 and not can_share(self._job):
            get_logger().warning(
                "one worker decodes: batches of a data set of your own are made one after another",
                workers=self._job.prefetcher.workers,
                format=self._job.data.format,
            )
        super().start()

    @property
    def pids(self) -> list[int]:
        return [pid for stream in self._decoded for pid in stream.pids]
