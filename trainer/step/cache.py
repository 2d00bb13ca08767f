"""Fills and empties the slots of the device cache exactly as plans say.

For plan p, in this order (`streams.Wait` names the waits):

    accept    arrays are checked, long rows cut into chunks  by the mail thread, when StepReady(p) arrives
    copy-in   ring -> arrays, ring -> fill staging          as soon as StepReady(p) is here
    fill      victims' slots -> evict staging               after the step `fill_after`
    fill      fill staging -> slots
    compute   look-up ... update of step p                  after the fill
    evict     evict staging -> ring, by the sender's thread  in parallel with all of the above

Staging is allocated once, in the size that the prefetcher announces; pieces of rows pass through it in sequence
(`staging.py`). The cache makes no decisions: it has no keys, no index of rows and no order of eviction.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rowcast.protocol.messages import PlanHeader, RingRef, RowSpan, StepReady
from rowcast.protocol.packing import plan_stamp
from rowcast.trainer.device.host_memory import FetchRing
from rowcast.trainer.device.phases import phase_clock
from rowcast.trainer.device.streams import Event
from rowcast.trainer.step.metrics import TrainerCounters
from rowcast.trainer.step.plan_check import ArrivingBlock, PlanCheck
from rowcast.trainer.step.plan_memory import DerivedArrays, PlanMemory, derive, unpack
from rowcast.trainer.step.slots import EvictStaging, Slots
from rowcast.trainer.step.staging import Staging, StagingSpan


@dataclass(frozen=True, slots=True)
class ArrivedPiece:
    """A checked piece, from the mail thread to the main thread."""

    message: StepReady
    payload: Tensor | None  # u8 [n] on the host, until the piece is released
    derived: DerivedArrays | None  # with the last bytes of the plan's arrays


@dataclass(slots=True)
class ArrivedStep:
    """A plan that has arrived: its header, its arrays on the device, and the progress of its rows."""

    step: int
    header: PlanHeader
    block: Tensor  # u8 [arrays_bytes] on the device
    arrays: dict[str, Tensor]  # by name; derived arrays are added with the block's last bytes
    num_pieces: int
    pieces: list[StepReady] = field(default_factory=list)  # pieces copied in, in order
    copied: list[Event] = field(default_factory=list)  # one per piece
    filled: list[Event] = field(default_factory=list)  # one per piece, empty pieces included
    staged: list[StagingSpan | None] = field(default_factory=list)  # one per piece; None: it has no rows
    evict_pieces: int = 0  # pieces of victims handed to the sender
    num_gathered: int = 0  # dirty victims gathered so far

    @property
    def complete(self) -> bool:
        return len(self.filled) == self.num_pieces


class DeviceCache:
    """Runs on the main thread and issues what it can without waiting. The mail thread calls `accept`."""

    def __init__(
        self,
        *,
        slots: Slots,
        evict_staging: EvictStaging,
        ring: FetchRing,
        depth: int,
        check: PlanCheck,
        counters: TrainerCounters,
    ) -> None:
        """Fill staging gets the size of `evict_staging`."""
        self._slots = slots
        self._groups = slots.groups
        self._streams = streams = slots.streams
        self._ring = ring
        self._counters = counters
        self._check = check
        self._fill_staging = Staging(streams, evict_staging.nbytes)
        self._evict_staging = evict_staging
        self._clock = phase_clock(streams.fill, counters.lapped)
        self._arriving: tuple[PlanHeader, ArrivingBlock] | None = (
            None  # the newest plan's; used by the mail thread only
        )
        self._inbox: deque[ArrivedPiece] = deque()
        self._steps: deque[ArrivedStep] = deque()  # arrived, not handed to compute yet
        self._copying: deque[tuple[RingRef, Event]] = deque()
        self._plans = [PlanMemory(streams, self._groups) for _ in range(depth + 2)]  # used in rotation
        self._computed: dict[int, Event] = {}  # issued steps, not known to be complete
        self._last_issued: int | None = None
        # names of each group's arrays in a plan
        self._fetch_slots = [f"{group}.fetch_slots" for group in range(len(self._groups))]
        self._fill_slots = [f"{group}.fill_slots" for group in range(len(self._groups))]

    def accept(self, message: StepReady) -> None:
        """Checks a message and queues its piece. Raises RemoteProtocolError if the message or its bytes do not fit a
        plan of this job."""
        self._check.message(message)
        if message.plan is not None:
            self._arriving = message.plan, ArrivingBlock(message.plan.arrays_bytes)
        payload, derived = None, None
        if message.payload is not None:
            payload = self._ring.payload(message.payload, plan_stamp(message.step, message.piece))
            derived = self._accept_arrays(message, payload)
        self._inbox.append(ArrivedPiece(message, payload, derived))

    def _accept_arrays(self, message: StepReady, payload: Tensor) -> DerivedArrays | None:
        assert self._arriving is not None, "a plan's first piece has its header"
        header, block = self._arriving
        span = message.arrays
        content = None if span is None else block.add(span, payload[: span.nbytes].numpy())
        if content is None:
            return None
        self._check.arrays(message.step, content)
        return derive(header, content)

    def take_filled(self) -> ArrivedStep | None:
        """Returns the next step whose fills have all been issued. Its look-up must wait for `filled` and `copied`."""
        if self._steps and self._steps[0].complete:
            return self._steps.popleft()
        return None

    def issued(self, step: int, computed: Event) -> None:
        """Notes that the step was issued to the compute stream; `computed` happens when it is complete."""
        self._computed[step] = computed
        self._last_issued = step

    def completed(self, step: int) -> None:
        del self._computed[step]
        self._clock.complete(step)

    @property
    def steps_waiting(self) -> int:
        return len(self._inbox) + len(self._steps)

    @property
    def is_copying(self) -> bool:
        """Whether pieces are on their way from the ring to the device."""
        return bool(self._copying)

    @property
    def open_steps(self) -> int:
        """The waiting messages, and the incomplete steps."""
        return self.steps_waiting + len(self._computed)

    @property
    def staging_bytes(self) -> int:
        return self._fill_staging.nbytes + self._evict_staging.nbytes

    @property
    def plans_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._plans)

    # ring -> device

    def release_copied(self) -> bool:
        progress = False
        while self._copying and self._streams.done(self._copying[0][1], "released"):
            ref, _ = self._copying.popleft()
            self._ring.release(ref)
            progress = True
        return progress

    def copy_in_next(self) -> bool:
        """Issues the oldest piece's copies: its rows from the ring to fill staging, its arrays to their block."""
        if not self._inbox:
            return False
        piece = self._inbox[0]
        message = piece.message
        room = self._fill_staging.take(staged_bytes(message)) if message.rows else None
        if message.rows and room is None:
            return False
        self._inbox.popleft()
        if message.plan is not None:
            self._steps.append(self._arrived(message, message.plan))
        arrived = self._steps[-1]
        with self._counters.shown("copy in", arrived.step):
            self._copy_in(arrived, piece, room)
        return True

    def _memory(self, step: int) -> PlanMemory:
        return self._plans[step % len(self._plans)]

    def _arrived(self, message: StepReady, header: PlanHeader) -> ArrivedStep:
        block = self._memory(message.step).open(message.step, header)
        arrays = unpack(block, header.arrays)
        return ArrivedStep(step=message.step, header=header, block=block, arrays=arrays, num_pieces=message.num_pieces)

    def _copy_in(self, arrived: ArrivedStep, piece: ArrivedPiece, room: StagingSpan | None) -> None:
        stream, message, payload = self._streams.copy_in, piece.message, piece.payload
        if piece.derived is not None:
            arrived.arrays.update(self._memory(arrived.step).put(arrived.header, piece.derived))
        if payload is not None and message.arrays is not None:
            offset, end = message.arrays.offset, message.arrays.nbytes
            stream.copy(payload[:end], arrived.block[offset : offset + end])
        if piece.derived is not None:
            self._memory(arrived.step).arrange(arrived.header, arrived.arrays)
        if payload is not None and room is not None:
            if room.after is not None:
                stream.wait(room.after, "fill_staging")
            stream.copy(payload[message.rows[0].offset :], room.content)
        self._counters.step_ready(message)
        event = stream.record()
        if message.payload is not None:
            self._copying.append((message.payload, event))
        arrived.pieces.append(message)
        arrived.staged.append(room)
        arrived.copied.append(event)

    # staging <-> slots

    def fill_next(self) -> bool:
        """Issues the oldest staged piece: victims from their slots to evict staging, rows to those slots."""
        arrived = next((step for step in self._steps if not step.complete), None)
        if arrived is None or len(arrived.copied) == len(arrived.filled):
            return False
        message = arrived.pieces[len(arrived.filled)]
        if not self._may_fill(arrived, message):
            return False
        victims = self._victims(arrived, message)
        room = self._evict_staging.room(victims) if victims else None
        if victims and room is None:
            return False
        fill = self._streams.fill
        fill.wait(arrived.copied[message.piece], "copied")
        for after in {arrived.header.groups[span.group].fill_after for span in message.rows}:
            if after in self._computed:
                fill.wait(self._computed[after], "fill_after")
        self._clock.begin(arrived.step)
        if room is not None:
            self._gather_victims(arrived, victims, room)
        self._clock.lap("gather")
        staged = arrived.staged[message.piece]
        if staged is not None:
            slots = self._slots_of(arrived, message.rows, self._fill_slots)
            self._slots.scatter(staged.content, message.rows, slots)
        self._clock.lap("fill")
        arrived.filled.append(fill.record())
        if staged is not None:
            staged.used = arrived.filled[-1]
        return True

    def _may_fill(self, arrived: ArrivedStep, message: StepReady) -> bool:
        """Returns whether the loop has issued step `fill_after`: a stream can wait only for a recorded event."""
        for span in message.rows:
            after = arrived.header.groups[span.group].fill_after
            if after is not None and (self._last_issued is None or after > self._last_issued):
                return False
        return True

    def _victims(self, arrived: ArrivedStep, message: StepReady) -> list[RowSpan]:
        """Returns the dirty victims that make room for the piece's rows; offsets count from the piece's first row."""
        return [
            RowSpan(group=span.group, start=span.start, count=dirty, offset=span.offset - message.rows[0].offset)
            for span in message.rows
            if (dirty := min(span.count, arrived.header.groups[span.group].num_dirty - span.start)) > 0
        ]

    def _slots_of(self, arrived: ArrivedStep, spans: Sequence[RowSpan], names: Sequence[str]) -> list[Tensor]:
        return [arrived.arrays[names[span.group]][span.start : span.start + span.count] for span in spans]

    def _gather_victims(self, arrived: ArrivedStep, victims: list[RowSpan], room: StagingSpan) -> None:
        arrived.num_gathered += sum(span.count for span in victims)
        self._evict_staging.send(
            victims,
            self._slots_of(arrived, victims, self._fetch_slots),  # a victim leaves the slot of the fetched row
            room,
            step=arrived.step,
            barrier=None,
            piece=arrived.evict_pieces,
            last=arrived.num_gathered == sum(group.num_dirty for group in arrived.header.groups),
        )
        arrived.evict_pieces += 1


def staged_bytes(message: StepReady) -> int:
    """Returns the bytes of a piece's rows, which follow its arrays in the payload."""
    return 0 if message.payload is None else message.payload.nbytes - message.rows[0].offset
