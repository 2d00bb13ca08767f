"""Fills and empties the slots of the device cache exactly as plans say.

For plan p, in this order (`streams.Wait` names the waits):

    accept    arrays are checked, long rows cut into chunks  by the mail thread, when PlanReady(p) arrives
    copy-in   ring -> arrays, ring -> fill staging          as soon as PlanReady(p) is here
    fill      victims' slots -> evict staging               after the last step of the plan `fill_after`
    fill      fill staging -> slots
    compute   look-up ... update of each step of plan p     after the fill
    evict     evict staging -> ring, by the sender's thread  in parallel with all of the above

Staging is allocated once, in the size that the prefetcher announces; pieces of rows pass through it in sequence
(`memory.py`). The cache makes no decisions: it has no keys, no index of rows and no order of eviction.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from rowcast.job.tables import GroupSpec, aligned
from rowcast.protocol.messages import PlanReady, RingRef
from rowcast.protocol.plan import ARRAY_ALIGNMENT, plan_stamp
from rowcast.protocol.plan_layout import ArraySpan, RowSpan, StepHeader
from rowcast.runtime.arrays import Bytes
from rowcast.trainer.device.cuda import phase_clock
from rowcast.trainer.device.streams import Event, FetchRing
from rowcast.trainer.models.runner import StepInputs
from rowcast.trainer.step.memory import DerivedArrays, PlanMemory, Slots, Staging, StagingSpan, derive
from rowcast.trainer.step.metrics import TrainerCounters
from rowcast.trainer.step.plan_check import PlanCheck
from rowcast.trainer.step.sender import Sender


@dataclass(slots=True, kw_only=True, eq=False)
class Step(StepInputs):
    """A step, from the arrival of its plan to its report. The main thread writes it."""

    # the arrays are there once their first copy is issued; derived arrays follow the block's last bytes
    plan: "ArrivedPlan"
    # from its begin on
    began_s: float = 0.0  # time.perf_counter()
    computed: Event = field(init=False)  # all its work is complete
    loss: Tensor | None = None  # f32 [] on the host, once `computed` has happened; None if unknown
    counts: bool = True  # False if it was passed over

    @property
    def ends_plan(self) -> bool:
        return self is self.plan.steps[-1]


@dataclass(slots=True, kw_only=True, eq=False)
class ArrivedPlan:
    """A plan, from its arrival to the end of its last step. The main thread writes all but `parts`."""

    plan: int  # its number
    headers: tuple[StepHeader, ...]
    num_pieces: int
    steps: list[Step] = field(init=False)
    parts: list[Bytes] = field(default_factory=list)  # copies of its arrays so far; used by the mail thread only
    # one of each per piece, in order
    pieces: list[PlanReady] = field(default_factory=list)  # copied in
    copied: list[Event] = field(default_factory=list)
    staged: list[StagingSpan | None] = field(default_factory=list)  # None: it has no rows
    filled: list[Event] = field(default_factory=list)  # empty pieces included
    evict_pieces: int = 0  # pieces of victims handed to the sender
    num_gathered: int = 0  # dirty victims gathered so far

    def __post_init__(self) -> None:
        self.steps = [Step(header=header, plan=self) for header in self.headers]

    @property
    def is_filled(self) -> bool:
        return len(self.filled) == self.num_pieces

    @property
    def move(self) -> StepHeader:
        """The header whose groups say what moves."""
        return self.headers[0]

    @property
    def arrays_bytes(self) -> int:
        return self.headers[-1].arrays_bytes


class DeviceCache:
    """Runs on the main thread and issues what it can without waiting. The mail thread calls `accept`."""

    def __init__(
        self, slots: Slots, sender: Sender, ring: FetchRing, depth: int, check: PlanCheck, counters: TrainerCounters
    ) -> None:
        """Fill staging gets the size of evict staging."""
        self.slots, self.sender, self.ring, self.counters = slots, sender, ring, counters
        self._streams = streams = slots.streams
        self._check = check
        self._fill_staging = Staging(streams, sender.staging_bytes)
        self._clock = phase_clock(streams.fill, counters.lapped)
        self._newest: ArrivedPlan | None = None  # used by the mail thread only
        # checked pieces, from the mail thread to the main thread: u8 [n] on the host, until the piece is released, and
        # what is derived from the plan's arrays, with their last bytes
        self._inbox: deque[tuple[ArrivedPlan, PlanReady, Tensor | None, DerivedArrays | None]] = deque()
        self._plans: deque[ArrivedPlan] = deque()  # copying has begun, not handed to compute yet
        self._copying: deque[tuple[RingRef, Event]] = deque()
        self._memory = [PlanMemory(streams, slots.groups) for _ in range(depth + 2)]  # used in rotation
        self._num_taken = 0  # plans handed to compute, whose last step is not issued
        self._computed: dict[int, Event] = {}  # issued plans, not known to be complete
        self._last_issued: int | None = None
        # names of each group's arrays in a plan
        self._fetch_slots = [f"{group}.fetch_slots" for group in range(len(slots.groups))]
        self._fill_slots = [f"{group}.fill_slots" for group in range(len(slots.groups))]
        # called once a piece's rows are on their way to their slots
        self.on_filled: Callable[[ArrivedPlan, PlanReady], None] = lambda plan, message: None

    def accept(self, message: PlanReady) -> None:
        """Checks a message and queues its piece. Raises RemoteProtocolError if the message or its bytes do not fit a
        plan of this job."""
        self._check.message(message)
        if message.steps:
            self._newest = ArrivedPlan(plan=message.plan, headers=message.steps, num_pieces=message.num_pieces)
        assert self._newest is not None, "a plan's first piece has its headers"
        payload, derived = None, None
        if message.payload is not None:
            payload = self.ring.payload(message.payload, plan_stamp(message.plan, message.piece))
            if message.arrays is not None:
                derived = self._accept_arrays(self._newest, message.arrays, payload[: message.arrays.nbytes].numpy())
        self._inbox.append((self._newest, message, payload, derived))

    def _accept_arrays(self, plan: ArrivedPlan, span: ArraySpan, content: Bytes) -> DerivedArrays | None:
        """`content`: u8 [span.nbytes]. `order.py` has checked that it follows the previous span."""
        if span.offset + span.nbytes < plan.arrays_bytes:
            plan.parts.append(content.copy())
            return None
        whole = np.concatenate([*plan.parts, content]) if plan.parts else content
        plan.parts.clear()
        self._check.arrays(plan.plan, whole)
        return derive(plan.headers, whole)

    @property
    def next_filled(self) -> ArrivedPlan | None:
        """The next plan, if its fills have all been issued. Its look-ups must wait for `filled` and `copied`."""
        return self._plans[0] if self._plans and self._plans[0].is_filled else None

    def take_filled(self) -> ArrivedPlan | None:
        if self.next_filled is None:
            return None
        self._num_taken += 1
        return self._plans.popleft()

    def issued(self, plan: ArrivedPlan) -> None:
        """Notes that the plan's last step was issued to the compute stream."""
        self._computed[plan.plan] = plan.steps[-1].computed
        self._last_issued = plan.plan
        self._num_taken -= 1

    def completed(self, plan: ArrivedPlan) -> None:
        del self._computed[plan.plan]
        self._clock.complete(plan.move.step)

    @property
    def plans_waiting(self) -> int:
        return len(self._inbox) + len(self._plans)

    @property
    def is_copying(self) -> bool:
        """Whether pieces are on their way from the ring to the device."""
        return bool(self._copying)

    @property
    def open_plans(self) -> int:
        """The waiting messages, and the incomplete plans."""
        return self.plans_waiting + len(self._computed) + self._num_taken

    @property
    def staging_bytes(self) -> int:
        return self._fill_staging.nbytes + self.sender.staging_bytes

    @property
    def plans_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    # ring -> device

    def release_copied(self) -> bool:
        progress = False
        while self._copying and self._streams.done(self._copying[0][1], "released"):
            ref, _ = self._copying.popleft()
            self.ring.release(ref)
            progress = True
        return progress

    def copy_in_next(self) -> bool:
        """Issues the oldest piece's copies: its rows from the ring to fill staging, its arrays to their block."""
        if not self._inbox:
            return False
        plan, message, payload, derived = self._inbox[0]
        room = None
        if message.rows:  # their bytes follow the piece's arrays in the payload
            size = 0 if message.payload is None else message.payload.nbytes - message.rows[0].offset
            room = self._fill_staging.take(size)
            if room is None:
                return False
        self._inbox.popleft()
        memory = self._memory[plan.plan % len(self._memory)]
        if message.steps:
            for step, arrays in zip(plan.steps, memory.open(plan.plan, plan.headers), strict=True):
                step.arrays = arrays
            self._plans.append(plan)
        with self.counters.shown("copy in", plan.move.step):
            if payload is not None:
                self._copy_in(plan, message, payload, derived, room, memory)
            plan.pieces.append(message)
            plan.staged.append(room)
            plan.copied.append(self._streams.copy_in.record())
            if message.payload is not None:
                self._copying.append((message.payload, plan.copied[-1]))
        self.counters.plan_ready(message)
        return True

    def _copy_in(
        self,
        plan: ArrivedPlan,
        message: PlanReady,
        payload: Tensor,
        derived: DerivedArrays | None,
        room: StagingSpan | None,
        memory: PlanMemory,
    ) -> None:
        stream, arrays = self._streams.copy_in, [step.arrays for step in plan.steps]
        if derived is not None:
            memory.put(plan.headers, derived, arrays)
        if message.arrays is not None:
            offset, end = message.arrays.offset, message.arrays.nbytes
            stream.copy(payload[:end], arrays[0].block[offset : offset + end])
        if derived is not None:
            memory.arrange(plan.headers, arrays)
        if room is not None:
            if room.after is not None:
                stream.wait(room.after, "fill_staging")
            stream.copy(payload[message.rows[0].offset :], room.content)

    # staging <-> slots

    def fill_next(self) -> bool:
        """Issues the oldest staged piece: victims from their slots to evict staging, rows to those slots."""
        plan = next((plan for plan in self._plans if not plan.is_filled), None)
        if plan is None or len(plan.copied) == len(plan.filled):
            return False
        message = plan.pieces[len(plan.filled)]
        groups = plan.move.groups
        awaited = {groups[span.group].fill_after for span in message.rows}
        if not all(map(self._is_issued, awaited)):
            return False
        victims = dirty_victims(plan, message, self.slots.groups)
        room = self.sender.room(victims) if victims else None
        if victims and room is None:
            return False
        fill, arrays = self._streams.fill, plan.steps[0].arrays
        fill.wait(plan.copied[message.piece], "copied")
        for after in awaited:
            if after in self._computed:
                fill.wait(self._computed[after], "fill_after")
        self._clock.begin(plan.move.step)
        if room is not None:
            self._send_victims(plan, victims, room)
        self._clock.lap("gather")
        staged = plan.staged[message.piece]
        if staged is not None:
            self.slots.scatter(
                staged.content, message.rows, [arrays[self._fill_slots[span.group]] for span in message.rows]
            )
        self._clock.lap("fill")
        plan.filled.append(fill.record())
        if staged is not None:
            staged.used = plan.filled[-1]
        self.on_filled(plan, message)
        return True

    def _is_issued(self, after: int | None) -> bool:
        """Returns whether the loop has issued plan `after`: a stream can wait only for a recorded event."""
        return after is None or (self._last_issued is not None and after <= self._last_issued)

    def _send_victims(self, plan: ArrivedPlan, victims: list[RowSpan], room: StagingSpan) -> None:
        plan.num_gathered += sum(span.count for span in victims)
        arrays = plan.steps[0].arrays
        self.sender.send_rows(
            victims,
            # a victim leaves the slot of the fetched row
            [arrays[self._fetch_slots[span.group]] for span in victims],
            room,
            plan=plan.plan,
            barrier=None,
            piece=plan.evict_pieces,
            last=plan.num_gathered == sum(group.num_dirty for group in plan.move.groups),
        )
        plan.evict_pieces += 1


def dirty_victims(plan: ArrivedPlan, message: PlanReady, groups: Sequence[GroupSpec]) -> list[RowSpan]:
    """Returns the victims that make room for the piece's rows; offsets count from the first victim."""
    victims, end = list[RowSpan](), 0
    for span in message.rows:
        dirty = min(span.count, plan.move.groups[span.group].num_dirty - span.start)
        if dirty > 0:
            victims.append(RowSpan(group=span.group, start=span.start, count=dirty, offset=end))
            end = aligned(end + dirty * groups[span.group].record_bytes, ARRAY_ALIGNMENT)
    return victims
