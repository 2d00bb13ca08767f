"""Connects the prefetcher to its trainer: link, rings, threads, and the good-bye.

    open        link and conversation
    watch       heartbeats, from before the first batches are read
    open_rings  once the first batches give their size
    start       the threads of the engine, which greets the trainer
    drive       until the run has finished, was stopped, or no trainer will connect
    say_bye

`stack` undoes these in the reverse order. The trainer's half is `trainer/run/connection.py`.
"""

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rowcast.job.schema import Transport
from rowcast.job.units import parse_seconds
from rowcast.prefetcher.pipeline.engine import WAKES, PrefetcherEngine
from rowcast.prefetcher.run.sizing import check_shared_memory
from rowcast.protocol.conversation import Conversation, PeerWatch, ProcessProgress, tell_peer
from rowcast.protocol.messages import Bye, RingSpec
from rowcast.protocol.session import Session
from rowcast.protocol.transport.ring import RingReader, RingWriter
from rowcast.protocol.transport.ring_file import RingFile, RingMemory, create_ring
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.process import STOPPING, Signals
from rowcast.runtime.run_directory import PeerStart, failure_since, has_started
from rowcast.runtime.stages import IDLE_WAIT_S, Crew, Stage
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.metrics import Health
from rowcast.runtime.telemetry.timeline import Timeline, recorded_stages

NOT_READY = ProcessProgress(
    step_begun=None, step_done=None, work=0, waiting_for="the first batches", ended=False, ready=False
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rings:
    """The prefetcher's ends, and the description that the trainer attaches to."""

    fetch: RingWriter
    back: RingReader
    specs: tuple[RingSpec, RingSpec]


class TrainerConnection:
    def __init__(
        self,
        folder: Path,
        transport: Transport,
        crew: Crew,
        signals: Signals,
        health: Health,
        timeline: Timeline | None,
    ) -> None:
        """`folder`: of this pair of processes. `transport`: the job's, with this attempt's connect time-out. `crew`: is
        stopped with the connection."""
        self.stack = ExitStack()  # the opener of the connection enters it
        self.incarnation = 1 + secrets.randbelow(2**31)  # random, so that frames of an earlier attempt are recognized
        self.engine: PrefetcherEngine | None = None
        self._folder, self._transport, self._crew = folder, transport, crew
        self._signals, self._health, self._timeline = signals, health, timeline
        self._link = ZmqLink.of("prefetcher", folder, on_receive=partial(crew.wake, "mail"), transport=transport)
        self.conversation = Conversation(Session("prefetcher", self.incarnation), self._link)
        self.conversation.on_message = crew.wake_after

    @property
    def met(self) -> bool:
        """Whether a trainer has connected."""
        return self.engine is not None and self.engine.hello is not None

    def open(self) -> None:
        """Raises ConfigError if another prefetcher serves the folder."""
        self.stack.callback(self._link.close)
        self._link.start()

    def watch(self, work: Callable[[], int]) -> None:
        """Answers a trainer that connects, and ends the attempt after a trainer's failure. `work` grows with all
        progress except rows written back."""
        watch = PeerWatch(
            "trainer",
            self.conversation,
            self._link,
            self._transport,
            lambda: NOT_READY if self.engine is None else self.engine.progress(work()),
            lambda: self.engine is not None and self.engine.hello is not None,
            lambda: failure_since(self._folder, "trainer", self._signals.began_s),
            PeerStart(self._folder, "trainer", parse_seconds(self._transport.stall_timeout)).goes_on,
        )
        self._crew.start({"watch": watch.advance}, {})
        has_started(self._folder, "prefetcher")
        self.stack.callback(self._crew.stop)

    def open_rings(self, nbytes: int) -> Rings:
        """Raises ConfigError if there is no room for them."""
        transport = self._transport
        if not transport.is_tcp:
            check_shared_memory(nbytes)
        rings = list[RingFile | RingMemory]()
        for name in ("fetch", "back"):
            rings.append(create_ring(transport, nbytes, name))
            self.stack.callback(rings[-1].close)
        fetch = RingWriter(rings[0].buffer, always_checksum=transport.is_tcp)
        back = RingReader(rings[1].buffer, mirror=transport.is_tcp)
        if transport.is_tcp:
            self.conversation.carry(fetch, back)
        fetch_spec, back_spec = (RingSpec(path=ring.path, nbytes=ring.nbytes) for ring in rings)
        return Rings(fetch=fetch, back=back, specs=(fetch_spec, back_spec))

    def start(self, engine: PrefetcherEngine, others: dict[str, Stage]) -> None:
        """Gives a thread to each stage of the engine and to each of `others`."""
        timeline = self._timeline
        self._health.state = "connecting"
        self.engine = engine
        if timeline is not None:
            timeline.incarnation(engine.welcome.incarnation)
            timeline.watch("fetch ring", "bytes", lambda: engine.fetch_ring.used_bytes)
        # stages without a separate clock
        stages = recorded_stages(
            timeline, {**engine.stages, **others}, mail="deliver", staging="stage", checkpoint="write"
        )
        engine.wake_after = self._crew.wake_after
        self._crew.start(stages, engine.stall_clocks(), WAKES, engine.looks_s)
        self.stack.callback(self._crew.stop)  # again, before the rings and stores are closed

    def drive(self, engine: PrefetcherEngine, on_training: Callable[[], None], is_over: Callable[[], bool]) -> None:
        """Runs until the end. `is_over`: whether the run has ended, so that no trainer will connect. Raises the first
        error of any thread."""
        stopping, signals, health, log = False, self._signals, self._health, get_logger()
        while True:
            signals.bell.hush()
            if engine.finished or (engine.hello is None and is_over()):
                return
            self._crew.check()
            if engine.hello is not None and health.state == "connecting":
                crash_point("Welcome sent")
                health.state = "running"
                log.info("trainer connected", pid=engine.hello.pid, device=engine.hello.device)
                on_training()
            if signals.stop_reason is not None and not stopping:
                if engine.hello is None:
                    return
                stopping = True
                health.state = "stopping"
                log.info(STOPPING, reason=signals.stop_reason)
                engine.stop(f"{signals.stop_reason} to the prefetcher")
                self._crew.wake("planning")
            # the trainer's Bye may come just before the fetcher has ended the barrier, which rings no bell here
            signals.bell.wait(IDLE_WAIT_S if engine.peer_left else 1.0)

    def say_bye(self) -> None:
        self._crew.stop()  # no message may follow the good-bye, not even a heartbeat
        if self.engine is None or not self.met or self.engine.finished:
            self.conversation.send(Bye())

    def fail(self, error: BaseException) -> None:
        """Sends `error` to the trainer and disconnects: the clean-up may be slow, and the next trainer must not connect
        to an ended attempt."""
        tell_peer(self.conversation, error)
        self._crew.stop()
        self._link.close()
