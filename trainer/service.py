"""`trainer run`: everything around the engine. Opens in one order, closes in the reverse, whatever happens in between."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from protocol.conversation import Conversation
from protocol.cores import usable_cores
from protocol.errors import ConfigError, PeerLost
from protocol.faults import crash_point
from protocol.job import Job, Transport
from protocol.messages import PROTOCOL_VERSION, Bye, Hello, Mode, StopRequest, Welcome
from protocol.process import STOPPING, Crew, Patience, Signals, tell_peer
from protocol.rundir import RunDirectory
from protocol.session import Session, check_welcome
from protocol.stages import IDLE_WAIT_S, Stage
from protocol.tables import GroupSpec, group_specs
from protocol.telemetry.build import build_info, versions
from protocol.telemetry.counters import new_registry
from protocol.telemetry.health import Health
from protocol.telemetry.logs import get_logger
from protocol.telemetry.server import TelemetryServer
from protocol.telemetry.timeline import Timeline, traced_stages
from protocol.transport.ring import RingReader, RingWriter
from protocol.transport.ring_file import RingFile, RingMemory, attach_ring
from protocol.transport.zmq_link import ZmqLink
from protocol.watch import PeerWatch, Progress
from trainer.board import Board, check_board
from trainer.engine import EngineParts, TrainerEngine
from trainer.history import History
from trainer.metrics import TrainerCollector, TrainerCounters, TrainerGauges, new_counters
from trainer.optim import warm_up_sqrt
from trainer.pinning import pinned
from trainer.plan_check import check_welcome_fits
from trainer.report import Report, RunFacts, make_report, write_report
from trainer.results import EvaluationOnly, ResultFiles
from trainer.run_report.page import write_page
from trainer.run_report.record import RunRecord
from trainer.runner import EvaluationRunner, StepRunner
from trainer.streams import choose_device, make_streams, peak_device_bytes
from trainer.terminal import Progress as ProgressLine
from trainer.terminal import print_summary

GREETING_GRACE_S = 0.5  # after a stop, for a Welcome that may be on its way: a prefetcher that has sent one expects a trainer
RUNNERS: dict[Mode, type[StepRunner]] = {"train": StepRunner, "eval": EvaluationRunner}
REPORTS: dict[Mode, str] = {"train": "report.json", "eval": "eval.json"}
PAGE = "report.html"
DEVICE_POLL_S = 0.0002  # between looks at events of a device, which rings no bell


class TrainerRun:
    """One run, from the lock on its directory to the report: one incarnation after the other, where peers come and go."""

    def __init__(self, job: Job, signals: Signals, mode: Mode, tensorboard: Path | None = None) -> None:
        """`tensorboard`: the folder for event files; None for none."""
        self._job = job
        self._tensorboard = tensorboard
        self._signals = signals
        self._mode: Mode = mode
        self._groups = group_specs(job)
        self._log = get_logger()
        self._bell = signals.bell
        self._health = Health(dead_stage=lambda: self._crew.dead_stage())
        self._counters: TrainerCounters = new_counters(self._groups)
        self._history = History(self._counters)
        self._met_s: float | None = None  # the first prefetcher, by the performance counter
        self._first_step_s: float | None = None  # likewise
        self._begin_incarnation()

    def _begin_incarnation(self) -> None:
        self._crew = Crew("trainer", self._bell)
        self._engine: TrainerEngine | None = None
        self._back_ring: RingWriter | None = None
        self._welcome: Welcome | None = None
        self._left = threading.Event()  # the prefetcher has said good-bye
        self._results = EvaluationOnly(self._job.run_dir) if self._mode == "eval" else ResultFiles(self._job.run_dir)

    def run(self, *, fresh: bool, trace: bool) -> None:
        """Returns when the run is finished or was stopped in order. Raises the first error of any stage."""
        refuse_several_ranks(os.environ.get("WORLD_SIZE", "1"))
        if self._tensorboard is not None:
            check_board(self._tensorboard)
        device = self._choose_device()
        threads = set_threads(self._job.trainer.threads)
        with ExitStack() as stack:
            directory = stack.enter_context(RunDirectory(self._job.run_dir, "trainer"))
            if self._mode == "train" and not fresh:
                directory.refuse_complete()
            if trace:
                self._counters.timeline = stack.enter_context(Timeline(self._job.run_dir, "trainer"))
            self._serve_metrics(stack)
            try:
                self._live(device, threads, fresh=fresh)
            except BaseException:
                self._health.state = "failed"
                raise

    def _serve_metrics(self, stack: ExitStack) -> None:
        collector = TrainerCollector(self._counters, self._gauges, build_info("trainer", self._job.job.name), self._health)
        server = TelemetryServer("trainer", self._job.metrics, new_registry(collector), self._health)
        stack.enter_context(server)
        self._log.info("serving metrics", address=server.address)

    def _live(self, device: torch.device, threads: int, *, fresh: bool) -> None:
        patience = Patience("prefetcher", self._job.transport)
        while self._signals.stop_reason is None:
            try:
                self._incarnation(patience.transport, device, threads, fresh=fresh)
                break
            except PeerLost as error:
                patience.again(error)
                self._health.state = "connecting"
                if self._engine is not None:
                    self._first_step_s = self._first_step_s or self._engine.loop.first_step_s
                self._begin_incarnation()

    def _incarnation(self, transport: Transport, device: torch.device, threads: int, *, fresh: bool) -> None:
        with ExitStack() as stack:
            link = ZmqLink.trainer(self._job.run_dir, on_receive=self._bell.ring, transport=transport)
            stack.callback(link.close)
            link.start()
            self._converse(stack, Conversation(Session("trainer"), link), link, transport, device, threads, fresh=fresh)

    def _choose_device(self) -> torch.device:
        try:
            return choose_device(self._job.trainer.device)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _converse(
        self,
        stack: ExitStack,
        conversation: Conversation,
        link: ZmqLink,
        transport: Transport,
        device: torch.device,
        threads: int,
        *,
        fresh: bool,
    ) -> None:
        arrived: list[Welcome] = []
        conversation.listen({Welcome: arrived.append, Bye: lambda message: self._left.set()})
        watch = PeerWatch("prefetcher", conversation, link, transport, self._progress, lambda: bool(arrived))
        conversation.send(self._hello(device, threads))
        crash_point("Hello sent")
        self._health.state = "connecting"
        self._log.info("waiting for the prefetcher", run_dir=str(self._job.run_dir.resolve()))
        try:
            if self._await_welcome(arrived, conversation, watch):
                check_welcome_fits(arrived[0], self._job, self._groups)
                self._accept(arrived[0], fresh=fresh)
                self._train(stack, conversation, watch, arrived[0], device, threads)
        except BaseException as error:
            tell_peer(conversation, error)
            raise

    def _await_welcome(self, arrived: list[Welcome], conversation: Conversation, watch: PeerWatch) -> bool:
        """Waits for the Welcome; False where either process was stopped before it came."""
        give_up_s: float | None = None
        while not arrived:
            if self._left.is_set():
                self._log.info("the prefetcher was stopped before the run had begun")
                return False
            now_s = time.monotonic()
            if self._signals.stop_reason is not None:
                give_up_s = give_up_s or now_s + GREETING_GRACE_S
            if give_up_s is not None and now_s > give_up_s:
                return False
            seen = self._bell.rings
            watch.advance()
            if not conversation.advance():
                self._bell.wait(seen)
        return True

    def _hello(self, device: torch.device, threads: int) -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            job_digest=self._job.session_digest(),
            rank=0,
            world_size=1,
            pid=os.getpid(),
            threads=threads,
            device=str(device),
            mode=self._mode,
        )

    def _accept(self, welcome: Welcome, *, fresh: bool) -> None:
        """Raises where this process cannot be the prefetcher's trainer."""
        check_welcome(welcome)
        path = self._job.run_dir / "report.json"
        if self._mode == "eval":
            return
        if path.exists() and not fresh and not welcome.restore_bytes:
            raise ConfigError(f"the run in {self._job.run_dir} has a report; add --fresh to start over, or set another job.run_dir")
        for earlier in (path, self._job.run_dir / PAGE):
            earlier.unlink(missing_ok=True)  # of an earlier run, given up by --fresh, or of this one, before it was stopped

    def _train(
        self,
        stack: ExitStack,
        conversation: Conversation,
        watch: PeerWatch,
        welcome: Welcome,
        device: torch.device,
        threads: int,
    ) -> None:
        stack.enter_context(self._results)
        self._welcome = welcome
        rings = [attach_ring(self._job.transport, spec) for spec in (welcome.fetch_ring, welcome.back_ring)]
        for ring in rings:
            stack.callback(ring.close)
            if ring.path:
                Path(ring.path).unlink(missing_ok=True)  # both sides have it now: from here on a kill leaves nothing behind
        self._crew.start({"watch": watch}, {})  # the prefetcher must hear of this process also while its model is built
        stack.callback(self._crew.stop)
        are_pinned = stack.enter_context(pinned([ring.buffer for ring in rings], device))
        engine = self._make_engine(conversation, welcome, rings, device)
        crash_point("model built")
        self._crew.start(self._stages(engine, welcome), self._stall_clocks(engine))
        stack.callback(self._crew.stop)  # once more: before the rings are unpinned
        self._health.state = "running"
        self._met_s = self._met_s or time.perf_counter()
        progress = stack.enter_context(ProgressLine(self._counters, welcome.train_steps, first_step=welcome.first_train_step))
        board = stack.enter_context(Board(self._tensorboard, self._results, welcome.first_train_step))
        self._history.begin(welcome.first_train_step, board.marked)
        self._results.listeners = [progress.evaluation, board.evaluation]
        self._loop(engine, progress, device)
        progress.close()
        self._history.close(engine.loop.first_step_s)
        board.close()
        report = self._report(engine, welcome, threads, device, are_pinned=are_pinned)
        self._results.close()  # before the good-bye, behind which the run counts as complete
        crash_point("report not written")
        write_report(self._job.run_dir / REPORTS[self._mode], report)
        if self._mode == "train":
            write_page(self._job.run_dir / PAGE, self._record(report))
        self._crew.stop()  # nothing may follow the good-bye, no heartbeat either
        crash_point("Bye not sent")
        engine.say_bye()
        crash_point("Bye sent")
        self._health.state = "stopped"
        print_summary(report)

    def _make_engine(
        self, conversation: Conversation, welcome: Welcome, rings: list[RingFile | RingMemory], device: torch.device
    ) -> TrainerEngine:
        records = make_records(welcome.slots, self._groups, device)
        spent = self._counters.spent if device.type == "cpu" else self._counters.issued
        is_tcp = self._job.transport.is_tcp
        fetch_ring = RingReader(rings[0].buffer, mirror=is_tcp)
        self._back_ring = RingWriter(rings[1].buffer, always_checksum=is_tcp)
        if is_tcp:
            conversation.carry(self._back_ring, fetch_ring)
        self._engine = TrainerEngine(
            EngineParts(
                groups=self._groups,
                welcome=welcome,
                conversation=conversation,
                fetch_ring=fetch_ring,
                back_ring=self._back_ring,
                max_payload=self._back_ring.max_payload,
                streams=make_streams(device),
                records=records,
                runner=RUNNERS[self._mode](self._job, self._groups, records, welcome.num_dense, spent),
                results=self._results,
                counters=self._counters,
            )
        )
        return self._engine

    def _loop(self, engine: TrainerEngine, progress: ProgressLine, device: torch.device) -> None:
        """The main loop: `advance` until the end of the data."""
        stopping = False
        while not engine.finished:
            seen = self._bell.rings
            self._crew.check()
            if self._signals.stop_reason is not None and not stopping:
                stopping = True
                self._health.state = "stopping"
                self._log.info(STOPPING, reason=self._signals.stop_reason)
                engine.conversation.send(StopRequest(reason=f"{self._signals.stop_reason} to the trainer"))
            progress.update()
            self._history.update(engine.loop.first_step_s)
            if engine.loop.advance():
                self._bell.ring()
                continue
            began_s = time.perf_counter()
            self._bell.wait(seen, IDLE_WAIT_S if device.type == "cpu" else DEVICE_POLL_S)
            engine.loop.idled(time.perf_counter() - began_s)

    def _report(self, engine: TrainerEngine, welcome: Welcome, threads: int, device: torch.device, *, are_pinned: bool) -> Report:
        end = engine.loop.end
        assert end is not None, "the loop ends with EndOfData"
        assert self._met_s is not None, "the loop begins with a prefetcher"
        now_s = time.perf_counter()
        first_step_s = self._first_step_s or engine.loop.first_step_s or now_s
        return make_report(
            self._counters,
            RunFacts(
                wall_s=now_s - first_step_s,
                startup_s=first_step_s - self._met_s,
                train_steps=welcome.first_train_step if self._mode == "eval" else self._results.train_steps,
                loss=self._results.mean_loss,
                evaluation=self._results.evaluation_result,
                cache_bytes=sum(records.nbytes for records in engine.cache.records),
                device_bytes=peak_device_bytes(device, engine.cache.device_bytes),
                host_bytes=end.host_bytes,
                threads=threads,
                pinned=are_pinned,
                device=str(device),
                versions=versions("torch", "numpy"),
                pids={"prefetcher": welcome.pid, "trainer": os.getpid()},
                finished=end.finished,
                stopped_by=None if end.finished else engine.loop.stop_reason,
            ),
        )

    def _record(self, report: Report) -> RunRecord:
        return RunRecord(
            job=self._job,
            report=report,
            losses=self._results.losses_from(0),
            evaluations=self._results.evaluations,
            marks=self._history.marks,
            starts=self._history.starts,
            ended_at=datetime.now(UTC),
        )

    def _progress(self) -> Progress:
        engine = self._engine
        if engine is None:
            return Progress(step_begun=None, step_done=None, work=0, waiting_for="its model to be built", ended=False)
        loop = engine.loop
        return Progress(
            step_begun=loop.step_begun,
            step_done=loop.step_done,
            work=self._counters.total("rows_written_back"),
            waiting_for=loop.waiting_for,
            ended=loop.end is not None,
        )

    def _stages(self, engine: TrainerEngine, welcome: Welcome) -> dict[str, Stage]:
        """Those with a thread of their own; the mail keeps no clock, and is put on the timeline, where one is recorded."""
        timeline, ring = self._counters.timeline, self._back_ring
        if timeline is not None and ring is not None:
            timeline.incarnation(welcome.incarnation)
            timeline.watch("back ring", "bytes", lambda: ring.used_bytes)
        return traced_stages(timeline, {"mail": engine.conversation, "sender": engine.sender}, mail="deliver")

    def _stall_clocks(self, engine: TrainerEngine) -> dict[str, Callable[[float], None]]:
        counters = self._counters

        def sender(seconds: float) -> None:
            if engine.sender.waiting_for_ring:
                counters.stalled("ring", seconds)
            elif not engine.sender.queued:
                counters.blocked("rows_back", "consumer", seconds)

        return {"sender": sender}

    def _gauges(self) -> TrainerGauges:
        evaluation = self._results.evaluation_result
        gauges = TrainerGauges(
            train_step=self._results.train_steps,
            expected_train_steps=None if self._welcome is None else self._welcome.train_steps,
            auc=evaluation.auc if evaluation else None,
            logloss=evaluation.logloss if evaluation else None,
            accuracy=evaluation.accuracy if evaluation else None,
        )
        engine, ring = self._engine, self._back_ring
        if engine is None or ring is None:
            return gauges
        return replace(
            gauges,
            queue_depths={"steps": engine.cache.steps_waiting, "rows_back": engine.sender.queued},
            ring_used_bytes=ring.used_bytes,
            ring_size_bytes=ring.capacity,
            frames_refused=engine.conversation.frames_refused,
        )


