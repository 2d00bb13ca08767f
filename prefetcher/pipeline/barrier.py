"""Runs the prefetcher's side of a barrier, between two steps, until all rows are home. `TABLE` lists its states.

    thread      method                        writes
    fetcher     advance                       state, finished, _flush, _restore
    write-back  take_dense                    _dense (takes), _copied, _saved_barriers
    mail        cut_short, accept_dense       early_end, _dense (appends)

A barrier is an entry of the plan stream. Every plan before it is done and home before the first `Flush` is sent, and no
later plan is read before the barrier's checkpoint has frozen its rows. So both rings are empty when it begins and ends.
"""

import resource
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol

from rowcast.prefetcher.pipeline.fetcher import Fetcher, PlannedBarrier, PlanStream, Stall, reached
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.pipeline.writeback import Writeback
from rowcast.protocol.conversation import DensePieces
from rowcast.protocol.messages import EndOfData, Flush, Released, Replica, Restore, Saved, StopRequest, Wait
from rowcast.protocol.plan import (
    ArrayBlock,
    BarrierPlan,
    Piece,
    barrier_stamp,
    cut,
    dense_stamp,
    is_sampled,
    make_block,
    saved_stamp,
)
from rowcast.protocol.transport.ring import RingReader, RingWriter, release
from rowcast.runtime.checkpoint_manifest import Position
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import RemoteProtocolError
from rowcast.runtime.stages import StateTable


class PrefetcherState(StrEnum):
    RESTORING = "the dense side goes to the trainer"
    RUNNING = "steps pass"
    DRAINING = "steps before the barrier end and their rows come home"
    QUEUING = "the checkpoint before becomes durable"
    FLUSHING = "dirty slots go to the trainer"
    RETURNING = "dirty rows come home"
    SAVING = "the dense side comes, then changed rows are frozen"
    CLOSING = "the barrier is done"
    ENDED = "ended"


class PrefetcherEvent(StrEnum):
    RESTORED = "last Restore sent, or none needed"
    BARRIER_DUE = "a barrier is the next entry"
    DRAINED = "all before it is done and home"
    WRITER_FREE = "no checkpoint is being written"
    FLUSHED = "last Flush sent"
    HOME = "dirty rows are in the store"
    NO_CHECKPOINT = "dirty rows are in the store, no checkpoint"
    SAVED = "last Saved copied, rows frozen"
    GOES_ON = "steps follow"
    DURABLE = "the last checkpoint is durable, EndOfData sent"


S, E = PrefetcherState, PrefetcherEvent
TABLE = StateTable(
    "prefetcher",
    (
        (S.RESTORING, E.RESTORED, S.RUNNING),
        (S.RUNNING, E.BARRIER_DUE, S.DRAINING),
        (S.DRAINING, E.DRAINED, S.QUEUING),
        (S.QUEUING, E.WRITER_FREE, S.FLUSHING),
        (S.FLUSHING, E.FLUSHED, S.RETURNING),
        (S.RETURNING, E.HOME, S.SAVING),
        (S.RETURNING, E.NO_CHECKPOINT, S.CLOSING),
        (S.SAVING, E.SAVED, S.CLOSING),
        (S.CLOSING, E.GOES_ON, S.RUNNING),
        (S.CLOSING, E.DURABLE, S.ENDED),
    ),
)

# why the fetcher stalls; "barrier" in the states that are not listed
STALLS: dict[PrefetcherState, Stall | None] = {
    PrefetcherState.RESTORING: "ring",
    PrefetcherState.QUEUING: "checkpoint",
    PrefetcherState.CLOSING: "checkpoint",
    PrefetcherState.ENDED: None,
}


class Checkpointer(Protocol):
    """Freezes a barrier's rows and makes them durable later. The write-back's thread calls `take_dense`, the fetcher's
    the other methods. No method waits."""

    @property
    def busy(self) -> bool:
        """Whether the previous checkpoint is not durable yet."""

    def begin(self, barrier: PlannedBarrier) -> bool:
        """Returns whether this barrier needs a checkpoint: False if nothing was planned since the last one."""

    def take_dense(self, message: Saved | Replica, content: bytes) -> bool:
        """Accepts a piece of the model state, or only its checksum, without content. With the last one it freezes the
        rows, which are all home. Returns False while there is no room."""


