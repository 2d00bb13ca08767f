"""Runs the trainer between steps: at the start, at each barrier and at the end, as `TABLE` defines.

thread  method                                     writes
main    advance, step_begins                       state, checkpoints, stop_reason, _flush, _gathering
mail    accept_flush, accept_restore, accept_end   _flushes, _restores (appends, with their bytes), end
sender  send_dense                                 _dense (pops; the main thread appends)
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from rowcast.protocol.dense_pieces import DensePieces
from rowcast.protocol.messages import EndOfData, Flush, Replica, Restore, Saved
from rowcast.protocol.packing import Piece, barrier_stamp, cut, dense_stamp, saved_stamp
from rowcast.protocol.transport.ring import RingWriter
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import RemoteProtocolError
from rowcast.runtime.stages import StateTable
from rowcast.trainer.device.host_memory import FetchRing
from rowcast.trainer.device.streams import Event, Streams, memory_for
from rowcast.trainer.models.model_state import ModelStatePieces
from rowcast.trainer.step.cache import DeviceCache
from rowcast.trainer.step.metrics import TrainerCounters
from rowcast.trainer.step.plan_check import PlanCheck
from rowcast.trainer.step.plan_memory import unpack
from rowcast.trainer.step.sender import Sender
from rowcast.trainer.step.slots import EvictStaging, Slots


class TrainerState(StrEnum):
    RESTORING = "the dense side comes"
    RUNNING = "steps run"
    RECEIVING = "dirty slots come"
    GATHERING = "dirty rows leave their slots"
    PACKING = "the dense side is gathered and packed"
    ENDED = "ended"


class TrainerEvent(StrEnum):
    RESTORED = "last Restore, or none needed"
    FLUSH = "first Flush"
    MORE_SLOTS = "later Flush"
    ALL_SLOTS = "that was the last Flush"
    GATHERED = "last row handed to the sender, no checkpoint"
    MUST_SAVE = "last row handed to the sender"
    PACKED = "dense side handed to the sender"
    END = "EndOfData"


S, E = TrainerState, TrainerEvent
TABLE = StateTable(
    "trainer",
    (
        (S.RESTORING, E.RESTORED, S.RUNNING),
        (S.RUNNING, E.FLUSH, S.RECEIVING),
        (S.RECEIVING, E.MORE_SLOTS, S.RECEIVING),
        (S.RECEIVING, E.ALL_SLOTS, S.GATHERING),
        (S.GATHERING, E.GATHERED, S.RUNNING),
        (S.GATHERING, E.MUST_SAVE, S.PACKING),
        (S.PACKING, E.PACKED, S.RUNNING),
        (S.RUNNING, E.END, S.ENDED),
    ),
)


class DenseState(Protocol):
    """The trainer's state in a checkpoint: the model state."""

    def issue(self, streams: Streams) -> Event:
        """Issues the copies for `pack`. Called when every step is complete."""

    def pack(self) -> bytes:
        """Called when the event of `issue` has happened."""

    def restore(self, content: bytes) -> None:
        """Restores what `pack` returned, before the first step."""


@dataclass(slots=True, kw_only=True)
class ArrivingFlush:
    """An open barrier with rows on their way home."""

    header: Flush
    block: Tensor  # u8 on the host: the slots as they arrive
    pieces: deque[Piece]  # pieces of rows that are not gathered yet
    num_gathered: int = 0  # pieces gathered so far


