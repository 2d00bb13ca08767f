"""Connects the trainer to its prefetcher, from the handshake to the good-bye.

    TrainerAttempt   trains the job's model, for `trainer run`
    ScriptProcess    lends the engine to a training script

    meet       link, conversation, Hello ... Welcome
    start      rings, page-locking, records, engine, threads
    drive      the caller's loop over the engine, woken by the threads
    say_bye    after it the run counts as complete

Closing undoes these in reverse order. `step/engine.py` is the part of `start` without threads and sockets; the GPU
check's replay and the tests use it directly.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import torch

from rowcast.job.schema import Job, Transport
from rowcast.job.tables import group_specs
from rowcast.job.units import parse_seconds
from rowcast.protocol.attempts import check_welcome
from rowcast.protocol.conversation import Conversation, PeerWatch, ProcessProgress, tell_peer
from rowcast.protocol.messages import PROTOCOL_VERSION, Bye, Hello, Mode, StopRequest, Welcome
from rowcast.protocol.parts import UNDIVIDED, Rank
from rowcast.protocol.session import Session
from rowcast.protocol.transport.ring_file import RingFile, RingMemory, attach_ring
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.machine import Machine
from rowcast.runtime.run_directory import PeerStart, failure_since, has_started, pair_folder
from rowcast.runtime.stages import IDLE_WAIT_S, Crew, Doorbell
from rowcast.runtime.telemetry.logs import get_logger, said_if_slow
from rowcast.runtime.telemetry.metrics import Health
from rowcast.runtime.telemetry.timeline import recorded_stages
from rowcast.trainer.device.cuda import RingEnds, page_locked, release_memory
from rowcast.trainer.device.streams import Streams, stage_on
from rowcast.trainer.step.barrier import Results
from rowcast.trainer.step.engine import WAKES, MakeModel, TrainerEngine, check_welcome_fits, placed
from rowcast.trainer.step.metrics import TrainerCounters

# how long to wait for a Welcome in flight after a stop: a prefetcher that has sent one expects a trainer
GREETING_GRACE_S = 0.5

MODEL = "its model to be built"
WORTH_SAYING_S = 2.0
PREPARING = (
    "no prefetcher is ready yet; it reads the first batches, which may still arrive with data.follow, and its first "
    "start compiles the planner: about 15 s"
)


class PrefetcherConnection:
    """A context manager for one thread. It sends an error that leaves the context to the prefetcher."""

    def __init__(
        self,
        job: Job,
        transport: Transport,
        crew: Crew,
        health: Health,
        counters: TrainerCounters,
        device: torch.device,
        rank: Rank = UNDIVIDED,
    ) -> None:
        """`transport`: the job's, with the time-out of this attempt. `crew`: is stopped with the connection."""
        self.stack = ExitStack()  # closed with the connection, after sending an error to the prefetcher
        self.conversation: Conversation | None = None
        self.welcome: Welcome | None = None
        self.engine: TrainerEngine | None = None
        self.asked_to_stop: str | None = None  # the reason, if the prefetcher of any rank got a stop request
        self.waits_for = MODEL  # before the engine is there
        # changes this process's progress before it is reported
        self.adjust_progress: Callable[[ProcessProgress], ProcessProgress] = lambda progress: progress
        self.job, self.groups, self._rank = job, group_specs(job), rank  # placed as the Welcome says
        self._folder = pair_folder(job.run_dir, rank.number, rank.count)
        self._transport, self._crew, self._health = transport, crew, health
        self._counters, self._device = counters, device
        self.left = threading.Event()  # set once the prefetcher has
        self._watch: PeerWatch | None = None

    def _progress(self) -> ProcessProgress:
        if self.engine is not None:
            return self.engine.loop.progress()
        return ProcessProgress(step_begun=None, step_done=None, work=0, waiting_for=self.waits_for, ended=False)

    def meet(
        self,
        machine: Machine,
        mode: Mode,
        given_up: Callable[[], bool],
        began_s: float | None,
        gone: Callable[[], bool] = lambda: False,
    ) -> Welcome | None:
        """Waits for the prefetcher. Returns None if it has left or is `gone`, or if this process has `given_up`.

        A failure noted by the prefetcher after `began_s` ends the wait; with None, no failure does. Raises PeerLost,
        the prefetcher's failure, or an error if this process cannot be its trainer."""
        arrived = list[Welcome]()
        link = ZmqLink.of(
            "trainer", self._folder, on_receive=partial(self._crew.wake, "mail"), transport=self._transport
        )
        self.stack.callback(link.close)
        link.start()
        conversation = self.conversation = Conversation(Session("trainer"), link)
        conversation.on_message = self._crew.wake_after
        conversation.listen(
            {Welcome: arrived.append, Bye: lambda message: self.left.set(), StopRequest: self._note_stop}
        )
        watch = self._watch = PeerWatch(
            "prefetcher",
            conversation,
            link,
            self._transport,
            lambda: self.adjust_progress(self._progress()),
            lambda: bool(arrived),
            lambda: None if began_s is None else failure_since(self._folder, "prefetcher", began_s),
            PeerStart(self._folder, "prefetcher", parse_seconds(self._transport.stall_timeout)).goes_on,
        )
        conversation.send(hello(self.job, self._rank, mode, machine, self._device))
        has_started(self._folder, "trainer")
        crash_point("Hello sent")
        self._health.state = "connecting"
        get_logger().info("waiting for the prefetcher", run_dir=str(self._folder.resolve()))
        welcome = await_welcome(
            arrived, conversation, watch, self._crew.bell, given_up, lambda: self.left.is_set() or gone()
        )
        if welcome is not None:
            self.job = placed(self.job, welcome.placements)
            self.groups = group_specs(self.job)
            self._counters.place(self.groups)
            self._counters.pools(self.groups, self._rank)
            check_welcome_fits(welcome, self.job, self.groups)
            check_welcome(welcome, self._rank.number)
            self.welcome = welcome
        return welcome

    def attend(self) -> None:
        """Sends heartbeats between `meet` and `start`. Messages wait for the engine. Raises PeerLost."""
        assert self._watch is not None, "attend comes after meet"
        if self.welcome is not None:
            self._watch.advance()

    def _note_stop(self, message: StopRequest) -> None:
        self.asked_to_stop = message.reason

    def start(
        self,
        make_streams: Callable[[torch.device], Streams],
        make_model: MakeModel,
        results: Results,
    ) -> TrainerEngine:
        welcome, conversation = self.welcome, self.conversation
        assert conversation is not None, "start comes after meet"
        assert welcome is not None, "start comes after meet"
        assert self._watch is not None, "start comes after meet"
        rings = self._attach_rings(welcome)
        # from here on: the prefetcher must receive heartbeats while the model is built
        self._crew.start({"watch": self._watch.advance}, {})
        self.stack.callback(self._crew.stop)
        buffers = rings[0].buffer, rings[1].buffer
        is_locked = self.stack.enter_context(page_locked(buffers, self._device))
        release_memory(self._device)  # an earlier attempt's cache: the device may not hold two
        engine = self.engine = TrainerEngine(
            self.job,
            welcome,
            conversation,
            RingEnds(*buffers, self._device, page_locked=is_locked, mirrored=self.job.transport.is_tcp),
            make_streams(self._device),
            make_model,
            results,
            self._counters,
            self._rank,
        )
        crash_point("model built")
        self._start_threads(engine, welcome)
        return engine

    def _attach_rings(self, welcome: Welcome) -> list[RingFile | RingMemory]:
        rings = [attach_ring(self.job.transport, spec) for spec in (welcome.fetch_ring, welcome.back_ring)]
        for ring in rings:
            self.stack.callback(ring.close)
            if ring.path:
                # both processes have mapped it: a kill from here on leaves no file
                Path(ring.path).unlink(missing_ok=True)
        return rings

    def _start_threads(self, engine: TrainerEngine, welcome: Welcome) -> None:
        timeline = self._counters.timeline
        if timeline is not None:
            timeline.incarnation(welcome.incarnation)
            back_ring = engine.back_ring  # the timeline outlives the engine
            timeline.watch("back ring", "bytes", lambda: back_ring.used_bytes)
        stages = {"mail": engine.stages["mail"], "sender": stage_on(self._device, engine.stages["sender"])}
        engine.sender.on_queued = partial(self._crew.wake_after, "to send")
        # the mail thread counts no idle seconds
        self._crew.start(recorded_stages(timeline, stages, mail="deliver"), engine.stall_clocks, WAKES, engine.looks_s)
        self.stack.callback(self._crew.stop)  # a second time, so that it runs before the rings are unlocked

    def drive(self, advance: Callable[[], bool], until: Callable[[], bool]) -> None:
        """Calls `advance` until `until` returns True, and waits whenever `advance` did nothing.

        Raises the first error of any thread."""
        engine, crew, bell = self.engine, self._crew, self._crew.bell
        assert engine is not None, "start has made an engine"
        while True:
            bell.hush()
            if until():
                return
            crew.check()
            if advance():
                continue
            began_s = time.perf_counter()
            bell.wait(engine.loop.look_s)
            engine.loop.idled(time.perf_counter() - began_s)

    def say_bye(self) -> None:
        assert self.engine is not None, "start has made an engine"
        self._crew.stop()  # no message may follow the good-bye, not even a heartbeat
        crash_point("Bye not sent")
        self.engine.say_bye()
        crash_point("Bye sent")
        self._health.state = "stopped"

    def send_failure(self, error: BaseException) -> None:
        """Sends `error` to the prefetcher, which then ends with the same sentence and exit code."""
        if self.conversation is not None:
            tell_peer(self.conversation, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.send_failure(error)
        try:
            self.stack.close()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Drops all references to the engine, to free its cache and staging on the device."""
        if self.conversation is not None:
            self.conversation.close()
        self.engine = self.conversation = self._watch = None


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
