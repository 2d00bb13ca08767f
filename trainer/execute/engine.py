"""The stages of the trainer, wired to each other and to one conversation. No thread, socket or clock lives here."""

from dataclasses import dataclass, field

import torch

from rowcast.job.tables import GroupSpec
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import Bye, EndOfData, Flush, Released, Restore, StepReady, Welcome
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.runtime.stages import Stage
from rowcast.trainer.execute.cache import DeviceCache
from rowcast.trainer.execute.host_memory import Bytes, HostMemory, host_memory
from rowcast.trainer.execute.loop import ModelState, Results, Steps, TrainingLoop
from rowcast.trainer.execute.metrics import TrainerCounters
from rowcast.trainer.execute.phases import HostClock, PhaseClock
from rowcast.trainer.execute.plan_check import PlanCheck
from rowcast.trainer.execute.sender import Sender
from rowcast.trainer.execute.streams import Streams


@dataclass(frozen=True, kw_only=True, slots=True)
class RingEnds:
    """The trainer's ends of both rings, and how their bytes reach the copies."""

    fetch: RingReader
    back: RingWriter
    fetch_memory: HostMemory
    back_memory: HostMemory


def ring_ends(fetch: Bytes, back: Bytes, device: torch.device, *, pinned: bool, mirrored: bool) -> RingEnds:
    """`pinned`: the buffers are page-locked. `mirrored`: the prefetcher has its ends in memory of its own."""
    return RingEnds(
        fetch=RingReader(fetch, mirror=mirrored),
        back=RingWriter(back, always_checksum=mirrored),
        fetch_memory=host_memory(fetch, device, pinned=pinned),
        back_memory=host_memory(back, device, pinned=pinned),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """What an engine is made of; whoever makes them owns and closes them."""

    groups: tuple[GroupSpec, ...]
    welcome: Welcome
    conversation: Conversation
    rings: RingEnds
    streams: Streams
    records: list[torch.Tensor]  # f32 [slots, record_floats] a group, on the device
    model: ModelState
    steps: Steps | None  # None: a training script computes them
    results: Results
    counters: TrainerCounters
    clock: PhaseClock = field(default_factory=HostClock)  # of the steps


class TrainerEngine:
    """`stages` are advanced by one thread each (the loop by the main thread), or all by one thread in any order."""

    def __init__(self, parts: EngineParts) -> None:
        self.counters = parts.counters
        self.conversation = parts.conversation
        rings, self.back_ring = parts.rings, parts.rings.back
        if rings.fetch.is_mirror:
            parts.conversation.carry(rings.back, rings.fetch)
        send, depth = parts.conversation.send, parts.welcome.depth
        self.sender = Sender(parts.streams, rings.back, rings.back_memory, self.counters, send)
        self.cache = DeviceCache(
            groups=parts.groups,
            records=parts.records,
            depth=depth,
            streams=parts.streams,
            ring=rings.fetch,
            memory=rings.fetch_memory,
            staging_bytes=parts.welcome.staging_bytes,
            sender=self.sender,
            counters=self.counters,
            check=PlanCheck(
                parts.groups,
                parts.welcome.slots,
                parts.welcome.num_dense,
                parts.welcome.first_train_step,
                parts.welcome.staging_bytes,
                is_tcp=rings.fetch.is_mirror,
            ),
            send=send,
        )
        self.loop = TrainingLoop(
            depth=depth,
            cache=self.cache,
            sender=self.sender,
            streams=parts.streams,
            model=parts.model,
            steps=parts.steps,
            counters=self.counters,
            clock=parts.clock,
            results=parts.results,
            ring=rings.fetch,
            restore_bytes=parts.welcome.restore_bytes,
            first_train_step=parts.welcome.first_train_step,
            send=send,
        )
        parts.conversation.listen(
            {
                StepReady: self.cache.accept,
                Released: lambda message: rings.back.release(message.position),
                Restore: self.loop.accept_restore,
                Flush: self.loop.accept_flush,
                EndOfData: self.loop.accept_end,
            }
        )

    @property
    def stages(self) -> dict[str, Stage]:
        return {"mail": self.conversation, "loop": self.loop, "sender": self.sender}

    @property
    def finished(self) -> bool:
        return self.loop.finished

    def say_bye(self) -> None:
        self.conversation.send(Bye())