class TrainerBarrier:
    def __init__(
        self,
        *,
        cache: DeviceCache,
        slots: Slots,
        evict_staging: EvictStaging,
        sender: Sender,
        fetch_ring: FetchRing,
        back_ring: RingWriter,
        dense: DenseState,
        check: PlanCheck,
        counters: TrainerCounters,
        send: Callable[[Saved | Replica], None],
        resumes: bool,
        sends_model_state: bool,
    ) -> None:
        """`resumes`: the run continues from a checkpoint; its model state arrives first. `sends_model_state`: at a
        checkpoint; False: this trainer sends only a checksum, and rank 0's sends the state."""
        self.state = TrainerState.RESTORING
        self.end: EndOfData | None = None
        self.checkpoints = 0  # checkpoints begun
        # the reason of the barrier after the newest step; None before that barrier arrives
        self.stop_reason: str | None = None
        self._cache = cache
        self._slots = slots
        self._evict_staging = evict_staging
        self._sender = sender
        self._fetch_ring = fetch_ring
        self._back_ring = back_ring
        self._dense_state = dense
        self._check = check
        self._counters = counters
        self._send = send
        self._flushes: deque[tuple[Flush, Tensor | None]] = deque()
        self._restores: deque[tuple[Restore, Tensor]] = deque()
        self._restored = ModelStatePieces()
        self._state_issued: Event | None = None  # while the model state is gathered
        self._flush: ArrivingFlush | None = None
        # "<group>.slots" on the device; kept until the next barrier, because a stream may still read them
        self._dirty: dict[str, Tensor] = {}
        self._sends_model_state = sends_model_state
        self._dense: deque[tuple[int, DensePieces | Replica]] = deque()  # barrier, and its model state to send
        if not resumes:
            self._follow(TrainerEvent.RESTORED)

    @property
    def waiting_for(self) -> str | None:
        """What it waits for; None: only for steps."""
        if self.state is TrainerState.RESTORING:
            return "the checkpoint's model state"
        return "the barrier" if self._flushes or self.state not in (TrainerState.RUNNING, TrainerState.ENDED) else None

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint is known to be on disk: the next barrier and the end both wait for it."""
        return self.checkpoints > (1 if self.end is None else 0)

    # the mail thread

    def accept_flush(self, message: Flush) -> None:
        stamp = barrier_stamp(message.barrier, message.piece)
        payload = None if message.payload is None else self._fetch_ring.payload(message.payload, stamp)
        self._flushes.append((message, payload))

    def accept_restore(self, message: Restore) -> None:
        self._restores.append((message, self._fetch_ring.payload(message.payload, dense_stamp(message.piece))))

    def accept_end(self, message: EndOfData) -> None:
        self.end = message

    # the sender's thread

    def send_dense(self) -> bool:
        """Sends the next piece of a checkpoint's model state, once all rows of its barrier were sent."""
        if not self._dense or self._sender.queued:
            return False
        barrier, pieces = self._dense[0]
        if isinstance(pieces, Replica):
            self._send(pieces)
            self._dense.popleft()
            return True
        room = pieces.room()
        self._sender.waiting_for_ring = room is None
        if room is None:
            return False
        with self._counters.shown("copy out"):
            fields = pieces.put(room)
        crash_point("Saved not sent")
        self._send(Saved(barrier=barrier, **fields))
        crash_point("Saved sent")
        if pieces.complete:
            self._dense.popleft()
        return True

    # the main thread

    def step_begins(self) -> None:
        self.stop_reason = None

    def advance(self) -> bool:
        """Processes what has arrived, as far as possible without waiting; returns whether it did anything."""
        match self.state:
            case TrainerState.RESTORING:
                return self._restore_next(*self._restores.popleft()) if self._restores else False
            case TrainerState.RUNNING | TrainerState.RECEIVING:
                if self._flushes:
                    return self._receive_slots(*self._flushes.popleft())
                return self.end is not None and self._follow(TrainerEvent.END)
            case TrainerState.GATHERING:
                return self._gather_next(self._open)
            case TrainerState.PACKING:
                return self._pack(self._open.header.barrier)
            case TrainerState.ENDED:
                return False

    def _follow(self, event: TrainerEvent) -> bool:
        self.state = TABLE.after(self.state, event)
        return True

    @property
    def _open(self) -> ArrivingFlush:
        assert self._flush is not None, "a Flush has opened the barrier"
        return self._flush

    def _restore_next(self, message: Restore, payload: Tensor) -> bool:
        content = self._restored.add(message, payload.numpy().data)
        self._fetch_ring.release(message.payload)
        if content is None:
            return True
        self._dense_state.restore(content)
        self._slots.streams.settle()
        return self._follow(TrainerEvent.RESTORED)

    def _receive_slots(self, message: Flush, payload: Tensor | None) -> bool:
        """Receives one piece. Raises RemoteProtocolError if an earlier step is not complete or the piece is invalid."""
        num_open = self._cache.open_steps
        if num_open:
            raise RemoteProtocolError(
                f"barrier {message.barrier} came while {num_open} messages and steps before it were not done"
            )
        self._follow(TrainerEvent.MORE_SLOTS if message.piece else TrainerEvent.FLUSH)
        self._check.barrier(message, self._open.header if message.piece else None)
        self._counters.flush(message)
        self.stop_reason = message.reason
        if not message.piece:
            widths = [group.record_bytes for group in self._slots.groups]
            pieces = deque(cut(0, message.num_dirty, widths, self._evict_staging.nbytes))
            pinned = self._slots.streams.device.type == "cuda"  # else the copy below would make the host wait
            block = torch.zeros(message.arrays_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self._flush = ArrivingFlush(header=message, block=block, pieces=pieces)
        if payload is not None and message.payload is not None and message.span is not None:
            self._open.block[message.span.offset : message.span.offset + message.span.nbytes] = payload
            self._fetch_ring.release(message.payload)
        if message.piece == message.num_pieces - 1:
            self._open_slots(message, self._open.block)
        return True

    def _open_slots(self, message: Flush, content: Tensor) -> None:
        """Copies the slots, once all have arrived, to the device."""
        self._check.barrier_arrays(message, content.numpy())
        streams = self._slots.streams
        what = f"barrier {message.barrier} brings {message.arrays_bytes} bytes of slots, for which {streams.device} "
        with memory_for(f"{what}has no room", "make cache.capacity or data.batch_size smaller"):
            block = streams.allocate(message.arrays_bytes)
        streams.fill.copy(content, block)
        self._dirty = unpack(block, message.arrays)
        self.checkpoints += message.checkpoint
        self._follow(TrainerEvent.ALL_SLOTS)

    def _gather_next(self, flush: ArrivingFlush) -> bool:
        room = self._evict_staging.room(flush.pieces[0].rows)
        if room is None:
            return False
        rows = flush.pieces.popleft().rows
        with self._counters.shown("flush"):
            self._evict_staging.send(
                rows,
                [self._dirty[f"{span.group}.slots"][span.start : span.start + span.count] for span in rows],
                room,
                step=flush.header.after_step,
                barrier=flush.header.barrier,
                piece=flush.num_gathered,
                last=not flush.pieces,
            )
        flush.num_gathered += 1
        return bool(flush.pieces) or self._follow(
            TrainerEvent.MUST_SAVE if flush.header.checkpoint else TrainerEvent.GATHERED
        )

    @property
    def awaits_state(self) -> bool:
        """Whether the next turn depends on an event of the device."""
        return self._state_issued is not None

    def _pack(self, barrier: int) -> bool:
        if self._state_issued is None:
            self._state_issued = self._dense_state.issue(self._slots.streams)
            return True
        if not self._slots.streams.done(self._state_issued, "state_gathered"):
            return False
        self._state_issued = None
        crash_point("dense side not packed")
        with self._counters.shown("pack"):
            content = self._dense_state.pack()
        if self._sends_model_state:
            pieces = DensePieces(content, self._back_ring, partial(saved_stamp, barrier))
            self._dense.append((barrier, pieces))
        else:
            self._dense.append((barrier, Replica(barrier=barrier, checksum=xxhash.xxh3_64_intdigest(content))))
        return self._follow(TrainerEvent.PACKED)
