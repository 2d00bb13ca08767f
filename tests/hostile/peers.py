"""A peer that is honest until it says one wrong thing: a run in one process over a link that changes one message.

The rings are mirrors, so payloads travel with their messages and can be changed too; their checksums are recomputed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from rowcast.job.tables import group_specs
from rowcast.protocol.conversation import Link
from rowcast.protocol.messages import AnyMessage, RingRef
from rowcast.protocol.plan_layout import ITEM_BYTES, ArraySpec
from rowcast.protocol.session import PREFETCHER, decode
from rowcast.protocol.transport.ring import Payload
from rowcast.runtime.arrays import Bytes
from rowcast.runtime.run_directory import Role
from tests.support.batches import Bags, slots_for, small_batches, small_job
from tests.support.driver import InProcessRun, Past, Settings
from tests.support.inproc_link import InprocLink, inproc_pair

# (message, its payload, which may be changed) -> what goes, or None: not here
Lie = Callable[[AnyMessage, Bytes], AnyMessage | None]


@dataclass(slots=True)
class HostileEnd:
    """A `Link` around one end of a pair: tells its `lie` once, at the first fitting message after `good` of those."""

    link: InprocLink
    lie: Lie
    good: int = 0
    mutate: Callable[[bytes], bytes] = bytes
    told: int = field(default=0, init=False)
    refused: int = field(default=0, init=False)  # as a link counts them

    def send(self, frame: bytes, payload: memoryview | None = None) -> None:
        if self.told:
            self.link.send(frame, payload)
            return
        content: Bytes = np.frombuffer(payload or b"", np.uint8).copy()
        envelope = decode(frame)
        said = self.lie(envelope.message, content)
        if said is not None and self.good:
            self.good, said = self.good - 1, None
        if said is None:
            self.link.send(frame, payload)
            return
        self.told += 1
        told = msgspec.msgpack.encode(msgspec.structs.replace(envelope, message=with_checksum(said, content)))
        self.link.send(self.mutate(told), content.data if len(content) else None)

    def receive(self) -> tuple[bytes, Payload] | None:
        return self.link.receive()

    def close(self) -> None:
        self.link.close()


def with_checksum(message: AnyMessage, content: Bytes) -> AnyMessage:
    ref = getattr(message, "payload", None)
    if not isinstance(ref, RingRef):
        return message
    return msgspec.structs.replace(
        message, payload=msgspec.structs.replace(ref, checksum=xxhash.xxh3_64_intdigest(content.data))
    )


@dataclass(slots=True)
class HostileRun:
    """One run in which the prefetcher or the trainer lies."""

    liar: Role
    lie: Lie
    good: int = 0
    mutate: Callable[[bytes], bytes] = bytes  # changes the frame that is told
    end: HostileEnd | None = field(default=None, init=False)

    def links(self) -> tuple[Link, Link]:
        first, second = inproc_pair()
        if self.liar == PREFETCHER:
            self.end = HostileEnd(first, self.lie, self.good, self.mutate)
            return self.end, second
        self.end = HostileEnd(second, self.lie, self.good, self.mutate)
        return first, self.end

    def run(self, *, seed: int = 0, bags: Bags = "single", past: Past | None = None) -> None:
        job = small_job("adagrad", bags)
        batches = small_batches(job, bags)
        slots = slots_for(group_specs(job), batches, "more")
        settings = Settings(slots=slots, seed=seed, seeded_streams=bool(seed % 2), mirrored=True, links=self.links)
        InProcessRun(job, batches, settings, past).run()

    @property
    def told(self) -> bool:
        return self.end is not None and self.end.told > 0


def array_of(message: AnyMessage, content: Bytes, name: str) -> npt.NDArray[Any] | None:
    """A view of one array in a plan's or barrier's payload; None where it has none, or an empty one."""
    steps = getattr(message, "steps", ())
    specs: tuple[ArraySpec, ...] = steps[0].arrays if steps else getattr(message, "arrays", None) or ()
    if not isinstance(specs, tuple):
        return None
    spec = next((spec for spec in specs if spec.name == name), None)
    if spec is None or not spec.shape[0]:
        return None
    own = content[spec.offset : spec.offset + ITEM_BYTES[spec.dtype] * math.prod(spec.shape)]
    return own.view(spec.dtype)
