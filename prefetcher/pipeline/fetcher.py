"""Reads the rows of each plan from the store into the ring and announces them in the order of the plans.

A plan may be read when the rows that it could depend on are home:  applied_through >= max(after_plan, plan - depth - 1)
A plan may be sent when the trainer has room to hold it:             done_through >= plan - depth - 1
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rowcast.job.tables import GroupSpec
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.pipeline.writeback import Writeback, rows_of_table
from rowcast.prefetcher.stores.memory_store import AllStores, Rows
from rowcast.prefetcher.stores.store import Ticket
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.messages import Answer, Ask, PlanReady, StopRequest
from rowcast.protocol.plan import BarrierPlan, Piece, Plan, cut, is_sampled, plan_stamp
from rowcast.protocol.plan_layout import RowSpan
from rowcast.protocol.transport.ring import RingSlice, RingWriter
from rowcast.runtime.arrays import I64, Bytes
from rowcast.runtime.checkpoint_manifest import BatchChecksum, Position
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import RowcastError

LISTED_AT_ONCE = 2**17  # rows: 1 MiB of numbers
NO_ROWS: I64 = np.empty(0, np.int64)
Stall = Literal["plans", "credit", "write_back", "ring", "store", "barrier", "checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBarrier:
    """An entry after a plan. Every barrier of a run that makes checkpoints is one."""

    plan: BarrierPlan
    position: Position  # where training continues after it
    last: bool  # no entry follows
    ahead: tuple[BatchChecksum, ...]  # of the batches that follow
    fault: RowcastError | None  # raised once the barrier's checkpoint is durable: the batch after it is bad
    evaluated: bool  # the evaluation before it is over

    def cut(self, position: Position, stop: StopRequest) -> "PlannedBarrier":
        """Returns this barrier for a run that stops at `position`: its checkpoint is at that position or earlier."""
        if self.position.step < position.step or (self.position.step == position.step and not stop.finished):
            return self
        plan = replace(self.plan, reason=stop.reason, finished=stop.finished)
        return replace(self, position=position, plan=plan, fault=None)


PlanStream = deque[Plan | PlannedBarrier]  # the planning thread appends, the fetcher's takes


@dataclass(slots=True, kw_only=True)
class Reading:
    """A piece of a plan in the ring whose rows are being read."""

    plan: Plan
    piece: Piece
    slice: RingSlice
    tickets: list[Ticket]
    returned: int  # the last `Returned` in the store before the reads began

    def done(self) -> bool:
        self.tickets = [ticket for ticket in self.tickets if not ticket.done()]
        return not self.tickets


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far rows may run ahead of the trainer."""

    depth: int  # plans ahead of the trainer
    first_plan: int  # the number of this incarnation's first plan
    staging_bytes: int  # of rows in one piece

    def before(self, plan: int) -> int:
        """The plan that must be done and home before this plan's rows may be sent."""
        return plan - self.depth - 1


