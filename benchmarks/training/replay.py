"""The trainer fed from a recorded stream: plans and rows are in the ring before the clock starts, as if the prefetcher
cost nothing.

What remains besides the step is the trainer's share of rowcast: copies both ways, fills, evictions, messages.

    recorded plans + rows -> one ring, never reused
    Peer    PlanReady(p) once plan p - depth - 1 is done; takes RowsBack and releases its bytes

A `Recording` is made once; each `Replay` of it begins with empty slots and an untrained model.

A row that returns has the values it had when it first came. So speeds are meaningful here, and losses only if no row
leaves the cache.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import torch

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, aligned
from rowcast.protocol.batch import Batch
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import PROTOCOL_VERSION, PlanDone, PlanReady, RingSpec, RowsBack, Welcome
from rowcast.protocol.parts import UNDIVIDED, batch_specs, belonging
from rowcast.protocol.plan import ArrayBlock, Piece, StepPlan, cut, plan_stamp, step_block, step_header
from rowcast.protocol.session import Session
from rowcast.protocol.transport.ring import RingReader, RingWriter, release
from rowcast.protocol.transport.ring_file import in_memory_buffer
from rowcast.runtime.arrays import I64, Bytes
from rowcast.runtime.machine import Machine
from rowcast.runtime.stages import POLL_S, Crew, Doorbell
from rowcast.trainer.device.cuda import RingEnds, make_streams, page_locked
from rowcast.trainer.device.streams import PhaseClock, stage_on
from rowcast.trainer.models.evaluate import Evaluation
from rowcast.trainer.models.model_state import Tensors
from rowcast.trainer.models.runner import StepRunner
from rowcast.trainer.run.connection import hello
from rowcast.trainer.step.engine import WAKES, TrainerEngine
from rowcast.trainer.step.metrics import new_counters
from tests.support.inproc_link import inproc_pair

LOOP = "loop"  # the stage that the main thread advances
BACK_PLANS = 4  # plans whose victims the back ring holds
GUARDS = 4096  # bytes of a piece besides its payload, at most
FirstRecords = Callable[[GroupSpec, I64], Bytes]  # the records of rows, by key, one after the other


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    batch: Batch
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Packed:
    recorded: RecordedPlan
    block: ArrayBlock
    pieces: list[Piece]  # exactly one: staging is large enough


def pack(recorded: RecordedPlan, groups: Sequence[GroupSpec]) -> Packed:
    block = step_block(recorded.batch, recorded.plan, 0)
    num_rows = [len(own.fetch_keys) for own in recorded.plan.groups]
    widths = [group.record_bytes for group in groups]
    largest = block.nbytes + sum(map(int.__mul__, num_rows, widths)) + GUARDS
    return Packed(recorded, block, cut(block.nbytes, num_rows, widths, largest))


class Peer:
    def __init__(
        self, conversation: Conversation, messages: Sequence[PlanReady], depth: int, back_ring: RingReader
    ) -> None:
        self.done_s: list[float] = []  # when each step was reported done
        self.last = len(messages)  # no step from this one on is sent
        self._conversation = conversation
        self._messages = messages
        self._depth = depth
        self._back_ring = back_ring
        self._num_sent = 0
        conversation.listen(
            {RowsBack: self._rows_back, PlanDone: lambda message: self.done_s.append(time.perf_counter())}
        )

    def advance(self) -> bool:
        heard = self._conversation.advance()
        if self._num_sent == self.last or self._num_sent > len(self.done_s) + self._depth:
            return heard
        self._conversation.send(self._messages[self._num_sent])
        self._num_sent += 1
        return True

    def _rows_back(self, message: RowsBack) -> None:
        if message.payload is not None and message.plan is not None:
            self._back_ring.view(message.payload, plan_stamp(message.plan, message.piece))
            release(self._back_ring, message.payload, self._conversation.send)


class Losses:
    evaluations = ()

    def __init__(self) -> None:
        self.losses: list[np.float32] = []

    def loss(self, train_step: int, loss: np.float32) -> None:
        self.losses.append(loss)

    def evaluation(self, result: Evaluation) -> None: ...

    def state(self) -> Tensors:
        return {}

    def restore(self, tensors: Tensors) -> None: ...


class Recording:
    """Plans and rows in a ring. A context: rings stay page-locked inside it, and runs may start, one after another."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        plans: Iterable[RecordedPlan],
        slots: tuple[int, ...],
        device: torch.device,
        first_records: FirstRecords,
    ) -> None:
        self.groups = groups
        packed = [pack(recorded, self.groups) for recorded in plans]
        payloads = [own.pieces[0].nbytes for own in packed]
        self.slots, self.device = slots, device
        self.fetch_buffer = in_memory_buffer(sum(payloads) + GUARDS * len(payloads) + 2 * max(payloads))
        self.back_buffer = in_memory_buffer(aligned(BACK_PLANS * 2 * max(payloads), 4096))
        writer = RingWriter(self.fetch_buffer)
        self.messages = [self._message(own, writer, first_records) for own in packed]
        self.first_batch = packed[0].recorded.batch
        self.staging_bytes = 2 * aligned(max(payloads), 64)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.is_pinned = self._stack.enter_context(page_locked([self.fetch_buffer, self.back_buffer], self.device))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _message(self, packed: Packed, writer: RingWriter, first_records: FirstRecords) -> PlanReady:
        (piece,), plan = packed.pieces, packed.recorded.plan
        slot = writer.try_allocate(piece.nbytes)
        assert slot is not None, "the ring was made for all plans"
        packed.block.write(0, slot.payload[: packed.block.nbytes])
        for span in piece.rows:
            keys = plan.groups[span.group].fetch_keys[span.start : span.start + span.count]
            rows = first_records(self.groups[span.group], keys)
            slot.payload[span.offset : span.offset + len(rows)] = rows
        return PlanReady(
            plan=plan.step,
            piece=0,
            num_pieces=1,
            steps=(step_header(packed.recorded.batch, plan, packed.block),),
            payload=writer.commit(slot, plan_stamp(plan.step, 0), checksum=False),
            arrays=piece.arrays,
            rows=piece.rows,
        )


