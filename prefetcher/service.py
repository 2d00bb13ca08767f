"""`prefetcher run`: everything around the engine. Opens in one order, closes in the reverse, whatever happens in between."""

import os
import secrets
import statistics
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from prefetcher.checkpoint import RunCheckpointer
from prefetcher.engine import EngineParts, PrefetcherEngine
from prefetcher.fetcher import PlannedStep
from prefetcher.metrics import PrefetcherCollector, PrefetcherGauges, Queue, SlotStates
from prefetcher.pins import load_pins
from prefetcher.planner.capacity import MEASURED_BATCHES, job_slots, measure
from prefetcher.planner.job_planner import job_planner
from prefetcher.planner.planner import RowPlanner
from prefetcher.readers.schedule import PlacedBatch
from prefetcher.readers.worker import BatchSource
from prefetcher.stores.memory import MemoryStore
from prefetcher.warmup import warm_up
from protocol.batch import ScheduledBatch
from protocol.conversation import Conversation
from protocol.errors import ConfigError
from protocol.job import MIN_RING_BYTES, Job
from protocol.messages import PROTOCOL_VERSION, Bye, RingSpec, Welcome
from protocol.process import STOPPING, Crew, Signals, tell_peer
from protocol.rundir import RunDirectory
from protocol.session import Session
from protocol.tables import GroupSpec, group_specs
from protocol.telemetry.build import build_info
from protocol.telemetry.counters import new_registry
from protocol.telemetry.logs import get_logger
from protocol.telemetry.server import Health, TelemetryServer
from protocol.transport.ring import RingReader, RingWriter
from protocol.transport.ring_file import RingFile, free_shared_memory, remove_leftovers
from protocol.transport.zmq_link import ZmqLink
from protocol.watch import PeerWatch, Progress

AUTO_RING_BYTES = 64 * 2**20
MOST_THREADS = 8


