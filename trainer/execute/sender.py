"""Sends victims home: evict staging -> ring on a stream of its own, then `RowsBack`; and `StepDone` behind the last of its plan's.
Behind the rows of a barrier it sends the dense side of a checkpoint.

It has its own thread, because the main loop may be waiting for a `StepReady` that needs the very rows that are on their way here.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from rowcast.job.tables import aligned
from rowcast.protocol.messages import ArraySpan, RowChecksums, RowsBack, RowSpan, Saved, StepDone
from rowcast.protocol.packing import ARRAY_ALIGNMENT, barrier_stamp, cut_bytes, is_sampled, plan_stamp, saved_stamp
from rowcast.protocol.row_checksum import checksum_messages
from rowcast.protocol.transport.ring import RingSlice, RingWriter
from rowcast.runtime.crash_points import crash_point
from rowcast.trainer.execute.host_memory import HostMemory
from rowcast.trainer.execute.metrics import TrainerCounters
from rowcast.trainer.execute.staging import Place
from rowcast.trainer.execute.streams import Event, Streams


@dataclass(slots=True, kw_only=True)
class EvictTask:
    """Rows in evict staging that have to travel home as one message."""

    step: int | None
    barrier: int | None
    piece: int
    last: bool
    sources: list[tuple[RowSpan, Tensor]]  # f32 [count, record_floats] in evict staging
    room: Place  # theirs; used when the copy to the ring is issued
    gathered: Event
    # i64 on the host, complete with the copy: at the end of a barrier, those that it asks for
    checksums: Tensor | None = None

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


@dataclass(slots=True, kw_only=True)
class DenseTask:
    """The dense side of a checkpoint, which goes home behind its barrier's rows."""

    barrier: int
    content: bytes
    pieces: list[ArraySpan]
    checksum: int
    sent: int = 0


class Sender:
    """`send_rows`, `send_dense` and `finish` are called by the main thread, in step order; `advance` by the sender's."""

    def __init__(
        self,
        streams: Streams,
        ring: RingWriter,
        memory: HostMemory,
        counters: TrainerCounters,
        send: Callable[[RowsBack | RowChecksums | Saved | StepDone], None],
    ) -> None:
        self.waiting_for_ring = False
        self._streams = streams
        self._ring = ring
        self._memory = memory
        self._counters = counters
        self._send = send
        self._tasks: deque[EvictTask] = deque()
        self._copying: deque[InFlight] = deque()
        self._finished: deque[tuple[StepDone, Tensor]] = deque()
        self._dense: deque[DenseTask] = deque()

    @property
    def queued(self) -> int:
        return len(self._tasks) + len(self._copying)

    def send_rows(self, task: EvictTask) -> None:
        self._tasks.append(task)

    def send_dense(self, barrier: int, content: bytes) -> None:
        """All rows of the barrier were handed over before."""
        pieces = cut_bytes(len(content), self._ring.max_payload)
        self._dense.append(
            DenseTask(barrier=barrier, content=content, pieces=pieces, checksum=xxhash.xxh3_64_intdigest(content))
        )

    def finish(self, message: StepDone, checksums: Tensor) -> None:
        """The step is complete; all tasks of its plan were handed over before. `checksums` i64 [n]: those that the plan asks for."""
        self._finished.append((message, checksums))

    def advance(self) -> bool:
        issued = self._issue_copy()
        sent = self._send_copied()
        finished = self._send_finished()
        saved = self._send_saved()
        return issued or sent or finished or saved

    def _issue_copy(self) -> bool:
        if not self._tasks:
            return False
        task = self._tasks[0]
        spans, nbytes = compact(task.sources)
        slot = self._ring.try_allocate(nbytes) if nbytes else None
        self.waiting_for_ring = bool(nbytes) and slot is None
        if self.waiting_for_ring:
            return False
        with self._counters.shown("copy out", task.step):
            self._copy_out(task, spans, slot)
        self._copying.append(InFlight(task, spans, slot))
        self._tasks.popleft()  # only now: whoever sees neither queue hold it must find it sent
        return True

    def _copy_out(self, task: EvictTask, spans: tuple[RowSpan, ...], slot: RingSlice | None) -> None:
        stream = self._streams.evict
        stream.wait(task.gathered, "gathered")
        if slot is not None:
            payload = self._memory.leaving(slot.payload)
            for span, (_, source) in zip(spans, task.sources, strict=True):
                rows = payload[span.offset : span.offset + source.nbytes].view(torch.float32).view(source.shape)
                stream.copy(source, rows)
        task.room.used = stream.record()

    def _send_copied(self) -> bool:
        if not self._copying:
            return False
        flight = self._copying[0]
        assert flight.task.room.used is not None, "in flight, so issued"
        if not self._streams.done(flight.task.room.used, "sent"):
            return False
        with self._counters.shown("send back", flight.task.step):
            self._send_flight(flight)
        self._copying.popleft()
        return True

    def _send_flight(self, flight: InFlight) -> None:
        task = flight.task
        ref = None
        if flight.slice is not None:
            self._memory.landed(flight.slice.payload)
            ref = self._ring.commit(flight.slice, task.stamp, checksum=is_sampled(task.stamp))
        message = RowsBack(
            step=task.step, barrier=task.barrier, piece=task.piece, last=task.last, payload=ref, rows=flight.spans
        )
        crash_point("RowsBack not sent")
        self._counters.rows_back(message)
        if task.checksums is not None:
            self._send_checksums(task.step, task.barrier, task.checksums)
        self._send(message)
        crash_point("RowsBack sent")

    def _send_finished(self) -> bool:
        if not self._finished or self._rows_pending(self._finished[0][0].step):
            return False
        message, checksums = self._finished[0]
        self._send_checksums(message.step, None, checksums)
        self._send(message)
        self._finished.popleft()
        return True

    def _send_checksums(self, step: int | None, barrier: int | None, checksums: Tensor) -> None:
        for message in checksum_messages(step, barrier, checksums.numpy()):
            self._send(message)

    def _send_saved(self) -> bool:
        if not self._dense or self._tasks or self._copying:
            return False
        task = self._dense[0]
        span = task.pieces[task.sent]
        slot = self._ring.try_allocate(span.nbytes)
        self.waiting_for_ring = slot is None
        if slot is None:
            return False
        with self._counters.shown("copy out"):
            slot.payload[:] = np.frombuffer(task.content, np.uint8, span.nbytes, span.offset)
        stamp = saved_stamp(task.barrier, task.sent)
        message = Saved(
            barrier=task.barrier,
            piece=task.sent,
            num_pieces=len(task.pieces),
            nbytes=len(task.content),
            checksum=task.checksum,
            payload=self._ring.commit(slot, stamp, checksum=is_sampled(stamp)),
            span=span,
        )
        crash_point("Saved not sent")
        self._send(message)
        crash_point("Saved sent")
        task.sent += 1
        if task.sent == len(task.pieces):
            self._dense.popleft()
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
