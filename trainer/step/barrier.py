"""Runs the trainer between steps: at the start, at each barrier and at the end, as `TABLE` defines.

thread  method                                     writes
main    advance                                    state, checkpoints, stop_reason, _flush, _gathering
mail    accept_flush, accept_restore, accept_end   flushes, _restores (appends, with their bytes), end
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.protocol.messages import EndOfData, Flush, Restore
from rowcast.protocol.plan import Piece, barrier_stamp, cut, dense_stamp
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import RemoteProtocolError
from rowcast.runtime.stages import StateTable
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.device.streams import Event, Streams, memory_for
from rowcast.trainer.models.evaluate import Evaluation, end_of_patience, place_of_best
from rowcast.trainer.models.model_state import ModelStatePieces, Stateful, Tensors, pack, readable, require_finite
from rowcast.trainer.models.model_state import unpack as read_tensors
from rowcast.trainer.models.runner import PlanArrays
from rowcast.trainer.step.cache import DeviceCache
from rowcast.trainer.step.plan_check import PlanCheck


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


class ModelState(Protocol):
    """The model's state in a checkpoint."""

    @property
    def trained(self) -> Iterable[Stateful]:
        """Models, optimizers and other objects, whose tensors training must leave finite."""

    def issue_state(self, streams: Streams) -> None:
        """Issues the exchanges that `state` needs. Called at the same barriers on all ranks."""

    def state(self) -> Tensors:
        """Returns the state to save. Called when every issued step, and `issue_state`, is complete."""

    def restore(self, tensors: Tensors) -> bool:
        """Loads a `state` before the first step. Returns whether an evaluation in progress must be closed."""