class Fetcher:
    """The mail's thread calls `plan_done`, the fetcher's `announce_read` and then `read_rows`: older plans first."""

    def __init__(
        self,
        *,
        plans: PlanStream,
        groups: tuple[GroupSpec, ...],
        stores: tuple[TrackedStore, ...],
        ring: RingWriter,
        writeback: Writeback,
        counters: PrefetcherCounters,
        limits: Limits,
        send: Callable[[PlanReady | Answer], None],
    ) -> None:
        self.connected = False  # a trainer was welcomed; before that, rows may be read but not sent
        self.done_through: int | None = None  # the last plan that the trainer completed
        self.sent_through: int | None = None
        self.step_sent: int | None = None  # the last one of these plans
        self.step_done: int | None = None
        self._sent_steps: deque[int] = deque()  # the last step of each plan that is not done
        self.rows_return = True  # of the plan that was taken last
        self.stalled_by: Stall | None = None  # written by the fetcher's thread
        self._plans = plans
        self._groups = groups
        self._stores, self.all_stores = stores, AllStores(stores)
        self._ring = ring
        self._writeback = writeback
        self._counters = counters
        self._limits = limits
        self._send = send
        self._pieces: deque[tuple[Plan, Piece]] = deque()  # of one plan, to be read
        self._reading: deque[Reading] = deque()  # pieces in the ring, in order
        self._answering: deque[tuple[Ask, Bytes, Ticket]] = deque()
        self._trained: Iterator[I64] = iter(())  # that were asked for and not listed yet

    @property
    def reading(self) -> int:
        return len(self._reading)

    @property
    def awaits_store(self) -> bool:
        """Whether the oldest piece, or what a script has asked for, was not read when the fetcher last looked."""
        return bool(self._answering) or (bool(self._reading) and bool(self._reading[0].tickets))

    @property
    def is_between_plans(self) -> bool:
        return not self._pieces

    def plan_done(self, plan: int) -> None:
        self.step_done = self._sent_steps.popleft()
        self.done_through = plan

    # store -> ring

    def read_rows(self) -> bool:
        """Removes the next plan from the stream, or starts reading the rows of its next piece into the ring."""
        if self._pieces:
            with self._counters.timed("fetch", self._pieces[0][0].first_step):
                return self._begin_piece(*self._pieces[0])
        head = self._plans[0] if self._plans else None
        if head is None or isinstance(head, PlannedBarrier):  # a barrier may have arrived during this turn
            self.stalled_by = self.stalled_by or "plans"
            return False
        if not self._may_read(head):
            self.stalled_by = self.stalled_by or "write_back"
            return False
        self._plans.popleft()
        with self._counters.timed("fetch", head.first_step):
            self._open(head)
        return True

    def _may_read(self, plan: Plan) -> bool:
        needed = self._limits.before(plan.plan)
        if plan.after_plan is not None:
            needed = max(needed, plan.after_plan)
        return needed < self._limits.first_plan or reached(self._writeback.applied_through, needed)

    def _open(self, plan: Plan) -> None:
        self.rows_return = self._writeback.expect(plan.plan, None, plan.steps[0].train_step, plan.victims)
        pieces = cut(
            plan.arrays_bytes,
            list(map(len, plan.fetch_keys)),
            [group.record_bytes for group in self._groups],
            self._ring.max_payload,
            self._limits.staging_bytes,
        )
        self._pieces.extend((plan, piece) for piece in pieces)

    def _begin_piece(self, plan: Plan, piece: Piece) -> bool:
        slot = self._ring.try_allocate(piece.nbytes)
        if slot is None:
            self.stalled_by = self.stalled_by or "ring"
            return False
        if piece.arrays is not None:
            plan.write(piece.arrays.offset, slot.payload[: piece.arrays.nbytes])
        returned = self._writeback.returned
        tickets = self.all_stores.read([self._rows_of(plan, span, slot) for span in piece.rows])
        self._reading.append(Reading(plan=plan, piece=piece, slice=slot, tickets=tickets, returned=returned))
        self._pieces.popleft()
        return True

    def _rows_of(self, plan: Plan, span: RowSpan, slot: RingSlice) -> Rows:
        width = self._groups[span.group].record_bytes
        rows = slot.payload[span.offset : span.offset + span.count * width].reshape(span.count, width)
        return span.group, plan.fetch_keys[span.group][span.start : span.start + span.count], rows

    # store -> a training script

    def answer_asked(self) -> bool:
        """Reads the rows that a script has asked for, and sends those that were read."""
        asked = bool(self._writeback.asked)
        if asked:
            ask = self._writeback.asked.popleft()
            group, keys = rows_of_table(self._groups, ask.table, ask.rows)
            if ask.wants == "trained rows":
                if not len(keys):
                    self._trained = self._stores[group.index].trained_rows(ask.table, LISTED_AT_ONCE)
                self._send(Answer(number=ask.number, records=next(self._trained, NO_ROWS).tobytes()))
                return True
            rows = np.empty((len(keys), group.record_bytes), np.uint8)
            self._answering.append((ask, rows, self._stores[group.index].read(keys, rows)))
        if not self._answering or not self._answering[0][2].done():
            return asked
        ask, rows, _ = self._answering.popleft()
        self._send(Answer(number=ask.number, records=rows.tobytes()))
        return True

    # ring -> trainer

    def announce_read(self) -> bool:
        """Announces the oldest piece once its rows are in the ring and the trainer has room for its plan."""
        if not self._reading:
            return False
        complete = [reading.done() for reading in self._reading]  # poll all: tickets finish in any order
        if not complete[0]:
            self.stalled_by = "store"
            return False
        reading = self._reading[0]
        plan = reading.plan
        oldest = self._limits.before(plan.plan)
        if not self.connected or (oldest >= self._limits.first_plan and not reached(self.done_through, oldest)):
            self.stalled_by = "credit"
            return False
        self._reading.popleft()
        with self._counters.timed("send", plan.first_step):
            self._announce(reading)
        return True

    def _announce(self, reading: Reading) -> None:
        plan, piece = reading.plan, reading.piece
        stamp = plan_stamp(plan.plan, piece.number)
        message = PlanReady(
            plan=plan.plan,
            piece=piece.number,
            num_pieces=piece.count,
            steps=plan.steps if piece.number == 0 else (),
            payload=self._ring.commit(reading.slice, stamp, checksum=is_sampled(stamp)),
            arrays=piece.arrays,
            rows=piece.rows,
            returned=reading.returned,
        )
        if piece.number == piece.count - 1:
            self._sent_steps.append(plan.steps[-1].step)
        crash_point("PlanReady not sent")
        self._counters.plan_ready(message)
        self._send(message)
        crash_point("PlanReady sent")
        if piece.number == piece.count - 1:
            self.sent_through, self.step_sent = plan.plan, plan.steps[-1].step


def reached(newest: int | None, needed: int) -> bool:
    return newest is not None and newest >= needed