class PrefetcherBarrier:
    def __init__(
        self,
        *,
        plans: PlanStream,
        fetcher: Fetcher,
        writeback: Writeback,
        checkpointer: Checkpointer,
        rings: tuple[RingWriter, RingReader],
        counters: PrefetcherCounters,
        send: Callable[[Restore | Flush | EndOfData | Released], None],
        takes_model_state: bool,
        last_figures: Callable[[], dict[str, Any]],
    ) -> None:
        """`rings`: fetch and back. `takes_model_state`: whether its trainer sends it at a checkpoint, and not only a
        checksum. `last_figures`: fields of EndOfData."""
        self.state = TABLE.after(PrefetcherState.RESTORING, PrefetcherEvent.RESTORED)
        self.finished = False  # the run was complete at the last barrier
        self._plans = plans
        self._fetcher = fetcher
        self._writeback = writeback
        self._checkpointer = checkpointer
        self._fetch_ring, self._back_ring = rings
        self._counters = counters
        self._send = send
        self._takes_model_state = takes_model_state
        self._last_figures = last_figures
        self._restore: DensePieces | None = None
        self._flush: deque[tuple[ArrayBlock, Piece]] = deque()  # of the list of dirty slots, to be sent
        self._saves = False  # a checkpoint follows the flush
        # where training continues instead of at the barriers' position; and the trainer's request
        self.early_end: tuple[Position, StopRequest] | None = None
        self._dense: deque[Saved | Replica] = deque()  # pieces are in the ring
        self._copied: tuple[Saved | Replica, bytes] | None = (
            None  # a piece copied from the ring that the checkpointer lacks
        )
        self._saved_barriers = 0  # every earlier barrier has passed on its model state

    def restore(self, content: bytes) -> None:
        """Sends the trainer the model state that it starts from, instead of the job's initial state. Called before any
        other method."""
        self.state = PrefetcherState.RESTORING
        self._restore = DensePieces(content, self._fetch_ring, dense_stamp)

    @property
    def ended(self) -> bool:
        return self.state is PrefetcherState.ENDED

    @property
    def queued(self) -> int:
        return len(self._dense)

    # the mail's thread

    def cut_short(self, position: Position, stop: StopRequest) -> None:
        """Called when the trainer skips the steps after `position`: no later barrier counts them as trained, and the
        run stops. Must be called before the fetcher learns that one of these steps is done."""
        self.early_end = position, stop

    def accept_dense(self, message: Saved | Replica) -> None:
        """Queues a message of the model state. Raises RemoteProtocolError if this rank's trainer may not send it."""
        if isinstance(message, Saved) != self._takes_model_state:
            wanted = "the model state" if self._takes_model_state else "a checksum of it"
            raise RemoteProtocolError(
                f"a {type(message).__name__} came at barrier {message.barrier}, but the trainer of this rank sends "
                f"{wanted}"
            )
        self._dense.append(message)

    # the write-back's thread

    def take_dense(self) -> bool:
        """Copies a piece of the model state, or passes it on once all rows are home. Holds at most one copy."""
        if self._copied is None:
            # the ring is read in order: rows that were sent before the piece come first
            is_next = self._dense and not self._writeback.has_arrived
            return self._copy_dense(self._dense.popleft()) if is_next else False
        message, content = self._copied
        if self.state is not PrefetcherState.SAVING or not self._checkpointer.take_dense(message, content):
            return False
        self._copied = None
        if isinstance(message, Replica) or message.piece == message.num_pieces - 1:
            self._saved_barriers = message.barrier + 1
        return True

    def _copy_dense(self, message: Saved | Replica) -> bool:
        if isinstance(message, Replica):
            self._copied = message, b""
            return True
        with self._counters.timed("write_back"):
            stamp = saved_stamp(message.barrier, message.piece)
            self._copied = message, self._back_ring.view(message.payload, stamp).tobytes()
            release(self._back_ring, message.payload, self._send)
        return True

    # the fetcher's thread

    @property
    def due(self) -> bool:
        """Whether the fetcher must not read steps now."""
        return self.state is not PrefetcherState.RUNNING or (
            self._fetcher.is_between_plans and bool(self._plans) and isinstance(self._plans[0], PlannedBarrier)
        )

    def advance(self) -> bool:
        """Does what the current state allows without waiting. Returns whether it did anything."""
        self._fetcher.stalled_by = STALLS.get(self.state, "barrier")
        match self.state:
            case PrefetcherState.RESTORING:
                return self._send_restore()
            case PrefetcherState.RUNNING:
                return self._follow(PrefetcherEvent.BARRIER_DUE)
            case PrefetcherState.DRAINING:
                return self._is_drained(self._plan) and self._follow(PrefetcherEvent.DRAINED)
            case PrefetcherState.QUEUING:
                return not self._checkpointer.busy and self._open_flush()
            case PrefetcherState.FLUSHING:
                return self._send_flush_piece(self._plan)
            case PrefetcherState.RETURNING:
                home = self._writeback.applied_barriers > self._plan.barrier
                event = PrefetcherEvent.HOME if self._saves else PrefetcherEvent.NO_CHECKPOINT
                return home and not self._fetch_ring.used_bytes and self._follow(event)
            case PrefetcherState.SAVING:
                return self._saved_barriers > self._plan.barrier and self._follow(PrefetcherEvent.SAVED)
            case PrefetcherState.CLOSING:
                return not (self._barrier.last and self._checkpointer.busy) and self._close()
            case PrefetcherState.ENDED:
                return False

    def _follow(self, event: PrefetcherEvent) -> bool:
        self.state = TABLE.after(self.state, event)
        return True

    @property
    def _barrier(self) -> PlannedBarrier:
        barrier = self._plans[0]
        assert isinstance(barrier, PlannedBarrier), "the barrier must stay the next entry until it is done"
        return barrier if self.early_end is None else barrier.cut(*self.early_end)

    @property
    def _plan(self) -> BarrierPlan:
        return self._barrier.plan

    def _send_restore(self) -> bool:
        # sent first, so that no row waits in the ring after it
        assert self._restore is not None, "a model state is given before it is sent"
        if not self._fetcher.connected:
            self._fetcher.stalled_by = "credit"
            return False
        room = self._restore.room()
        if room is None:
            return False
        self._send(Restore(**self._restore.put(room)))
        if self._restore.complete:
            self._restore = None
            self._follow(PrefetcherEvent.RESTORED)
        return True

    def _is_drained(self, barrier: BarrierPlan) -> bool:
        after, fetcher = barrier.after_plan, self._fetcher
        is_home = after is None or (
            reached(fetcher.done_through, after) and reached(self._writeback.applied_through, after)
        )
        return fetcher.connected and is_home and not fetcher.reading and not self._fetch_ring.used_bytes

    def _open_flush(self) -> bool:
        plan = self._plan
        train_steps, dirty = self._barrier.position.train_step, tuple(move.keys for move in plan.dirty)
        self._writeback.expect(plan.after_plan, plan.barrier, train_steps, dirty)
        block = make_block({f"{group}.slots": move.slots for group, move in enumerate(plan.dirty)})
        self._flush.extend((block, piece) for piece in cut(block.nbytes, [], [], self._fetch_ring.max_payload))
        self._saves = self._checkpointer.begin(self._barrier)
        return self._follow(PrefetcherEvent.WRITER_FREE)

    def _send_flush_piece(self, plan: BarrierPlan) -> bool:
        (block, piece), payload = self._flush[0], None
        if piece.arrays is not None:
            room = self._fetch_ring.try_allocate(piece.nbytes)
            if room is None:
                return False
            block.write(piece.arrays.offset, room.payload)
            stamp = barrier_stamp(plan.barrier, piece.number)
            payload = self._fetch_ring.commit(room, stamp, checksum=is_sampled(stamp))
        message = Flush(
            barrier=plan.barrier,
            after_plan=plan.after_plan,
            num_dirty=tuple(len(move) for move in plan.dirty),
            piece=piece.number,
            num_pieces=piece.count,
            arrays=block.specs,
            arrays_bytes=block.nbytes,
            payload=payload,
            span=piece.arrays,
            checkpoint=self._saves,
            reason=plan.reason,
            evaluated=self._barrier.evaluated,
        )
        self._flush.popleft()
        self._counters.flush(message)
        self._send(message)
        crash_point("Flush sent")
        return bool(self._flush) or self._follow(PrefetcherEvent.FLUSHED)

    def _close(self) -> bool:
        barrier = self._barrier
        if not barrier.last:
            self._plans.popleft()
            return self._follow(PrefetcherEvent.GOES_ON)
        if barrier.fault is not None:
            raise barrier.fault
        crash_point("EndOfData not sent")
        self._send(
            EndOfData(
                last_plan=barrier.plan.after_plan,
                finished=barrier.plan.finished,
                host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                waits=tuple(Wait(reason=reason, seconds=s) for reason, s in self._counters.stalls.items()),
                row_copies=self._fetcher.all_stores.row_copies(self._writeback.all_stores),
                **self._last_figures(),
            )
        )
        self._plans.popleft()
        self.finished = barrier.plan.finished
        return self._follow(PrefetcherEvent.DURABLE)
