"""The device cache: slots of row records, filled and emptied exactly as plans say.

For plan p, in this order (the waits are named in `streams.Wait`):

    copy-in   ring -> arrays, ring -> fill staging          as soon as StepReady(p) is here
    fill      victims' slots -> evict staging               after the step `fill_after`
    fill      fill staging -> slots
    compute   look-up ... update of step p                  after the fill
    evict     evict staging -> ring, by the sender's thread  beside all that

Staging is allocated once, as large as the prefetcher says: pieces of rows go through it one after the other (`staging.py`).
The cache decides nothing: it holds no key, no index of rows and no order of its own.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rowcast.job.tables import GroupSpec
from rowcast.protocol.messages import ArraySpec, Flush, PlanHeader, Released, RingRef, RowSpan, StepReady
from rowcast.protocol.packing import Piece, barrier_stamp, cut, plan_stamp
from rowcast.protocol.row_checksum import barrier_name, fetched_name, victims_name
from rowcast.protocol.transport.ring import RingReader, release
from rowcast.runtime.errors import ConfigError, RemoteProtocolError
from rowcast.trainer.execute.host_memory import HostMemory
from rowcast.trainer.execute.metrics import TrainerCounters
from rowcast.trainer.execute.phases import phase_clock
from rowcast.trainer.execute.plan_check import ArrivingBlock, PlanCheck
from rowcast.trainer.execute.row_checksums import Asked, RowChecks
from rowcast.trainer.execute.sender import EvictTask, Sender
from rowcast.trainer.execute.staging import Place, Staging
from rowcast.trainer.execute.streams import Event, Streams

DTYPES = {"f4": torch.float32, "i4": torch.int32, "i8": torch.int64, "u1": torch.uint8}


@dataclass(slots=True)
class ArrivedStep:
    """A plan on this side: its header, its arrays on the device, and how far its rows have come."""

    step: int
    header: PlanHeader
    block: Tensor  # u8 [arrays_bytes] on the device
    arriving: ArrivingBlock  # the same on the host, until it is checked
    arrays: dict[str, Tensor]  # views of the block, by name
    num_pieces: int
    asked: Asked  # checksums
    pieces: list[StepReady] = field(default_factory=list)  # copied in, by number
    copied: list[Event] = field(default_factory=list)  # one a piece
    filled: list[Event] = field(default_factory=list)  # one a piece; empty pieces too
    staged: list[Place | None] = field(default_factory=list)  # one a piece; None: it has no rows
    evict_pieces: int = 0  # handed to the sender
    num_gathered: int = 0  # dirty victims so far

    @property
    def complete(self) -> bool:
        return len(self.filled) == self.num_pieces


@dataclass(slots=True, kw_only=True)
class FlushJob:
    """A barrier whose rows are on their way home."""

    header: Flush
    block: Tensor  # u8, the slots as they arrive, on the host
    pieces: deque[Piece]  # of rows, not gathered yet
    slots: dict[str, Tensor] | None = None  # "<group>.slots" on the device, once all have arrived
    asked: Asked | None = None  # checksums, once they are issued
    issued: int = 0  # pieces handed to the sender


class DeviceCache:
    """Runs on the main thread of the trainer; `accept` is called by the mail's thread."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        records: list[Tensor],
        depth: int,
        streams: Streams,
        ring: RingReader,
        memory: HostMemory,
        staging_bytes: int,
        sender: Sender,
        counters: TrainerCounters,
        check: PlanCheck,
        send: Callable[[Released], None],
    ) -> None:
        self.records = records  # f32 [slots, record_floats] a group
        self._groups = groups
        self._streams = streams
        self._ring = ring
        self._memory = memory
        self._sender = sender
        self._counters = counters
        self._check = check
        self._send = send
        self._fill_staging = Staging(streams, staging_bytes)
        self._evict_staging = Staging(streams, staging_bytes)
        self._checks = RowChecks(records, streams)
        self._clock = phase_clock(streams.fill, counters.spent)
        self._inbox: deque[StepReady] = deque()
        self._steps: deque[ArrivedStep] = deque()  # arrived, not yet handed to compute
        self._copying: deque[tuple[RingRef, Event]] = deque()
        self._flushing: FlushJob | None = None
        self._flushed: FlushJob | None = None  # kept until the next one: a device may still read its slots
        self._blocks: list[Tensor] = [streams.allocate(0) for _ in range(depth + 2)]  # arrays of a plan, reused in turn
        self._computed: dict[int, Event] = {}  # steps issued and not known to be complete
        self._last_issued: int | None = None

    def accept(self, message: StepReady) -> None:
        """Raises RemoteProtocolError for what is no plan of this job."""
        self._check.message(message)
        self._inbox.append(message)

    def advance(self) -> bool:
        """Issues what can be issued without waiting; True if anything was."""
        released = self._release_copied()
        copied = self._copy_next_piece()
        filled = self._fill_next_piece()
        flushed = self._flush_next_piece()
        return released or copied or filled or flushed

    def take_filled(self) -> ArrivedStep | None:
        """The next step whose rows have all been issued; its look-up must wait for `filled` and `copied`."""
        if self._steps and self._steps[0].complete:
            return self._steps.popleft()
        return None

    def issued(self, step: int, computed: Event) -> None:
        """The step's compute is on its way; `computed` is its event."""
        self._computed[step] = computed
        self._last_issued = step

    def completed(self, step: int) -> None:
        """The host knows that the step is complete."""
        del self._computed[step]
        self._clock.complete(step)

    @property
    def steps_waiting(self) -> int:
        return len(self._inbox) + len(self._steps)

    @property
    def flushing(self) -> bool:
        """Whether rows of a barrier were not all handed to the sender."""
        return self._flushing is not None

    @property
    def staging_bytes(self) -> int:
        """Memory on the device for rows on their way, in and out."""
        return self._fill_staging.nbytes + self._evict_staging.nbytes

    @property
    def plans_bytes(self) -> int:
        """Memory on the device for the arrays of the plans that are here."""
        return sum(block.nbytes for block in self._blocks)

    # ring -> device

    def _release_copied(self) -> bool:
        progress = False
        while self._copying and self._streams.done(self._copying[0][1], "released"):
            ref, _ = self._copying.popleft()
            release(self._ring, ref, self._send)
            progress = True
        return progress

    def _copy_next_piece(self) -> bool:
        if not self._inbox:
            return False
        message = self._inbox[0]
        place = self._fill_staging.take(staged_bytes(message)) if message.rows else None
        if message.rows and place is None:
            return False
        self._inbox.popleft()
        if message.plan is not None:
            self._steps.append(self._arrived(message, message.plan))
        arrived = self._steps[-1]
        with self._counters.shown("copy in", arrived.step):
            self._copy_in(arrived, message, place)
        return True

    def _arrived(self, message: StepReady, header: PlanHeader) -> ArrivedStep:
        index = message.step % len(self._blocks)
        if len(self._blocks[index]) < header.arrays_bytes:
            self._blocks[index] = self._allocate_block(message.step, header.arrays_bytes)
        block = self._blocks[index][: header.arrays_bytes]
        arrays = unpack(block, header.arrays)
        names = [name for group in range(len(self._groups)) for name in (fetched_name(group), victims_name(group))]
        return ArrivedStep(
            step=message.step,
            header=header,
            block=block,
            arriving=ArrivingBlock(
                header.arrays_bytes, lambda content: self._check.arrays(message.step, header, content)
            ),
            arrays=arrays,
            num_pieces=message.num_pieces,
            asked=self._checks.asked(arrays, names),
        )

    def _allocate_block(self, step: int, nbytes: int) -> Tensor:
        try:
            return self._streams.allocate(nbytes * 5 // 4)
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise ConfigError(
                f"step {step} brings {nbytes} bytes of look-ups, for which {self._streams.device} has no room ({first_line}); "
                "make data.batch_size or cache.capacity smaller"
            ) from None

    def _copy_in(self, arrived: ArrivedStep, message: StepReady, place: Place | None) -> None:
        stream = self._streams.copy_in
        if message.payload is not None:
            payload = self._payload(message.payload, plan_stamp(message.step, message.piece))
            end = 0
            if message.arrays is not None:
                offset, end = message.arrays.offset, message.arrays.nbytes
                arrived.arriving.add(message.arrays, payload[:end].numpy())
                stream.copy(payload[:end], arrived.block[offset : offset + end])
            if place is not None:
                if place.after is not None:
                    stream.wait(place.after, "fill_staging")
                stream.copy(payload[message.rows[0].offset :], place.content)
        self._counters.step_ready(message)
        event = stream.record()
        if message.payload is not None:
            self._copying.append((message.payload, event))
        arrived.pieces.append(message)
        arrived.staged.append(place)
        arrived.copied.append(event)

    def _payload(self, ref: RingRef, stamp: int) -> Tensor:
        return self._memory.arriving(self._ring.view(ref, stamp))

    # staging <-> slots

    def _fill_next_piece(self) -> bool:
        arrived = next((step for step in self._steps if not step.complete), None)
        if arrived is None or len(arrived.copied) == len(arrived.filled):
            return False
        message = arrived.pieces[len(arrived.filled)]
        if not self._may_fill(arrived, message):
            return False
        victims = self._victims(arrived, message)
        room = self._evict_staging.take(bytes_of(victims, self._groups)) if victims else None
        if victims and room is None:
            return False
        fill = self._streams.fill
        fill.wait(arrived.copied[message.piece], "copied")
        for after in {arrived.header.groups[span.group].fill_after for span in message.rows}:
            if after in self._computed:
                fill.wait(self._computed[after], "fill_after")
        self._check_victims(arrived, message)
        self._clock.begin(arrived.step)
        if room is not None:
            self._gather_victims(arrived, victims, room)
        self._clock.lap("gather")
        place = arrived.staged[message.piece]
        if place is not None:
            self._scatter_rows(arrived, message, place)
        self._clock.lap("fill")
        self._check_filled(arrived, message)
        arrived.filled.append(fill.record())
        if place is not None:
            place.used = arrived.filled[-1]
        return True

    def _may_fill(self, arrived: ArrivedStep, message: StepReady) -> bool:
        """A wait can only be issued for an event that was recorded: `fill_after` by the loop."""
        for span in message.rows:
            after = arrived.header.groups[span.group].fill_after
            if after is not None and (self._last_issued is None or after > self._last_issued):
                return False
        return True

    def _check_victims(self, arrived: ArrivedStep, message: StepReady) -> None:
        for span in message.rows:
            if span.start == 0:  # every victim of the group is still in its slot
                self._checks.issue(arrived.asked, victims_name(span.group), span.group)

    def _check_filled(self, arrived: ArrivedStep, message: StepReady) -> None:
        if message.piece == arrived.num_pieces - 1:
            for group in range(len(self._groups)):
                self._checks.issue(arrived.asked, fetched_name(group), group)

    def _victims(self, arrived: ArrivedStep, message: StepReady) -> list[RowSpan]:
        """The dirty ones that leave for the rows of the piece; offsets from the first on."""
        return [
            RowSpan(group=span.group, start=span.start, count=dirty, offset=span.offset - message.rows[0].offset)
            for span in message.rows
            if (dirty := min(span.count, arrived.header.groups[span.group].num_dirty - span.start)) > 0
        ]

    def _gather_victims(self, arrived: ArrivedStep, victims: list[RowSpan], room: Place) -> None:
        sources = self._gather(
            victims,
            slots=[
                arrived.arrays[f"{span.group}.evict_slots"][span.start : span.start + span.count] for span in victims
            ],
            room=room,
        )
        arrived.num_gathered += sum(span.count for span in victims)
        task = EvictTask(
            step=arrived.step,
            barrier=None,
            piece=arrived.evict_pieces,
            last=arrived.num_gathered == sum(group.num_dirty for group in arrived.header.groups),
            sources=sources,
            room=room,
            gathered=self._streams.fill.record(),
        )
        arrived.evict_pieces += 1
        self._sender.send_rows(task)

    def _gather(self, spans: list[RowSpan], slots: list[Tensor], room: Place) -> list[tuple[RowSpan, Tensor]]:
        if room.after is not None:
            self._streams.fill.wait(room.after, "evict_staging")
        sources = []
        for span, span_slots in zip(spans, slots, strict=True):
            rows = self._rows(room.content, span, span.offset)
            self._streams.fill.gather(self.records[span.group], span_slots, rows)
            sources.append((span, rows))
        return sources

    def _scatter_rows(self, arrived: ArrivedStep, message: StepReady, place: Place) -> None:
        for span in message.rows:
            slots = arrived.arrays[f"{span.group}.fetch_slots"][span.start : span.start + span.count]
            rows = self._rows(place.content, span, span.offset - message.rows[0].offset)
            self._streams.fill.scatter(rows, slots, self.records[span.group])

    def _rows(self, content: Tensor, span: RowSpan, offset: int) -> Tensor:
        """A span of a place in staging as f32 [count, record_floats]."""
        group = self._groups[span.group]
        nbytes = span.count * group.record_bytes
        return content[offset : offset + nbytes].view(torch.float32).view(span.count, group.record_floats)

    # barriers

    def flush(self, message: Flush) -> None:
        """Takes one piece of a barrier's slots. Every step before the barrier is complete.

        Raises RemoteProtocolError where a barrier comes sooner, or is none of this job.
        """
        num_open = self.steps_waiting + len(self._computed)
        if num_open:
            raise RemoteProtocolError(
                f"barrier {message.barrier} came while {num_open} messages and steps before it were not done"
            )
        self._check.barrier(message, None if self._flushing is None else self._flushing.header)
        self._counters.flush(message)
        if self._flushing is None:
            block = torch.zeros(message.arrays_bytes, dtype=torch.uint8, device="cpu")
            pieces = cut(
                0, message.num_dirty, [group.record_bytes for group in self._groups], self._evict_staging.nbytes
            )
            self._flushing = FlushJob(header=message, block=block, pieces=deque(pieces))
        if message.payload is not None and message.span is not None:
            payload = self._payload(message.payload, barrier_stamp(message.barrier, message.piece))
            self._flushing.block[message.span.offset : message.span.offset + message.span.nbytes] = payload
            release(self._ring, message.payload, self._send)
        if message.piece == message.num_pieces - 1:
            self._check.barrier_arrays(message, self._flushing.block.numpy())
            block = self._streams.allocate(message.arrays_bytes)
            self._streams.fill.copy(self._flushing.block, block)
            self._flushing.slots = unpack(block, message.arrays)

    def _flush_next_piece(self) -> bool:
        job = self._flushing
        if job is None or job.slots is None:
            return False
        room = self._evict_staging.take(bytes_of(job.pieces[0].rows, self._groups))
        if room is None:
            return False
        piece = job.pieces.popleft()
        job.asked = job.asked or self._check_barrier(job.slots)
        with self._counters.shown("flush"):
            sources = self._gather(
                list(piece.rows),
                slots=[job.slots[f"{span.group}.slots"][span.start : span.start + span.count] for span in piece.rows],
                room=room,
            )
        task = EvictTask(
            step=job.header.after_step,
            barrier=job.header.barrier,
            piece=job.issued,
            last=not job.pieces,
            sources=sources,
            room=room,
            gathered=self._streams.fill.record(),
            checksums=None if job.pieces else job.asked.checksums,
        )
        job.issued += 1
        self._sender.send_rows(task)
        if not job.pieces:
            self._flushing, self._flushed = None, job
        return True

    def _check_barrier(self, slots: dict[str, Tensor]) -> Asked:
        names = [barrier_name(group) for group in range(len(self._groups))]
        asked = self._checks.asked(slots, names)
        for group, name in enumerate(names):
            self._checks.issue(asked, name, group)
        return asked


def staged_bytes(message: StepReady) -> int:
    """Of the rows of a piece, which stand behind its arrays."""
    return 0 if message.payload is None else message.payload.nbytes - message.rows[0].offset


def bytes_of(spans: Sequence[RowSpan], groups: Sequence[GroupSpec]) -> int:
    """From the first byte of a piece's place to the end of its last span."""
    return spans[-1].offset + spans[-1].count * groups[spans[-1].group].record_bytes if spans else 0


def unpack(block: Tensor, specs: tuple[ArraySpec, ...]) -> dict[str, Tensor]:
    """Named views of a block. Raises RemoteProtocolError where an array does not lie inside it."""
    arrays = {}
    for spec in specs:
        dtype = DTYPES[spec.dtype]
        nbytes = dtype.itemsize * int(np.prod(spec.shape, dtype=np.int64))
        if spec.offset + nbytes > len(block):
            raise RemoteProtocolError(
                f"array {spec.name} ends at byte {spec.offset + nbytes} of a block of {len(block)} bytes"
            )
        arrays[spec.name] = block[spec.offset : spec.offset + nbytes].view(dtype).view(spec.shape)
    return arrays


def make_records(slots: Sequence[int], groups: Sequence[GroupSpec], device: torch.device) -> list[Tensor]:
    """The slots of each group: f32 [slots, record_floats]. Raises ConfigError where the device has not the memory."""
    try:
        return [
            torch.zeros(rows, group.record_floats, dtype=torch.float32, device=device)
            for rows, group in zip(slots, groups, strict=True)
        ]
    except RuntimeError as error:
        nbytes = sum(rows * group.record_bytes for rows, group in zip(slots, groups, strict=True))
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"cache.capacity: no room for {nbytes} bytes of slots on {device} ({first_line}); make it smaller"
        ) from None
