"""Wires the trainer's stages to each other and to one conversation, without threads, sockets or clocks."""

from collections.abc import Callable
from dataclasses import replace

import torch

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import Bye, EndOfData, Flush, Released, Restore, StepReady, StopRequest, Welcome
from rowcast.protocol.parts import UNDIVIDED, Rank
from rowcast.runtime.stages import Stage, Wakes
from rowcast.trainer.device.host_memory import FetchRing, RingEnds
from rowcast.trainer.device.phases import PhaseClock, phase_clock
from rowcast.trainer.device.streams import Streams, memory_for, peak_device_bytes
from rowcast.trainer.step.barrier import ModelState, Results, TrainerBarrier, TrainingState
from rowcast.trainer.step.cache import DeviceCache
from rowcast.trainer.step.loop import Steps, TrainingLoop
from rowcast.trainer.step.metrics import TrainerCounters, TrainerGauges
from rowcast.trainer.step.plan_check import PlanCheck
from rowcast.trainer.step.sender import Sender
from rowcast.trainer.step.slots import Slots

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


# from the records of each group, f32 [slots, record_floats], and the clock of the steps' stream. No steps: a training
# script computes them
MakeModel = Callable[[list[torch.Tensor], PhaseClock], tuple[ModelState, Steps | None]]


class TrainerEngine:
    """One thread advances each of `stages` and the main thread the loop; or one thread advances all, in any order."""

    def __init__(
        self,
        job: Job,
        welcome: Welcome,
        conversation: Conversation,
        rings: RingEnds,
        streams: Streams,
        make_model: MakeModel,
        results: Results,
        counters: TrainerCounters,
        rank: Rank = UNDIVIDED,
    ) -> None:
        """The caller closes the arguments. Raises ConfigError if device memory is short."""
        self.counters = counters
        self.conversation = conversation
        self.back_ring = rings.back
        self._device = streams.device
        is_tcp = rings.fetch.is_mirror
        if is_tcp:
            conversation.carry(rings.back, rings.fetch)
        self.slots = Slots(group_specs(job), welcome.slots, streams)
        groups, send = self.slots.groups, conversation.send
        clock = phase_clock(streams.compute, counters.lapped)
        with memory_for(f"no room for the model on {self._device} beside the cache", "make cache.capacity smaller"):
            model, steps = make_model(self.slots.records, clock)
        check = PlanCheck(
            groups,
            welcome.slots,
            welcome.inputs,
            welcome.first_train_step,
            welcome.staging_bytes,
            is_tcp=is_tcp,
            rank=rank,
        )
        training = TrainingState(
            model=model,
            results=results,
            job=job,
            train_steps=welcome.first_train_step,
        )
        self.sender = Sender(self.slots, welcome.staging_bytes, rings, counters, send)
        self.cache = DeviceCache(self.slots, self.sender, FetchRing(rings, send), welcome.depth, check, counters)
        self.barrier = TrainerBarrier(
            self.cache, training, check, resumes=welcome.restore_bytes > 0, sends_model_state=rank.number == 0
        )
        self.loop = TrainingLoop(self.cache, self.barrier, training, steps, welcome.depth, clock)
        self.stages: dict[str, Stage] = {
            "mail": conversation.advance,
            "loop": self.loop.advance,
            "sender": self.sender.advance,
        }
        conversation.listen(
            {
                StepReady: self.cache.accept,
                Released: lambda message: rings.back.release(message.position),
                Restore: self.barrier.accept_restore,
                Flush: self.barrier.accept_flush,
                EndOfData: self.barrier.accept_end,
            }
        )

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
