"""Brings the rows of each plan from the store into the ring, and announces them in order.

A plan may be read when the rows that it could depend on are home:  applied_through >= max(after_step, step - depth - 1)
A plan may be sent when the trainer has room to hold it:             done_through >= step - depth - 1
A barrier is sent when everything before it is done, home, and both rings are empty; nothing after it is read before it is done.
"""

import resource
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import xxhash

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.pipeline.writeback import Writeback
from rowcast.prefetcher.stores.store import Records, Ticket
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.prefetcher.verify.verifier import Verifier
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.messages import (
    ArraySpan,
    EndOfData,
    Flush,
    PlanHeader,
    Restore,
    RingRef,
    RowSpan,
    Saved,
    StepReady,
)
from rowcast.protocol.packing import (
    Block,
    Piece,
    barrier_stamp,
    cut,
    cut_bytes,
    dense_stamp,
    is_sampled,
    make_block,
    plan_block,
    plan_header,
    plan_stamp,
)
from rowcast.protocol.plan import BarrierPlan, StepPlan
from rowcast.protocol.transport.ring import RingSlice, RingWriter
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.position import Position

Stall = Literal["plans", "credit", "write_back", "ring", "store", "barrier", "checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    batch: ScheduledBatch
    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBarrier:
    """An entry of the plan stream after a step. Every barrier is a checkpoint, where the run makes any."""

    plan: BarrierPlan
    position: Position  # where training goes on from it
    last: bool  # nothing follows


class Checkpointer(Protocol):
    """The prefetcher's side of a checkpoint: what is copied at the barrier, and made durable behind it.

    Called by the fetcher's thread, but for `dense`, which is the write-back's. Nothing waits.
    """

    @property
    def busy(self) -> bool:
        """Whether the checkpoint before is not durable yet."""

    def begin(self, barrier: PlannedBarrier) -> bool:
        """Whether this barrier needs a checkpoint: not where nothing was planned since the last one."""

    def collect(self) -> bool:
        """Copies rows that changed since the last checkpoint; True when that is done. Every row is in the store."""

    def dense(self, message: Saved, content: bytes) -> bool:
        """A piece of the trainer's dense side; False: there is no room for it yet."""

    def collected(self) -> bool:
        """Whether rows and dense side are complete: training may go on."""


@dataclass(slots=True, kw_only=True)
class Outgoing:
    """A plan on its way: cut into pieces, of which some are being read."""

    step: PlannedStep
    block: Block
    header: PlanHeader
    pieces: list[Piece]
    begun: int = 0  # pieces whose reads have begun


@dataclass(slots=True, kw_only=True)
class Reading:
    """A piece in the ring whose rows are still coming."""

    outgoing: Outgoing
    number: int
    slice: RingSlice | None
    tickets: list[Ticket]

    def done(self) -> bool:
        self.tickets = [ticket for ticket in self.tickets if not ticket.done()]
        return not self.tickets


@dataclass(slots=True, kw_only=True)
class FlushOut:
    """A barrier whose slots are on their way."""

    barrier: PlannedBarrier
    block: Block
    pieces: list[Piece]
    checkpoint: bool
    num_checksums: int
    sent: int = 0
    rows_copied: bool = False


@dataclass(slots=True, kw_only=True)
class DenseOut:
    """The dense side on its way to the trainer."""

    content: memoryview
    checksum: int
    pieces: list[ArraySpan]
    sent: int = 0


class Fetcher:
    """`push` is called by the planning thread, `step_done` by the mail's, `advance` by the fetcher's own."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        stores: tuple[TrackedStore, ...],
        depth: int,
        first_step: int,
        ring: RingWriter,
        writeback: Writeback,
        checkpointer: Checkpointer,
        counters: PrefetcherCounters,
        staging_bytes: int,
        send: Callable[[Restore | StepReady | Flush | EndOfData], None],
        restore: bytes = b"",
        verifier: Verifier | None = None,
    ) -> None:
        self.connected = False  # a trainer was welcomed: until then rows may be read, but nothing is sent
        self.done_through: int | None = None  # the last step that the trainer completed
        self.sent_through: int | None = None
        self.stalled_by: Stall | None = None
        self.ended = False  # the last barrier is done
        self.finished = False  # and the data had ended then
        self._groups = groups
        self._stores = stores
        self._depth = depth
        self._ring = ring
        self._writeback = writeback
        self._checkpointer = checkpointer
        self._counters = counters
        self._staging_bytes = staging_bytes
        self._send = send
        self._verifier = verifier
        # the dense side that the trainer begins with
        self._restore = dense_out(restore, ring.max_payload) if restore else None
        self._queue: deque[PlannedStep | PlannedBarrier] = deque()
        self._outgoing: Outgoing | None = None
        self._reading: deque[Reading] = deque()
        self._flush: FlushOut | None = None
        self._first_step = first_step
        self._cut: tuple[Position, str] | None = None  # where training goes on, whatever barriers say; and why

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def reading(self) -> int:
        """Pieces in the ring that were not announced yet."""
        return len(self._reading)

    def push(self, entry: PlannedStep | PlannedBarrier) -> None:
        self._queue.append(entry)

    def step_done(self, step: int) -> None:
        self.done_through = step

    def cut_short(self, position: Position, reason: str) -> None:
        """Steps after `position` are passed over by the trainer: no barrier from now on counts them as trained, and the run stops. Called
        by the mail's thread, before it hears that any such step is done."""
        self._cut = position, reason

    def advance(self) -> bool:
        self.stalled_by = None
        if self._restore is not None:
            return self._send_restore(self._restore)
        sent = self._send_read()
        begun = self._begin_reads()
        return sent or begun

    def _send_restore(self, dense: DenseOut) -> bool:
        """Before anything else, so that no row waits in the ring behind it."""
        if not self.connected:
            self.stalled_by = "credit"
            return False
        span = dense.pieces[dense.sent]
        slot = self._ring.try_allocate(span.nbytes)
        if slot is None:
            self.stalled_by = "ring"
            return False
        slot.payload.data[:] = dense.content[span.offset : span.offset + span.nbytes]
        message = Restore(
            piece=dense.sent,
            num_pieces=len(dense.pieces),
            nbytes=len(dense.content),
            checksum=dense.checksum,
            payload=self._commit(slot, dense_stamp(dense.sent)),
            span=span,
        )
        self._send(message)
        dense.sent += 1
        if dense.sent == len(dense.pieces):
            self._restore = None
        return True

    # store -> ring

    def _begin_reads(self) -> bool:
        if self._outgoing is not None:
            with self._counters.timed("fetch", self._outgoing.step.plan.step):
                return self._begin_piece(self._outgoing)
        if not self._queue:
            self.stalled_by = self.stalled_by or (None if self.ended else "plans")
            return False
        head = self._queue[0]
        if isinstance(head, PlannedBarrier):
            return self._advance_barrier(head if self._cut is None else cut_barrier(head, *self._cut))
        if not self._may_read(head.plan):
            self.stalled_by = self.stalled_by or "write_back"
            return False
        self._queue.popleft()
        with self._counters.timed("fetch", head.plan.step):
            self._outgoing = self._open(head)
        return True

    def _may_read(self, plan: StepPlan) -> bool:
        needed = plan.step - self._depth - 1
        if plan.after_step is not None:
            needed = max(needed, plan.after_step)
        return needed < self._first_step or reached(self._writeback.applied_through, needed)

    def _open(self, step: PlannedStep) -> Outgoing:
        plan = step.plan
        self._writeback.expect(plan.step, None, tuple(group.evict.keys[: group.num_dirty] for group in plan.groups))
        checked = {} if self._verifier is None else self._verifier.open_plan(plan)
        block = plan_block(step.batch.batch, plan, checked)
        pieces = cut(
            block.nbytes,
            [len(group.fetch) for group in plan.groups],
            [group.record_bytes for group in self._groups],
            self._ring.max_payload,
            self._staging_bytes,
        )
        header = plan_header(step.batch.batch, plan, block, num_checksums=sum(map(len, checked.values())))
        return Outgoing(step=step, block=block, header=header, pieces=pieces)

    def _begin_piece(self, outgoing: Outgoing) -> bool:
        piece = outgoing.pieces[outgoing.begun]
        slot = self._ring.try_allocate(piece.nbytes)
        if slot is None:
            self.stalled_by = self.stalled_by or "ring"
            return False
        if piece.arrays is not None:
            outgoing.block.write(piece.arrays.offset, slot.payload[: piece.arrays.nbytes])
        tickets = [self._read_span(outgoing, slot, piece, index) for index in range(len(piece.rows))]
        self._reading.append(Reading(outgoing=outgoing, number=outgoing.begun, slice=slot, tickets=tickets))
        outgoing.begun += 1
        if outgoing.begun == len(outgoing.pieces):
            self._outgoing = None
        return True

    def _read_span(self, outgoing: Outgoing, slot: RingSlice, piece: Piece, index: int) -> Ticket:
        span = piece.rows[index]
        keys = outgoing.step.plan.groups[span.group].fetch.keys[span.start : span.start + span.count]
        return self._stores[span.group].read(keys, self._rows(slot, span))

    # ring -> trainer

    def _send_read(self) -> bool:
        if not self._reading:
            return False
        complete = [reading.done() for reading in self._reading]  # all are polled: tickets finish in any order
        if not complete[0]:
            self.stalled_by = "store"
            return False
        reading = self._reading[0]
        plan = reading.outgoing.step.plan
        oldest = plan.step - self._depth - 1
        if not self.connected or (oldest >= self._first_step and not reached(self.done_through, oldest)):
            self.stalled_by = "credit"
            return False
        self._reading.popleft()
        with self._counters.timed("send", plan.step):
            self._verify_read(reading)
            self._announce(reading)
        return True

    def _verify_read(self, reading: Reading) -> None:
        if self._verifier is None:
            return
        outgoing, piece = reading.outgoing, reading.outgoing.pieces[reading.number]
        step = outgoing.step.plan.step
        for span in piece.rows:
            assert reading.slice is not None, "rows are read into a slice of the ring"
            self._verifier.rows_read(step, span.group, span.start, self._rows(reading.slice, span))
        if reading.number == len(outgoing.pieces) - 1:
            self._verifier.plan_read(step)

    def _rows(self, slot: RingSlice, span: RowSpan) -> Records:
        width = self._groups[span.group].record_bytes
        return slot.payload[span.offset : span.offset + span.count * width].reshape(span.count, width)

    def _announce(self, reading: Reading) -> None:
        outgoing, number = reading.outgoing, reading.number
        piece, plan = outgoing.pieces[number], outgoing.step.plan
        payload = None if reading.slice is None else self._commit(reading.slice, plan_stamp(plan.step, number))
        message = StepReady(
            step=plan.step,
            piece=number,
            num_pieces=len(outgoing.pieces),
            plan=outgoing.header if number == 0 else None,
            payload=payload,
            arrays=piece.arrays,
            rows=piece.rows,
        )
        crash_point("StepReady not sent")
        self._counters.step_ready(message)
        self._send(message)
        crash_point("StepReady sent")
        if number == len(outgoing.pieces) - 1:
            self.sent_through = plan.step

    def _commit(self, slot: RingSlice, stamp: int) -> RingRef:
        return self._ring.commit(slot, stamp, checksum=is_sampled(stamp))

    # barriers

    def _advance_barrier(self, barrier: PlannedBarrier) -> bool:
        self.stalled_by = "barrier"
        if self._flush is None:
            if not self._quiet(barrier.plan):
                return False
            if self._checkpointer.busy:  # with the one before
                self.stalled_by = "checkpoint"
                return False
            self._flush = self._open_flush(barrier)
        if self._flush.sent < len(self._flush.pieces):
            return self._send_flush_piece(self._flush)
        if self._writeback.applied_barriers <= barrier.plan.barrier or self._ring.used_bytes:
            return False
        if self._verifier is not None and self._verifier.must_read_back:
            return self._verifier.read_back(barrier.plan.after_step)
        if self._flush.checkpoint and not self._copied(self._flush):
            return False
        if barrier.last and self._checkpointer.busy:
            self.stalled_by = "checkpoint"
            return False
        self._finish_barrier(barrier)
        return True

    def _copied(self, flush: FlushOut) -> bool:
        """Whether the checkpoint has its own copy of everything."""
        flush.rows_copied = flush.rows_copied or self._checkpointer.collect()
        return flush.rows_copied and self._checkpointer.collected()

    def _finish_barrier(self, barrier: PlannedBarrier) -> None:
        self._queue.popleft()
        self._flush = None
        if barrier.last:
            crash_point("EndOfData not sent")
            self._send(end_of_data(barrier.plan))
            self.ended, self.finished = True, barrier.plan.finished

    def _quiet(self, barrier: BarrierPlan) -> bool:
        """Whether everything before the barrier is done and home; then nothing can be left in the ring either."""
        if not self.connected:
            return False
        after = barrier.after_step
        if after is not None and not (
            reached(self.done_through, after) and reached(self._writeback.applied_through, after)
        ):
            return False
        return not self._reading and not self._ring.used_bytes

    def _open_flush(self, barrier: PlannedBarrier) -> FlushOut:
        plan = barrier.plan
        self._writeback.expect(plan.after_step, plan.barrier, tuple(move.keys for move in plan.dirty))
        slots = {f"{group}.slots": move.slots for group, move in enumerate(plan.dirty)}
        checked = {} if self._verifier is None else self._verifier.open_barrier(plan)
        block = make_block({**slots, **checked})
        return FlushOut(
            barrier=barrier,
            block=block,
            pieces=cut(block.nbytes, [], [], self._ring.max_payload),
            checkpoint=self._checkpointer.begin(barrier),
            num_checksums=sum(map(len, checked.values())),
        )

    def _send_flush_piece(self, flush: FlushOut) -> bool:
        piece, payload, barrier = flush.pieces[flush.sent], None, flush.barrier.plan
        if piece.arrays is not None:
            slot = self._ring.try_allocate(piece.nbytes)
            if slot is None:
                return False
            flush.block.write(piece.arrays.offset, slot.payload)
            payload = self._commit(slot, barrier_stamp(barrier.barrier, flush.sent))
        message = Flush(
            barrier=barrier.barrier,
            after_step=barrier.after_step,
            num_dirty=tuple(len(move) for move in barrier.dirty),
            piece=flush.sent,
            num_pieces=len(flush.pieces),
            arrays=flush.block.specs,
            arrays_bytes=flush.block.nbytes,
            payload=payload,
            span=piece.arrays,
            checkpoint=flush.checkpoint,
            reason=barrier.reason,
            num_checksums=flush.num_checksums,
        )
        flush.sent += 1
        self._counters.flush(message)
        self._send(message)
        crash_point("Flush sent")
        return True


def dense_out(content: bytes, max_payload: int) -> DenseOut:
    pieces = cut_bytes(len(content), max_payload)
    return DenseOut(content=memoryview(content), checksum=xxhash.xxh3_64_intdigest(content), pieces=pieces)


def cut_barrier(barrier: PlannedBarrier, position: Position, reason: str) -> PlannedBarrier:
    """A barrier whose checkpoint is not later than `position`."""
    if barrier.position.step <= position.step:
        return barrier
    return replace(barrier, position=position, plan=replace(barrier.plan, reason=reason, finished=False))


def end_of_data(barrier: BarrierPlan) -> EndOfData:
    return EndOfData(
        last_step=barrier.after_step,
        finished=barrier.finished,
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def reached(newest: int | None, needed: int) -> bool:
    return newest is not None and newest >= needed