class Results(Protocol):
    """Receives results in the order of the steps."""

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """Returns all evaluations of the run."""

    def loss(self, train_step: int, loss: np.float32) -> None: ...

    def evaluation(self, result: Evaluation) -> None: ...

    def state(self) -> Tensors:
        """Returns all losses and the last evaluation, for a checkpoint."""

    def restore(self, tensors: Tensors) -> None: ...


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """The model and its results: the trainer's state in a checkpoint."""

    model: ModelState
    results: Results
    job: Job
    train_steps: int  # train steps of the run issued, in this attempt or before it
    evaluating: bool = False  # an evaluation has begun and is not closed
    ended_by: str = ""  # why no more steps are trained although there may be data

    def evaluated(self, result: Evaluation) -> None:
        self.results.evaluation(result)
        self._judge()

    def _judge(self) -> None:
        self.ended_by = end_of_patience(self.results.evaluations, self.job.eval.patience)

    @property
    def is_best(self) -> bool:
        """Whether the best evaluation is one of this model."""
        evaluations = self.results.evaluations
        place = place_of_best(evaluations)
        return place >= 0 and evaluations[place].train_step == self.train_steps

    def issue(self, streams: Streams) -> Event:
        """Issues the copies for `pack`. Called when every step is complete."""
        self.model.issue_state(streams)
        return streams.compute.record()

    def pack(self) -> bytes:
        """Called when the event of `issue` has happened."""
        require_finite(self.model.trained, self.train_steps)
        return pack({**self.model.state(), **self.results.state()})

    def restore(self, content: bytes) -> None:
        """Restores what `pack` returned, before the first step."""
        tensors = read_tensors(content)
        with readable():
            self.evaluating = self.model.restore(tensors)
        crash_point("model restored")
        with readable():
            self.results.restore(tensors)
        self._judge()
        if self.job.eval.patience and not self.results.evaluations:
            get_logger().info("the checkpoint has no evaluations; eval.patience counts from here")


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
        cache: DeviceCache,
        training: TrainingState,
        check: PlanCheck,
        *,
        resumes: bool,
        sends_model_state: bool,
    ) -> None:
        """`resumes`: the run continues from a checkpoint; its model state arrives first. `sends_model_state`: at a
        checkpoint; False: this trainer sends only a checksum, and rank 0's sends the state."""
        self.state = TrainerState.RESTORING
        self.end: EndOfData | None = None
        self.checkpoints = 0  # checkpoints begun
        # the reason of the barrier after the newest step; None once the next step begins
        self.stop_reason: str | None = None
        self._cache = cache
        self._slots, self._sender, self._ring = cache.slots, cache.sender, cache.ring
        self._training = training
        self._check = check
        self.flushes: deque[tuple[Flush, Tensor | None]] = deque()
        self._restores: deque[tuple[Restore, Tensor]] = deque()
        self._restored = ModelStatePieces()
        self._state_issued: Event | None = None  # while the model state is gathered
        self._flush: ArrivingFlush | None = None
        # "<group>.slots" on the device; kept until the next barrier, because a stream may still read them
        self._dirty: Mapping[str, Tensor] = {}
        self._sends_model_state = sends_model_state
        if not resumes:
            self._follow(TrainerEvent.RESTORED)

    @property
    def evaluated(self) -> bool:
        """Whether the evaluation ended before a barrier that has arrived."""
        return bool(self.flushes) and self.flushes[0][0].evaluated

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint is known to be on disk: the next barrier and the end both wait for it."""
        return self.checkpoints > (1 if self.end is None else 0)

    # the mail thread

    def accept_flush(self, message: Flush) -> None:
        stamp = barrier_stamp(message.barrier, message.piece)
        payload = None if message.payload is None else self._ring.payload(message.payload, stamp)
        self.flushes.append((message, payload))

    def accept_restore(self, message: Restore) -> None:
        self._restores.append((message, self._ring.payload(message.payload, dense_stamp(message.piece))))

    def accept_end(self, message: EndOfData) -> None:
        self.end = message

    # the main thread

    def advance(self) -> bool:
        """Processes what has arrived, as far as possible without waiting; returns whether it did anything."""
        match self.state:
            case TrainerState.RESTORING:
                return self._restore_next(*self._restores.popleft()) if self._restores else False
            case TrainerState.RUNNING | TrainerState.RECEIVING:
                if self.flushes:
                    return self._receive_slots(*self.flushes.popleft())
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
        self._ring.release(message.payload)
        if content is None:
            return True
        self._training.restore(content)
        self._slots.streams.settle()
        return self._follow(TrainerEvent.RESTORED)

    def _receive_slots(self, message: Flush, payload: Tensor | None) -> bool:
        """Receives one piece. Raises RemoteProtocolError if an earlier plan is not complete or the piece is invalid."""
        num_open = self._cache.open_plans
        if num_open:
            raise RemoteProtocolError(
                f"barrier {message.barrier} came while {num_open} messages and plans before it were not done"
            )
        self._follow(TrainerEvent.MORE_SLOTS if message.piece else TrainerEvent.FLUSH)
        self._check.barrier(message, self._open.header if message.piece else None)
        self._cache.counters.flush(message)
        self.stop_reason = message.reason
        if not message.piece:
            widths = [group.record_bytes for group in self._slots.groups]
            pieces = deque(cut(0, message.num_dirty, widths, self._sender.staging_bytes))
            pinned = self._slots.streams.device.type == "cuda"  # else the copy below would make the host wait
            block = torch.zeros(message.arrays_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self._flush = ArrivingFlush(header=message, block=block, pieces=pieces)
        if payload is not None and message.payload is not None and message.span is not None:
            self._open.block[message.span.offset : message.span.offset + message.span.nbytes] = payload
            self._ring.release(message.payload)
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
        self._dirty = PlanArrays(block, message.arrays)
        self.checkpoints += message.checkpoint
        self._follow(TrainerEvent.ALL_SLOTS)

    def _gather_next(self, flush: ArrivingFlush) -> bool:
        room = self._sender.room(flush.pieces[0].rows)
        if room is None:
            return False
        rows = flush.pieces.popleft().rows
        with self._cache.counters.shown("flush"):
            self._sender.send_rows(
                rows,
                [self._dirty[f"{span.group}.slots"] for span in rows],
                room,
                plan=flush.header.after_plan,
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
            self._state_issued = self._training.issue(self._slots.streams)
            return True
        if not self._slots.streams.done(self._state_issued, "state_gathered"):
            return False
        self._state_issued = None
        crash_point("dense side not packed")
        with self._cache.counters.shown("pack"):
            content = self._training.pack()
        self._sender.send_state(barrier, content, whole=self._sends_model_state, is_best=self._training.is_best)
        return self._follow(TrainerEvent.PACKED)