def refuse_several_ranks(world_size: str) -> None:
    """`world_size`: what torchrun puts into the environment."""
    if world_size.strip() != "1":
        raise ConfigError(f"WORLD_SIZE = {world_size}, but training on several ranks is not supported yet; start one trainer alone")


def make_records(slots: Sequence[int], groups: Sequence[GroupSpec], device: torch.device) -> list[torch.Tensor]:
    """The cache: f32 [slots, record_floats] a group. Raises ConfigError where the device has not the memory."""
    try:
        return [torch.zeros(rows, group.record_floats, device=device) for rows, group in zip(slots, groups, strict=True)]
    except RuntimeError as error:
        nbytes = sum(rows * group.record_bytes for rows, group in zip(slots, groups, strict=True))
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"cache.capacity: no room for {nbytes} bytes of slots on {device} ({first_line}); make it smaller") from None


def set_threads(threads: int | str) -> int:
    """Threads of torch's operations; `auto` is one a core given to this process. Returns their number."""
    number = usable_cores() if isinstance(threads, str) else threads
    torch.set_num_threads(1)
    warm_up_sqrt()
    torch.set_num_threads(number)
    return number


def run_trainer(
    job: Job, signals: Signals, *, fresh: bool = False, trace: bool = False, mode: Mode = "train", tensorboard: Path | None = None
) -> None:
    TrainerRun(job, signals, mode, tensorboard).run(fresh=fresh, trace=trace)
