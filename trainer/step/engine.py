"""Wires the trainer's stages to each other and to one conversation, without threads, sockets or clocks."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from rowcast.job.tables import GroupSpec
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import Bye, EndOfData, Flush, Released, Restore, StepReady, StopRequest, Welcome
from rowcast.protocol.parts import UNDIVIDED, Rank
from rowcast.runtime.stages import FunctionStage, Stage, Wakes
from rowcast.trainer.device.host_memory import FetchRing, RingEnds
from rowcast.trainer.device.phases import HostClock, PhaseClock
from rowcast.trainer.device.streams import Streams, peak_device_bytes
from rowcast.trainer.step.barrier import TrainerBarrier
from rowcast.trainer.step.cache import DeviceCache
from rowcast.trainer.step.loop import ModelState, Results, Steps, TrainingLoop, TrainingState
from rowcast.trainer.step.metrics import TrainerCounters, TrainerGauges
from rowcast.trainer.step.plan_check import PlanCheck
from rowcast.trainer.step.results import EvaluationFigures
from rowcast.trainer.step.sender import Sender
from rowcast.trainer.step.slots import EvictStaging, Slots

# a message, or a turn of a thread -> the threads that it may unblock; no other thread waits for it
WAKES: Wakes = {
    StepReady: ("main",),
    Restore: ("main",),
    Flush: ("main",),
    EndOfData: ("main",),
    StopRequest: ("main",),
    Released: ("sender",),  # room in the back ring
    "main": ("sender",),  # victims to send, a step to report, the model state
    "sender": ("main",),  # room in evict staging
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParts:
    """Everything that an engine is built from. The caller closes these."""

    groups: tuple[GroupSpec, ...]
    welcome: Welcome
    conversation: Conversation
    rings: RingEnds
    streams: Streams
    records: list[torch.Tensor]  # f32 [slots, record_floats] per group, on the device
    model: ModelState
    steps: Steps | None  # None: a training script computes the steps
    results: Results
    counters: TrainerCounters
    clock: PhaseClock = field(default_factory=HostClock)  # times the phases of each step
    rank: Rank = UNDIVIDED
    figures: EvaluationFigures


class TrainerEngine:
    """One thread advances each of `stages` and the main thread the loop; or one thread advances all, in any order."""

    def __init__(self, parts: TrainerParts) -> None:
        self.counters = parts.counters
        self.conversation = parts.conversation
        rings, self.back_ring = parts.rings, parts.rings.back
        if rings.fetch.is_mirror:
            parts.conversation.carry(rings.back, rings.fetch)
        welcome, send = parts.welcome, parts.conversation.send
        check = PlanCheck(
            parts.groups,
            welcome.slots,
            welcome.inputs,
            welcome.first_train_step,
            welcome.staging_bytes,
            is_tcp=rings.fetch.is_mirror,
            rank=parts.rank,
        )
        fetch_ring = FetchRing(rings, send)
        training = TrainingState(
            model=parts.model,
            steps=parts.steps,
            results=parts.results,
            train_steps=welcome.first_train_step,
            figures=parts.figures,
        )
        self._device = parts.streams.device
        self.slots = Slots(parts.groups, parts.records, parts.streams)
        self.sender = Sender(parts.streams, rings.back, rings.back_memory, self.counters, send)
        evict_staging = EvictStaging(self.slots, welcome.staging_bytes, self.sender)
        self.cache = DeviceCache(
            slots=self.slots,
            evict_staging=evict_staging,
            ring=fetch_ring,
            depth=welcome.depth,
            check=check,
            counters=self.counters,
        )
        self.barrier = TrainerBarrier(
            cache=self.cache,
            slots=self.slots,
            evict_staging=evict_staging,
            sender=self.sender,
            fetch_ring=fetch_ring,
            back_ring=rings.back,
            dense=training,
            check=check,
            counters=self.counters,
            send=send,
            resumes=welcome.restore_bytes > 0,
            sends_model_state=parts.rank.number == 0,
        )
        self.loop = TrainingLoop(
            cache=self.cache,
            barrier=self.barrier,
            sender=self.sender,
            streams=parts.streams,
            training=training,
            depth=welcome.depth,
            counters=self.counters,
            clock=parts.clock,
        )
        self.stages: dict[str, Stage] = {
            "mail": self.conversation,
            "loop": self.loop,
            "sender": FunctionStage(self._send),
        }
        parts.conversation.listen(
            {
                StepReady: self.cache.accept,
                Released: lambda message: rings.back.release(message.position),
                Restore: self.barrier.accept_restore,
                Flush: self.barrier.accept_flush,
                EndOfData: self.barrier.accept_end,
            }
        )

    def _send(self) -> bool:
        """Runs on the sender's thread: sends victims home and reports their step; after a barrier's rows, the model
        state."""
        copied = self.sender.copy_out_next()
        sent = self.sender.send_copied()
        reported = self.sender.report_finished()
        saved = self.barrier.send_dense()
        return copied or sent or reported or saved

    @property
    def polls(self) -> dict[str, Callable[[], bool]]:
        """By thread, whether it waits for an event of the device, which rings no bell."""
        return {"sender": lambda: self.sender.awaits_device}

    @property
    def stall_clocks(self) -> dict[str, Callable[[float], None]]:
        """By thread, what counts its idle seconds; the main loop counts its own."""
        return {"sender": self.sender.idled}

    def gauges(self, idle: TrainerGauges) -> TrainerGauges:
        return replace(
            idle,
            queue_depths={"steps": self.cache.steps_waiting, "rows_back": self.sender.queued},
            ring_used_bytes=self.back_ring.used_bytes,
            ring_size_bytes=self.back_ring.capacity,
            frames_refused=self.conversation.frames_refused,
        )

    @property
    def finished(self) -> bool:
        return self.loop.finished

    @property
    def device_bytes(self) -> int:
        """The peak memory of the device; on the CPU only of cache, staging and plans: the rest belongs to the
        process."""
        return peak_device_bytes(
            self._device, self.slots.cache_bytes + self.cache.staging_bytes + self.cache.plans_bytes
        )

    def say_bye(self) -> None:
        self.conversation.send(Bye())