class PrefetcherRun:
    """One run, from the lock on its directory to the last good-bye."""

    def __init__(self, job: Job, max_steps: int | None, signals: Signals, save_trace: Path | None = None) -> None:
        self._job = job
        self._save_trace = save_trace
        self._signals = signals
        self._groups = group_specs(job)
        self._log = get_logger()
        self._bell = signals.bell
        self._crew = Crew("prefetcher", self._bell)
        self._health = Health(dead_stage=self._crew.dead_stage)
        self._source = BatchSource(job, max_steps, on_arrival=self._bell.ring)
        self._engine: PrefetcherEngine | None = None
        self._directory = RunDirectory(job.run_dir, "prefetcher")

    def run(self, *, fresh: bool) -> None:
        """Returns when the run is finished or was stopped in order. Raises the first error of any stage."""
        with ExitStack() as stack:
            directory = stack.enter_context(self._directory)
            if not fresh:
                directory.refuse_used()
            remove_leftovers()
            incarnation = 1 + secrets.randbelow(2**31)  # so that a frame of an earlier run is known as such
            link = ZmqLink.prefetcher(self._job.run_dir, on_receive=self._bell.ring)
            stack.callback(link.close)
            link.start()
            conversation = Conversation(Session("prefetcher", incarnation), link)
            stack.callback(self._source.close)
            try:
                self._converse(stack, conversation, link)
                self._crew.stop()  # nothing may follow the good-bye, no heartbeat either
                if not self._connected() or self._finished():
                    conversation.send(Bye())
            except BaseException as error:
                self._health.state = "failed"
                tell_peer(conversation, error)
                raise

    def _converse(self, stack: ExitStack, conversation: Conversation, link: ZmqLink) -> None:
        """From the first batches to the last good-bye. A trainer that has come meanwhile hears that it is not in vain."""
        watch = PeerWatch("trainer", conversation, link, self._job.transport, self._progress, self._connected)
        self._crew.start({"watch": watch}, {})
        stack.callback(self._crew.stop)
        self._source.start()
        measured = self._measure()
        if self._signals.stop_reason is None:
            self._serve(stack, conversation, measured)

    def _progress(self) -> Progress:
        batches, engine = self._source.counters.batches, self._engine
        if engine is None:
            return Progress(step_begun=None, step_done=None, work=batches, waiting_for="the first batches", ended=False, ready=False)
        return Progress(
            step_begun=engine.fetcher.sent_through,
            step_done=engine.fetcher.done_through,
            work=batches + engine.counters.total("rows_written_back") + engine.checkpointer.num_files,
            waiting_for=engine.waiting_for,
            ended=engine.peer_left,
        )

    def _connected(self) -> bool:
        return self._engine is not None and self._engine.hello is not None

    def _finished(self) -> bool:
        return self._engine is not None and self._engine.finished

    def _measure(self) -> list[PlacedBatch]:
        """The first batches, as they come from the worker."""
        warm_up()  # while the child starts
        measured: list[PlacedBatch] = []
        while len(measured) < MEASURED_BATCHES and not self._source.ended and self._signals.stop_reason is None:
            seen = self._bell.rings
            self._crew.check()
            batch = self._source.poll()
            if batch is None:
                self._bell.wait(seen)
            else:
                measured.append(batch)
        return measured

    def _serve(self, stack: ExitStack, conversation: Conversation, measured: list[PlacedBatch]) -> None:
        """Everything that the engine needs, then the engine."""
        slots = job_slots(self._job, self._groups, measured)
        stores = tuple(MemoryStore(group, self._job.job.seed) for group in self._groups)
        for store in stores:
            stack.callback(store.close)
        ring_bytes = self._job.transport.ring_bytes or automatic_ring_bytes(self._groups, measured, self._job.lookahead.depth)
        check_shared_memory(ring_bytes)
        rings = [stack.enter_context(RingFile.create(ring_bytes, name)) for name in ("fetch", "back")]
        welcome = self._welcome(conversation.session.incarnation, slots, rings)
        engine = PrefetcherEngine(
            EngineParts(
                job=self._job,
                groups=self._groups,
                source=self._source,
                planner=self._planner(slots, measured),
                measured=measured,
                stores=stores,
                conversation=conversation,
                fetch_ring=RingWriter(rings[0].buffer),
                back_ring=RingReader(rings[1].buffer),
                checkpointer=RunCheckpointer(self._job, self._groups, stores, welcome.run_id, self._training_digest()),
                welcome=welcome,
            )
        )
        self._run_stages(stack, engine)

    def _planner(self, slots: tuple[int, ...], measured: list[PlacedBatch]) -> RowPlanner:
        pin, threads = self._job.cache.pin, self._job.prefetcher.threads
        return job_planner(
            self._job,
            self._groups,
            slots,
            measured,
            pinned=None if pin is None else load_pins(Path(pin), self._groups),
            num_threads=automatic_threads() if threads == "auto" else threads,
            keep_ids=self._save_trace is not None,
        )

    def _welcome(self, incarnation: int, slots: tuple[int, ...], rings: Sequence[RingFile]) -> Welcome:
        info, lookahead = self._source.info(), self._job.lookahead
        if lookahead.horizon != "auto" and lookahead.horizon < lookahead.depth:
            self._log.warning("the horizon was raised to the depth", horizon=lookahead.horizon, depth=lookahead.depth)
        fetch_ring, back_ring = (RingSpec(path=ring.path, nbytes=ring.nbytes) for ring in rings)
        self._log.info(
            "ready",
            run_dir=str(self._job.run_dir.resolve()),
            slots=" ".join(f"{group.name}={n}" for group, n in zip(self._groups, slots, strict=True)),
            depth=lookahead.depth,
            horizon=lookahead.horizon,
            policy=self._job.cache.policy,
            ring_bytes=fetch_ring.nbytes,
        )
        return Welcome(
            protocol_version=PROTOCOL_VERSION,
            run_id=uuid.uuid4().hex[:12],
            incarnation=incarnation,
            pid=os.getpid(),
            slots=slots,
            num_dense=info.num_dense,
            depth=lookahead.depth,
            fetch_ring=fetch_ring,
            back_ring=back_ring,
            train_steps=info.expected_train_steps,
        )

    def _run_stages(self, stack: ExitStack, engine: PrefetcherEngine) -> None:
        """Serves metrics, waits for the trainer, and runs the stages until the run is over."""
        collector = PrefetcherCollector(engine.counters, gauges(engine, self._source), build_info("prefetcher", self._job.job.name))
        server = TelemetryServer("prefetcher", self._job.metrics.prefetcher, new_registry(collector), self._health)
        stack.enter_context(server)
        self._log.info("serving metrics", address=server.address)
        self._health.state = "connecting"
        self._directory.remove(["checkpoints"])  # of an earlier run, given up by --fresh: only now is everything else known to be right
        self._engine = engine
        finish_trace = self._trace(stack, engine)
        self._crew.start(engine.stages, stall_clocks(engine))
        stack.callback(self._crew.stop)  # once more: before the rings and stores are closed
        self._until_finished(engine)
        finish_trace()
        self._health.state = "stopped"
        self._say_end(engine)

    def _trace(self, stack: ExitStack, engine: PrefetcherEngine) -> Callable[[], None]:
        """Has the plans saved, where that is asked for; what it returns is called when the run is over."""
        if self._save_trace is None:
            return lambda: None
        from prefetcher.analysis.trace.header import trace_header
        from prefetcher.analysis.trace.trace import TraceWriter

        header = trace_header(self._job, self._groups, engine.welcome.slots)
        writer = stack.enter_context(TraceWriter(self._save_trace, header))
        before = engine.planning.on_plan

        def on_plan(planned: PlannedStep) -> None:
            before(planned)
            writer.add(planned.batch, planned.plan)

        def finish() -> None:
            if engine.finished:
                flushed = tuple(group.rows_flushed for group in engine.counters.groups.values())
                writer.finish(flushed, finished=engine.fetcher.finished)

        engine.planning.on_plan = on_plan
        return finish

    def _say_end(self, engine: PrefetcherEngine) -> None:
        reason, steps = self._signals.stop_reason, engine.counters.train_steps
        if not engine.finished:
            self._log.info("stopped before a trainer came; nothing was trained", reason=reason)
        elif engine.fetcher.finished:
            self._log.info("finished", train_steps=steps, invalid_ids=self._source.counters.invalid_ids)
        else:
            self._log.info("stopped in order", train_steps=steps, reason=engine.planning.stop_reason)

    def _until_finished(self, engine: PrefetcherEngine) -> None:
        stopping = False
        while not engine.finished:
            seen = self._bell.rings
            self._crew.check()
            if engine.hello is not None and self._health.state == "connecting":
                self._health.state = "running"
                self._log.info("trainer connected", pid=engine.hello.pid, device=engine.hello.device)
            if self._signals.stop_reason is not None and not stopping:
                if engine.hello is None:
                    return
                stopping = True
                self._health.state = "stopping"
                self._log.info(STOPPING, reason=self._signals.stop_reason)
                engine.planning.stop(f"{self._signals.stop_reason} to the prefetcher")
            self._bell.wait(seen, 1.0)

    def _training_digest(self) -> str:
        return self._job.training_digest(self._source.info().file_sizes)


