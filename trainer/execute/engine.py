"""The stages of the trainer, wired to each other and to one conversation. No thread, socket or clock lives here."""

from dataclasses import dataclass, field

import torch

from rowcast.job.tables import GroupSpec
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import Bye, EndOfData, Flush, Released, Restore, StepReady, Welcome
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.runtime.stages import Stage
from rowcast.trainer.execute.cache import DeviceCache
from rowcast.trainer.execute.host_memory import Direct, HostMemory
from rowcast.trainer.execute.loop import Results, Runner, TrainingLoop
from rowcast.trainer.execute.metrics import TrainerCounters
from rowcast.trainer.execute.phases import HostClock, PhaseClock
from rowcast.trainer.execute.plan_check import PlanCheck
from rowcast.trainer.execute.sender import Sender
from rowcast.trainer.execute.streams import Streams


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """What an engine is made of; whoever makes them owns and closes them."""

    groups: tuple[GroupSpec, ...]
    welcome: Welcome
    conversation: Conversation
    fetch_ring: RingReader
    back_ring: RingWriter
    streams: Streams
    records: list[torch.Tensor]  # f32 [slots, record_floats] a group, on the device
    runner: Runner
    results: Results
    counters: TrainerCounters
    clock: PhaseClock = field(default_factory=HostClock)  # the runner's
    fetch_memory: HostMemory = field(default_factory=Direct)  # of either ring
    back_memory: HostMemory = field(default_factory=Direct)


class TrainerEngine:
    """`stages` are advanced by one thread each (the loop by the main thread), or all by one thread in any order."""

    def __init__(self, parts: EngineParts) -> None:
        self.counters = parts.counters
        self.conversation = parts.conversation
        self.back_ring = parts.back_ring
        send, depth = parts.conversation.send, parts.welcome.depth
        self.sender = Sender(parts.streams, parts.back_ring, parts.back_memory, self.counters, send)
        self.cache = DeviceCache(
            groups=parts.groups,
            records=parts.records,
            depth=depth,
            streams=parts.streams,
            ring=parts.fetch_ring,
            memory=parts.fetch_memory,
            staging_bytes=parts.welcome.staging_bytes,
            sender=self.sender,
            counters=self.counters,
            check=PlanCheck(
                parts.groups,
                parts.welcome.slots,
                parts.welcome.num_dense,
                parts.welcome.first_train_step,
                parts.welcome.staging_bytes,
                is_tcp=parts.fetch_ring.is_mirror,
            ),
            send=send,
        )
        self.loop = TrainingLoop(
            depth=depth,
            cache=self.cache,
            sender=self.sender,
            streams=parts.streams,
            runner=parts.runner,
            counters=self.counters,
            clock=parts.clock,
            results=parts.results,
            ring=parts.fetch_ring,
            restore_bytes=parts.welcome.restore_bytes,
            first_train_step=parts.welcome.first_train_step,
            send=send,
        )
        parts.conversation.listen(
            {
                StepReady: self.cache.accept,
                Released: lambda message: parts.back_ring.release(message.position),
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
