"""Brings the rows of each plan from the store into the ring, and announces them in order.

A plan may be read when the rows that it could depend on are home:  applied_through >= max(after_step, step - depth - 1)
A plan may be sent when the trainer has room to hold it:             done_through >= step - depth - 1
A barrier is sent when everything before it is done, home, and both rings are empty; nothing after it is read before it is done.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from prefetcher.metrics import PrefetcherCounters
from prefetcher.stores.base import Store, Ticket
from prefetcher.writeback import Writeback
from protocol.batch import ScheduledBatch
from protocol.messages import EndOfData, Flush, PlanHeader, RingRef, Saved, StepReady
from protocol.packing import Block, Piece, barrier_stamp, cut, is_sampled, make_block, plan_block, plan_header, plan_stamp
from protocol.plan import BarrierPlan, StepPlan
from protocol.tables import GroupSpec
from protocol.transport.ring import RingSlice, RingWriter

Stall = Literal["plans", "credit", "write_back", "ring", "store", "barrier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    batch: ScheduledBatch
    plan: StepPlan


class Checkpointer(Protocol):
    """Writes the prefetcher's side of a checkpoint at a barrier.

    `planned` and `accept` only note; the rest runs on the fetcher's thread.
    """

    @property
    def num_files(self) -> int:
        """Files written so far."""

    def planned(self, plan: StepPlan) -> None:
        """A plan was made."""

    def accept(self, message: Saved) -> None:
        """The trainer's side is on disk."""

    def begin(self, barrier: BarrierPlan) -> str:
        """Makes the checkpoint's directory, where the trainer puts the dense side; its path."""

    def saved(self) -> bool:
        """Whether the trainer's side is on disk."""

    def finish(self, barrier: BarrierPlan) -> None:
        """Writes the tables, then the manifest. Every row is in the store."""

    def end_of_data(self, barrier: BarrierPlan) -> EndOfData:
        """What is sent when the barrier is done."""


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

    barrier: BarrierPlan
    block: Block
    pieces: list[Piece]
    checkpoint: str
    sent: int = 0


class Fetcher:
    """`push` is called by the planning thread, `step_done` by the mail's, `advance` by the fetcher's own."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        stores: tuple[Store, ...],
        depth: int,
        first_step: int,
        ring: RingWriter,
        writeback: Writeback,
        checkpointer: Checkpointer,
        counters: PrefetcherCounters,
        send: Callable[[StepReady | Flush | EndOfData], None],
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
        self._send = send
        self._queue: deque[PlannedStep | BarrierPlan] = deque()
        self._outgoing: Outgoing | None = None
        self._reading: deque[Reading] = deque()
        self._flush: FlushOut | None = None
        self._first_step = first_step

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def reading(self) -> int:
        """Pieces in the ring that were not announced yet."""
        return len(self._reading)

    def push(self, entry: PlannedStep | BarrierPlan) -> None:
        self._queue.append(entry)

    def step_done(self, step: int) -> None:
        self.done_through = step

    def advance(self) -> bool:
        self.stalled_by = None
        sent = self._send_read()
        begun = self._begin_reads()
        return sent or begun

    # store -> ring

    def _begin_reads(self) -> bool:
        if self._outgoing is not None:
            with self._counters.timed("fetch"):
                return self._begin_piece(self._outgoing)
        if not self._queue:
            self.stalled_by = self.stalled_by or (None if self.ended else "plans")
            return False
        head = self._queue[0]
        if isinstance(head, BarrierPlan):
            return self._advance_barrier(head)
        if not self._may_read(head.plan):
            self.stalled_by = self.stalled_by or "write_back"
            return False
        self._queue.popleft()
        with self._counters.timed("fetch"):
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
        block = plan_block(step.batch.batch, plan)
        pieces = cut(
            block.nbytes,
            [len(group.fetch) for group in plan.groups],
            [group.record_bytes for group in self._groups],
            self._ring.max_payload,
        )
        return Outgoing(step=step, block=block, header=plan_header(step.batch.batch, plan, block), pieces=pieces)

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
        width = self._groups[span.group].record_bytes
        keys = outgoing.step.plan.groups[span.group].fetch.keys[span.start : span.start + span.count]
        out = slot.payload[span.offset : span.offset + span.count * width].reshape(span.count, width)
        return self._stores[span.group].read(keys, out)

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
        with self._counters.timed("send"):
            self._announce(reading)
        return True

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
        self._counters.step_ready(message)
        self._send(message)
        if number == len(outgoing.pieces) - 1:
            self.sent_through = plan.step

    def _commit(self, slot: RingSlice, stamp: int) -> RingRef:
        return self._ring.commit(slot, stamp, checksum=is_sampled(stamp))

    # barriers

    def _advance_barrier(self, barrier: BarrierPlan) -> bool:
        self.stalled_by = "barrier"
        if self._flush is None:
            if not self._quiet(barrier):
                return False
            self._flush = self._open_flush(barrier)
        if self._flush.sent < len(self._flush.pieces):
            return self._send_flush_piece(self._flush)
        if self._writeback.applied_barriers <= barrier.barrier or not self._checkpointer.saved() or self._ring.used_bytes:
            return False
        self._checkpointer.finish(barrier)
        self._send(self._checkpointer.end_of_data(barrier))
        self._queue.popleft()
        self._flush = None
        self.ended, self.finished = True, barrier.finished
        return True

    def _quiet(self, barrier: BarrierPlan) -> bool:
        """Whether everything before the barrier is done and home; then nothing can be left in the ring either."""
        if not self.connected:
            return False
        after = barrier.after_step
        if after is not None and not (reached(self.done_through, after) and reached(self._writeback.applied_through, after)):
            return False
        return not self._reading and not self._ring.used_bytes

    def _open_flush(self, barrier: BarrierPlan) -> FlushOut:
        self._writeback.expect(barrier.after_step, barrier.barrier, tuple(move.keys for move in barrier.dirty))
        block = make_block({f"{group}.slots": move.slots for group, move in enumerate(barrier.dirty)})
        pieces = cut(block.nbytes, [], [], self._ring.max_payload)
        return FlushOut(barrier=barrier, block=block, pieces=pieces, checkpoint=self._checkpointer.begin(barrier))

    def _send_flush_piece(self, flush: FlushOut) -> bool:
        piece, payload, barrier = flush.pieces[flush.sent], None, flush.barrier
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
        )
        flush.sent += 1
        self._counters.flush(message)
        self._send(message)
        return True


def reached(newest: int | None, needed: int) -> bool:
    return newest is not None and newest >= needed