def automatic_threads() -> int:
    """For the planner: a quarter of the cores that this process may use; the rest is for reading, moving rows, and the trainer."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 4))


def automatic_ring_bytes(groups: Sequence[GroupSpec], measured: Sequence[ScheduledBatch], depth: int) -> int:
    """max(64 MiB, (depth + 1) x the rows of a typical batch), at most a quarter of what is free in shared memory."""
    typical = statistics.median([touched_bytes(groups, batch) for batch in measured]) if measured else 0
    wanted = max(AUTO_RING_BYTES, int((depth + 1) * typical))
    allowed = free_shared_memory() // 4
    if allowed < MIN_RING_BYTES:
        raise ConfigError(
            f"/dev/shm has {4 * allowed} bytes free, and two rings need at least {8 * MIN_RING_BYTES}; enlarge it or free space in it"
        )
    return min(wanted, allowed) // 4096 * 4096


def check_shared_memory(ring_bytes: int) -> None:
    """Raises ConfigError where the two rings do not both fit, before anything is allocated."""
    free = free_shared_memory()
    if 2 * ring_bytes > free:
        raise ConfigError(
            f"two rings of {ring_bytes} bytes need {2 * ring_bytes} bytes of /dev/shm, where {free} are free; "
            f"make transport.ring smaller or enlarge /dev/shm"
        )


def touched_bytes(groups: Sequence[GroupSpec], batch: ScheduledBatch) -> int:
    rows = measure(tuple(groups), [batch]).largest_batch_rows
    return sum(n * group.record_bytes for n, group in zip(rows, groups, strict=True))


def stall_clocks(engine: PrefetcherEngine) -> dict[str, Callable[[float], None]]:
    """Where the idle seconds of each stage's thread are counted."""
    counters = engine.counters

    def planning(seconds: float) -> None:
        if engine.planning.waits_for_batches:
            counters.stalled("batches", seconds)
            counters.blocked("batches", "consumer", seconds)
        elif engine.planning.waits_for_credit:
            counters.blocked("plans", "producer", seconds)

    def fetcher(seconds: float) -> None:
        reason = engine.fetcher.stalled_by
        if reason is None or engine.hello is None:
            return
        counters.stalled(reason, seconds)
        if reason == "plans":
            counters.blocked("plans", "consumer", seconds)
        elif reason in ("credit", "ring"):
            counters.blocked("pieces", "producer", seconds)

    def write_back(seconds: float) -> None:
        if not engine.writeback.queued:
            counters.blocked("rows_back", "consumer", seconds)

    return {"planning": planning, "fetcher": fetcher, "write-back": write_back}


