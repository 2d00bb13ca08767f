"""Sends the trainer's Hello and waits for the prefetcher's Welcome."""

import os
import time
from collections.abc import Callable

import torch

from rowcast.job.schema import Job
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import PROTOCOL_VERSION, Hello, Mode, Welcome
from rowcast.protocol.parts import Rank
from rowcast.protocol.peer_watch import PeerWatch
from rowcast.runtime.machine import Machine
from rowcast.runtime.stages import IDLE_WAIT_S, Doorbell
from rowcast.runtime.telemetry.logs import said_if_slow

# after a stop, the wait for a Welcome in flight: a prefetcher that has sent one expects a trainer
GREETING_GRACE_S = 0.5

WORTH_SAYING_S = 2.0
PREPARING = (
    "no prefetcher is ready yet; it reads the first batches, and its first start compiles the planner: about 15 s"
)


def hello(job: Job, rank: Rank, mode: Mode, machine: Machine, device: torch.device) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        job_digest=job.session_digest(),
        rank=rank.number,
        world_size=rank.count,
        pid=os.getpid(),
        machine=machine,
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
    """Waits until `arrived` holds the Welcome; returns None if either process was stopped before. Raises PeerLost."""
    give_up_s: float | None = None
    while not arrived:
        if left():
            return None
        now_s = time.monotonic()
        if given_up():
            give_up_s = give_up_s or now_s + GREETING_GRACE_S
        if give_up_s is not None and now_s > give_up_s:
            return None
        watch.advance()
        if not conversation.advance():
            bell.wait(IDLE_WAIT_S)
        bell.hush()
    return arrived[0]
