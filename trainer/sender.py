"""Sends victims home: evict staging -> ring on a stream of its own, then `RowsBack`; and `StepDone` behind the last of its plan's.

It has its own thread, because the main loop may be waiting for a `StepReady` that needs the very rows that are on their way here.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from protocol.messages import RowsBack, RowSpan, StepDone
from protocol.packing import ARRAY_ALIGNMENT, barrier_stamp, is_sampled, plan_stamp
from protocol.tables import aligned
from protocol.transport.ring import RingSlice, RingWriter
from trainer.metrics import TrainerCounters
from trainer.streams import Event, Streams


@dataclass(slots=True, kw_only=True)
class EvictTask:
    """Rows in evict staging that have to travel home as one message."""

    step: int | None
    barrier: int | None
    piece: int
    last: bool
    sources: list[tuple[RowSpan, Tensor]]  # f32 [count, record_floats] in evict staging
    gathered: Event
    copied: Event | None = None  # set by the sender when the copy to the ring is issued: staging is free after it

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
    slice: RingSlice | None


class Sender:
    """`send_rows` and `finish` are called by the main thread, in step order; `advance` by the sender's."""

    def __init__(self, streams: Streams, ring: RingWriter, counters: TrainerCounters, send: Callable[[RowsBack | StepDone], None]) -> None:
        self.waiting_for_ring = False
        self._streams = streams
        self._ring = ring
        self._counters = counters
        self._send = send
        self._tasks: deque[EvictTask] = deque()
        self._copying: deque[InFlight] = deque()
        self._finished: deque[StepDone] = deque()

    @property
    def queued(self) -> int:
        return len(self._tasks) + len(self._copying)

    def send_rows(self, task: EvictTask) -> None:
        self._tasks.append(task)

    def finish(self, message: StepDone) -> None:
        """The step is complete; all tasks of its plan were handed over before."""
        self._finished.append(message)

    def advance(self) -> bool:
        issued = self._issue_copy()
        sent = self._send_copied()
        finished = self._send_finished()
        return issued or sent or finished

    def _issue_copy(self) -> bool:
        if not self._tasks:
            return False
        task = self._tasks[0]
        spans, nbytes = compact(task.sources)
        slot = self._ring.try_allocate(nbytes) if nbytes else None
        self.waiting_for_ring = bool(nbytes) and slot is None
        if self.waiting_for_ring:
            return False
        stream = self._streams.evict
        stream.wait(task.gathered, "gathered")
        if slot is not None:
            payload = torch.from_numpy(slot.payload)
            for span, (_, source) in zip(spans, task.sources, strict=True):
                rows = payload[span.offset : span.offset + source.nbytes].view(torch.float32).view(source.shape)
                stream.copy(source, rows)
        task.copied = stream.record()
        self._copying.append(InFlight(task, spans, slot))
        self._tasks.popleft()  # only now: whoever sees neither queue hold it must find it sent
        return True

    def _send_copied(self) -> bool:
        if not self._copying:
            return False
        flight = self._copying[0]
        assert flight.task.copied is not None, "in flight, so issued"
        if not self._streams.done(flight.task.copied, "sent"):
            return False
        task = flight.task
        ref = None if flight.slice is None else self._ring.commit(flight.slice, task.stamp, checksum=is_sampled(task.stamp))
        message = RowsBack(step=task.step, barrier=task.barrier, piece=task.piece, last=task.last, payload=ref, rows=flight.spans)
        self._counters.rows_back(message)
        self._send(message)
        self._copying.popleft()
        return True

    def _send_finished(self) -> bool:
        if not self._finished or self._rows_pending(self._finished[0].step):
            return False
        self._send(self._finished[0])
        self._finished.popleft()
        return True

    def _rows_pending(self, step: int) -> bool:
        heads = [flight.task for flight in list(self._copying)[:1]] + list(self._tasks)[:1]
        return any(task.barrier is None and task.step is not None and task.step <= step for task in heads)


def compact(sources: list[tuple[RowSpan, Tensor]]) -> tuple[tuple[RowSpan, ...], int]:
    """The spans as they lie in the message's payload, and its bytes."""
    spans, end = [], 0
    for span, source in sources:
        end = aligned(end, ARRAY_ALIGNMENT)
        spans.append(msgspec.structs.replace(span, offset=end))
        end += source.nbytes
    return tuple(spans), end