def gauges(engine: PrefetcherEngine, source: BatchSource) -> PrefetcherGauges:
    depths: dict[Queue, Callable[[], int]] = {
        "batches": lambda: source.counters.queue_depth,
        "plans": lambda: engine.fetcher.queued,
        "pieces": lambda: engine.fetcher.reading,
        "rows_back": lambda: engine.writeback.queued,
    }
    return PrefetcherGauges(
        queue_depth=lambda queue: depths[queue](),
        ring_used_bytes=lambda: engine.fetch_ring.used_bytes,
        ring_size_bytes=engine.welcome.fetch_ring.nbytes,
        depth=engine.welcome.depth,
        in_flight_steps=lambda: steps_between(engine.fetcher.done_through, engine.fetcher.sent_through),
        horizon=lambda: engine.planner.horizon,
        known_batches=lambda: engine.planner.num_known,
        slots=lambda: [
            SlotStates(free=g.num_free, clean=g.num_resident - g.num_dirty, dirty=g.num_dirty) for g in engine.planner.occupancy
        ],
        write_back_lag_steps=lambda: steps_between(engine.writeback.applied_through, engine.fetcher.done_through),
    )


def steps_between(older: int | None, newer: int | None) -> int:
    """Steps after `older` up to `newer`; steps count from 0."""
    return max(0, (-1 if newer is None else newer) - (-1 if older is None else older))


def run_prefetcher(job: Job, max_steps: int | None, signals: Signals, *, fresh: bool, save_trace: Path | None = None) -> None:
    PrefetcherRun(job, max_steps, signals, save_trace).run(fresh=fresh)
