"""Sends victims home: copies them from evict staging to the ring, announces them, then reports their step done.

It has a separate thread: the main loop may be waiting for a `StepReady` that needs the very rows that are leaving.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from rowcast.job.tables import aligned
from rowcast.protocol.messages import RowsBack, RowSpan, StepDone
from rowcast.protocol.packing import ARRAY_ALIGNMENT, barrier_stamp, is_sampled, plan_stamp
from rowcast.protocol.transport.ring import RingSlice, RingWriter
from rowcast.runtime.crash_points import crash_point
from rowcast.trainer.device.host_memory import HostMemory
from rowcast.trainer.device.streams import Event, Streams
from rowcast.trainer.step.metrics import TrainerCounters
from rowcast.trainer.step.staging import StagingSpan


@dataclass(slots=True, kw_only=True)
class EvictTask:
    """Rows in evict staging for one message."""

    step: int | None
    barrier: int | None
    piece: int
    last: bool
    sources: list[tuple[RowSpan, Tensor]]  # f32 [count, record_floats] in evict staging
    room: StagingSpan  # of these rows; `used` is set when the copy to the ring is issued
    gathered: Event

    @property
    def stamp(self) -> int:
        if self.barrier is not None:
            return barrier_stamp(self.barrier, self.piece)
        assert self.step is not None, "victims belong to a step"
        return plan_stamp(self.step, self.piece)


@dataclass(slots=True)
class InFlight:
    task: EvictTask
    spans: tuple[RowSpan, ...]
    space: RingSlice | None  # None: there are no rows


class Sender:
    """The main thread calls `send_rows` and `finish` in step order; the sender's thread calls the rest."""

    def __init__(
        self,
        streams: Streams,
        ring: RingWriter,
        memory: HostMemory,
        counters: TrainerCounters,
        send: Callable[[RowsBack | StepDone], None],
    ) -> None:
        self.waiting_for_ring = False  # set by the sender's thread
        self._streams = streams
        self._ring = ring
        self._memory = memory
        self._counters = counters
        self._send = send
        self._tasks: deque[EvictTask] = deque()
        self._copying: deque[InFlight] = deque()
        self._finished: deque[StepDone] = deque()

    @property
    def queued(self) -> int:
        return len(self._tasks) + len(self._copying)

    @property
    def awaits_device(self) -> bool:
        return bool(self._copying) and self._streams.evict.is_device

    def send_rows(self, task: EvictTask) -> None:
        self._tasks.append(task)

    def finish(self, message: StepDone) -> None:
        """Queues the report of a complete step, after its plan's tasks."""
        self._finished.append(message)

    def idled(self, seconds: float) -> None:
        """Counts `seconds` without work for the sender's thread."""
        if self.waiting_for_ring:
            self._counters.stalled("ring", seconds)
        elif not self.queued:
            self._counters.blocked("rows_back", "consumer", seconds)

    def copy_out_next(self) -> bool:
        """Issues the copy of the oldest rows from evict staging to the ring."""
        if not self._tasks:
            return False
        task = self._tasks[0]
        spans, nbytes = compact(task.sources)
        space = self._ring.try_allocate(nbytes) if nbytes else None
        self.waiting_for_ring = bool(nbytes) and space is None
        if self.waiting_for_ring:
            return False
        with self._counters.shown("copy out", task.step):
            self._copy_out(task, spans, space)
        self._copying.append(InFlight(task, spans, space))
        self._tasks.popleft()  # last: a task in neither queue counts as sent
        return True

    def _copy_out(self, task: EvictTask, spans: tuple[RowSpan, ...], space: RingSlice | None) -> None:
        stream = self._streams.evict
        stream.wait(task.gathered, "gathered")
        if space is not None:
            payload = self._memory.leaving(space.payload)
            for span, (_, source) in zip(spans, task.sources, strict=True):
                rows = payload[span.offset : span.offset + source.nbytes].view(torch.float32).view(source.shape)
                stream.copy(source, rows)
        task.room.used = stream.record()

    def send_copied(self) -> bool:
        if not self._copying:
            return False
        flight = self._copying[0]
        assert flight.task.room.used is not None, "the copy was issued"
        if not self._streams.done(flight.task.room.used, "sent"):
            return False
        with self._counters.shown("send back", flight.task.step):
            self._send_flight(flight)
        self._copying.popleft()
        return True

    def _send_flight(self, flight: InFlight) -> None:
        task = flight.task
        ref = None
        if flight.space is not None:
            self._memory.landed(flight.space.payload)
            ref = self._ring.commit(flight.space, task.stamp, checksum=is_sampled(task.stamp))
        message = RowsBack(
            step=task.step, barrier=task.barrier, piece=task.piece, last=task.last, payload=ref, rows=flight.spans
        )
        crash_point("RowsBack not sent")
        self._counters.rows_back(message)
        self._send(message)
        crash_point("RowsBack sent")

    def report_finished(self) -> bool:
        """Reports the oldest complete step once every victim of its plan was announced."""
        if not self._finished or self._rows_pending(self._finished[0].step):
            return False
        self._send(self._finished.popleft())
        return True

    def _rows_pending(self, step: int) -> bool:
        heads = [flight.task for flight in list(self._copying)[:1]] + list(self._tasks)[:1]
        return any(task.barrier is None and task.step is not None and task.step <= step for task in heads)


def compact(sources: list[tuple[RowSpan, Tensor]]) -> tuple[tuple[RowSpan, ...], int]:
    """Returns the spans with their offsets in the message's payload, and the payload's bytes."""
    spans, end = [], 0
    for span, source in sources:
        end = aligned(end, ARRAY_ALIGNMENT)
        spans.append(msgspec.structs.replace(span, offset=end))
        end += source.nbytes
    return tuple(spans), end