def await_message(conversation: Conversation) -> None:
    while not conversation.advance():
        time.sleep(POLL_S)


class Replay:
    """One run of a recording, by a trainer with empty slots."""

    def __init__(self, recording: Recording, job: Job) -> None:
        """`job` differs from the recorded one in its model only."""
        device = recording.device
        self._device, self._bell = device, Doorbell()
        self._crew = Crew("replay", self._bell, owns_process=False)
        near, far = inproc_pair((partial(self._crew.wake, "peer"), partial(self._crew.wake, "mail")))
        theirs, ours = Conversation(Session("prefetcher", 1), near), Conversation(Session("trainer"), far)
        welcome = Welcome(
            protocol_version=PROTOCOL_VERSION,
            run_id="replay",
            incarnation=1,
            pid=1,
            slots=recording.slots,
            inputs=batch_specs(recording.first_batch, belonging(job).arrays),
            depth=job.lookahead.depth,
            fetch_ring=RingSpec(path="", nbytes=len(recording.fetch_buffer)),
            back_ring=RingSpec(path="", nbytes=len(recording.back_buffer)),
            staging_bytes=recording.staging_bytes,
            train_steps=None,
            first_train_step=0,
            restore_bytes=0,
        )
        ours.send(hello(job, UNDIVIDED, "train", Machine(threads=1), device))
        await_message(theirs)
        theirs.send(welcome)
        await_message(ours)
        self.num_steps = len(recording.messages)
        self.results, self.counters = Losses(), new_counters(recording.groups)

        def make_model(records: list[torch.Tensor], clock: PhaseClock) -> tuple[StepRunner, StepRunner]:
            runner = StepRunner(job, records, recording.first_batch.dense.shape[1], clock=clock)
            return runner, runner

        self.engine = TrainerEngine(
            job,
            welcome,
            ours,
            RingEnds(
                recording.fetch_buffer,
                recording.back_buffer,
                device,
                page_locked=recording.is_pinned,
                mirrored=False,
            ),
            make_streams(device),
            make_model,
            self.results,
            self.counters,
        )
        self.records = self.engine.slots.records
        ours.on_message = self._crew.wake_after
        self.engine.sender.on_queued = partial(self._crew.wake_after, "to send")
        self.peer = Peer(theirs, recording.messages, job.lookahead.depth, RingReader(recording.back_buffer))

    def run(self, steps: int | None = None) -> list[float]:
        """Runs until `steps` steps of the run are done, or all, and begins no other. Seconds between the ends of
        successive steps."""
        self.peer.last = last = self.num_steps if steps is None else steps
        advances = [*self.engine.stages.values(), self.peer.advance]
        while len(self.peer.done_s) < last:
            for advance in advances:
                advance()
        return np.diff(self.peer.done_s).tolist()

    def in_threads(self) -> dict[str, float]:
        """Runs to the end with a thread a stage, as a trainer does. Seconds of the processor that each thread took; the
        loop's is the calling one."""
        self.peer.last = self.num_steps
        stages = {name: stage_on(self._device, own) for name, own in self.engine.stages.items() if name != LOOP}
        self._crew.start({**stages, "peer": self.peer.advance}, {}, WAKES, self.engine.looks_s)
        clocks = {LOOP: time.pthread_getcpuclockid(threading.get_ident())} | {
            thread.name: time.pthread_getcpuclockid(thread.ident)
            for thread in threading.enumerate()
            if thread.name in stages and thread.ident is not None
        }
        began = {name: time.clock_gettime(clock) for name, clock in clocks.items()}
        try:
            while len(self.peer.done_s) < self.num_steps:
                self._bell.hush()
                self._crew.check()
                if not self.engine.loop.advance():
                    self._bell.wait(POLL_S)  # what ends this loop rings no bell
            return {name: time.clock_gettime(clock) - began[name] for name, clock in clocks.items()}
        finally:
            self._crew.stop()
