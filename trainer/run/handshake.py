"""Meeting the prefetcher, for whoever drives an engine: the greeting, the rings, the engine, and what the peer hears of its progress.

    Incarnation      trains the job's model, from `trainer run`
    adopt.Session    lends the engine to a training script that is not ours

Nothing here has a thread or keeps anything; what is opened goes onto the caller's ExitStack.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from rowcast.job.schema import Job, Transport
from rowcast.job.tables import GroupSpec
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import PROTOCOL_VERSION, Hello, Mode, Welcome
from rowcast.protocol.peer_watch import PeerWatch, Progress
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.protocol.transport.ring_file import RingFile, RingMemory, attach_ring
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.stages import Doorbell
from rowcast.runtime.telemetry.logs import said_if_slow
from rowcast.trainer.execute.engine import EngineParts, TrainerEngine
from rowcast.trainer.execute.host_memory import host_memory
from rowcast.trainer.execute.loop import Results, Runner
from rowcast.trainer.execute.metrics import TrainerCounters
from rowcast.trainer.execute.phases import HostClock, PhaseClock
from rowcast.trainer.execute.streams import Streams

# after a stop, for a Welcome that may be on its way: a prefetcher that has sent one expects a trainer
GREETING_GRACE_S = 0.5

WORTH_SAYING_S = 2.0
PREPARING = (
    "no prefetcher is ready yet; it reads the first batches, and its first start compiles the planner: about 15 s"
)


def hello(job: Job, mode: Mode, threads: int, device: torch.device) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        job_digest=job.session_digest(),
        rank=0,
        world_size=1,
        pid=os.getpid(),
        threads=threads,
        device=str(device),
        mode=mode,
    )


@said_if_slow(WORTH_SAYING_S, PREPARING)
def await_welcome(
    arrived: list[Welcome],
    conversation: Conversation,
    watch: PeerWatch,
    bell: Doorbell,
    given_up: Callable[[], bool],
    left: Callable[[], bool],
) -> Welcome | None:
    """Waits until the Welcome is in `arrived`; None where either process was stopped before it came. Raises PeerLost."""
    give_up_s: float | None = None
    while not arrived:
        if left():
            return None
        now_s = time.monotonic()
        if given_up():
            give_up_s = give_up_s or now_s + GREETING_GRACE_S
        if give_up_s is not None and now_s > give_up_s:
            return None
        seen = bell.rings
        watch.advance()
        if not conversation.advance():
            bell.wait(seen)
    return arrived[0]


def attach_rings(stack: ExitStack, transport: Transport, welcome: Welcome) -> list[RingFile | RingMemory]:
    rings = [attach_ring(transport, spec) for spec in (welcome.fetch_ring, welcome.back_ring)]
    for ring in rings:
        stack.callback(ring.close)
        if ring.path:
            Path(ring.path).unlink(missing_ok=True)  # both sides have it now: from here on a kill leaves nothing behind
    return rings


def make_engine(
    job: Job,
    groups: tuple[GroupSpec, ...],
    conversation: Conversation,
    welcome: Welcome,
    rings: list[RingFile | RingMemory],
    *,
    pinned: bool,
    streams: Streams,
    records: list[torch.Tensor],
    runner: Runner,
    results: Results,
    counters: TrainerCounters,
    clock: PhaseClock | None = None,
) -> TrainerEngine:
    """`pinned`: whether the rings are locked in memory. `clock`: the runner's, where it has one."""
    fetch_memory, back_memory = (host_memory(ring.buffer, streams.device, pinned=pinned) for ring in rings)
    is_tcp = job.transport.is_tcp
    fetch_ring = RingReader(rings[0].buffer, mirror=is_tcp)
    back_ring = RingWriter(rings[1].buffer, always_checksum=is_tcp)
    if is_tcp:
        conversation.carry(back_ring, fetch_ring)
    return TrainerEngine(
        EngineParts(
            groups=groups,
            welcome=welcome,
            conversation=conversation,
            fetch_ring=fetch_ring,
            back_ring=back_ring,
            streams=streams,
            records=records,
            runner=runner,
            results=results,
            counters=counters,
            clock=clock or HostClock(),
            fetch_memory=fetch_memory,
            back_memory=back_memory,
        )
    )


def make_records(slots: Sequence[int], groups: Sequence[GroupSpec], device: torch.device) -> list[torch.Tensor]:
    """The cache: f32 [slots, record_floats] a group. Raises ConfigError where the device has not the memory."""
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


def progress_of(engine: TrainerEngine | None) -> Progress:
    """`engine` None: there is none yet."""
    if engine is None:
        return Progress(step_begun=None, step_done=None, work=0, waiting_for="its model to be built", ended=False)
    loop = engine.loop
    return Progress(
        step_begun=loop.step_begun,
        step_done=loop.step_done,
        work=engine.counters.total("rows_written_back"),
        waiting_for=loop.waiting_for,
        ended=engine.barrier.end is not None,
    )
