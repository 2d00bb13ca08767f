"""Sends victims home: gathers them in evict staging, copies them to the ring, announces them, then reports their plan.

It has a separate thread: the main loop may be waiting for a `PlanReady` that needs the very rows that are leaving.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import xxhash
from torch import Tensor

from rowcast.protocol.conversation import DensePieces
from rowcast.protocol.messages import Ask, PlanDone, Replica, Returned, RowsBack, Save, Saved
from rowcast.protocol.plan import barrier_stamp, is_sampled, plan_stamp, saved_stamp
from rowcast.protocol.plan_layout import RowSpan
from rowcast.protocol.transport.ring import RingSlice
from rowcast.runtime.crash_points import crash_point
from rowcast.trainer.device.cuda import RingEnds
from rowcast.trainer.device.streams import Event
from rowcast.trainer.step.memory import Slots, Staging, StagingSpan
from rowcast.trainer.step.metrics import TrainerCounters


@dataclass(slots=True, kw_only=True)
class EvictTask:
    """Rows on their way home in one message."""

    plan: int | None
    barrier: int | None
    piece: int
    last: bool
    rows: tuple[RowSpan, ...]  # with their offsets in evict staging, as in the message's payload
    room: StagingSpan  # of these rows; `used` is set when the copy to the ring is issued
    gathered: Event
    space: RingSlice | None = None  # in the ring; None if there are no rows, or no space yet

    @property
    def stamp(self) -> int:
        if self.barrier is not None:
            return barrier_stamp(self.barrier, self.piece)
        assert self.plan is not None, "victims belong to a plan"
        return plan_stamp(self.plan, self.piece)


Parcel = Ask | Returned | Save  # of a training script


class Sender:
    """A stage. The main thread calls `room`, `send_rows`, `send_parcel`, `send_state` and `finish`, in order; the
    thread of the sender calls `advance`."""

    def __init__(
        self,
        slots: Slots,
        staging_bytes: int,
        rings: RingEnds,
        counters: TrainerCounters,
        send: Callable[[RowsBack | PlanDone | Saved | Replica | Parcel], None],
    ) -> None:
        self.waiting_for_ring = False  # set by the sender's thread
        self.on_queued: Callable[[], None] = lambda: None  # wakes that thread
        self._slots, self._streams = slots, slots.streams
        self._staging = Staging(slots.streams, staging_bytes)  # for rows that have left their slots
        self._ring, self._memory = rings.back, rings.back_memory
        self._counters = counters
        self._send = send
        self._tasks: deque[EvictTask | Parcel] = deque()
        self._copying: deque[EvictTask | Parcel] = deque()
        self._finished: deque[PlanDone] = deque()
        self._states: deque[tuple[int, bool, DensePieces | Replica]] = deque()  # barrier, `is_best`, model state

    def advance(self) -> bool:
        """Sends victims home and reports their plan; after a barrier's rows, the model state."""
        copied = self._copy_out_next()
        sent = self._send_copied()
        reported = self._report_finished()
        saved = self._send_state_next()
        return copied or sent or reported or saved

    @property
    def staging_bytes(self) -> int:
        return self._staging.nbytes

    @property
    def queued(self) -> int:
        return len(self._tasks) + len(self._copying)

    @property
    def awaits_device(self) -> bool:
        return bool(self._copying) and self._streams.evict.is_device

    def room(self, spans: Sequence[RowSpan]) -> StagingSpan | None:
        """Returns space for these rows; None while there is not enough."""
        return self._staging.take(self._slots.nbytes(spans))

    def send_rows(
        self,
        spans: Sequence[RowSpan],
        slots: Sequence[Tensor],
        room: StagingSpan,
        *,
        plan: int | None,
        barrier: int | None,
        piece: int,
        last: bool,
    ) -> None:
        """Issues the gather of the rows into `room` and queues them as one message; see RowsBack. The spans' offsets
        begin at 0."""
        fill = self._streams.fill
        if room.after is not None:
            fill.wait(room.after, "evict_staging")
        self._slots.gather(spans, slots, room.content)
        self._tasks.append(
            EvictTask(
                plan=plan,
                barrier=barrier,
                piece=piece,
                last=last,
                rows=tuple(spans),
                room=room,
                gathered=fill.record(),
            )
        )
        self.on_queued()

    def send_parcel(self, parcel: Parcel) -> None:
        """Queues a message between the rows that have left and those that will."""
        self._tasks.append(parcel)
        self.on_queued()

    def send_state(self, barrier: int, content: bytes, *, whole: bool, is_best: bool) -> None:
        """Queues the model state, after the rows of its barrier. Unless `whole`, only its checksum: rank 0 sends the
        same state. `is_best`: as in `Saved`."""
        self._states.append(
            (
                barrier,
                is_best,
                DensePieces(content, self._ring, partial(saved_stamp, barrier))
                if whole
                else Replica(barrier=barrier, checksum=xxhash.xxh3_64_intdigest(content)),
            )
        )
        self.on_queued()

    def finish(self, message: PlanDone) -> None:
        """Queues the report of a complete plan, after its tasks."""
        self._finished.append(message)
        self.on_queued()

    def idled(self, seconds: float) -> None:
        """Counts `seconds` without work for the sender's thread."""
        if self.waiting_for_ring:
            self._counters.stalled("ring", seconds)
        elif not self.queued:
            self._counters.blocked("rows_back", "consumer", seconds)

    def _copy_out_next(self) -> bool:
        """Issues the copy of the oldest rows from evict staging to the ring."""
        if not self._tasks:
            return False
        task = self._tasks[0]
        if isinstance(task, Parcel):
            self._copying.append(task)
            self._tasks.popleft()
            return True
        nbytes = len(task.room.content)
        task.space = self._ring.try_allocate(nbytes) if nbytes else None
        self.waiting_for_ring = bool(nbytes) and task.space is None
        if self.waiting_for_ring:
            return False
        with self._counters.shown("copy out", self._counters.step_of(task.plan)):
            stream = self._streams.evict
            stream.wait(task.gathered, "gathered")
            if task.space is not None:
                stream.copy(task.room.content, self._memory.leaving(task.space.payload))
            task.room.used = stream.record()
        self._copying.append(task)
        self._tasks.popleft()  # last: a task in neither queue counts as sent
        return True

    def _send_copied(self) -> bool:
        if not self._copying:
            return False
        task = self._copying[0]
        if isinstance(task, Parcel):
            self._send(task)
            self._copying.popleft()
            return True
        assert task.room.used is not None, "the copy was issued"
        if not self._streams.done(task.room.used, "sent"):
            return False
        with self._counters.shown("send back", self._counters.step_of(task.plan)):
            self._announce(task, task.space)
        self._copying.popleft()
        return True

    def _announce(self, task: EvictTask, space: RingSlice | None) -> None:
        ref = None
        if space is not None:
            self._memory.landed(space.payload)
            ref = self._ring.commit(space, task.stamp, checksum=is_sampled(task.stamp))
        message = RowsBack(
            plan=task.plan, barrier=task.barrier, piece=task.piece, last=task.last, payload=ref, rows=task.rows
        )
        crash_point("RowsBack not sent")
        self._counters.rows_back(message)
        self._send(message)
        crash_point("RowsBack sent")

    def _report_finished(self) -> bool:
        """Reports the oldest complete plan once every victim of it was announced."""
        if not self._finished or self._rows_pending(self._finished[0].plan):
            return False
        self._send(self._finished.popleft())
        return True

    def _send_state_next(self) -> bool:
        """Sends the next piece of a checkpoint's model state, once all rows of its barrier were sent."""
        if not self._states or self.queued:
            return False
        barrier, is_best, pieces = self._states[0]
        if isinstance(pieces, Replica):
            self._send(pieces)
            self._states.popleft()
            return True
        room = pieces.room()
        self.waiting_for_ring = room is None
        if room is None:
            return False
        with self._counters.shown("copy out"):
            fields = pieces.put(room)
        crash_point("Saved not sent")
        self._send(Saved(barrier=barrier, is_best=is_best, **fields))
        crash_point("Saved sent")
        if pieces.complete:
            self._states.popleft()
        return True

    def _rows_pending(self, plan: int) -> bool:
        tasks = [task for task in (*self._copying, *self._tasks) if isinstance(task, EvictTask)]
        return any(task.barrier is None and task.plan is not None and task.plan <= plan for task in tasks)
