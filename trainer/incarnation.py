"""One incarnation of a run on the trainer's side: from the greeting to the last good-bye, or to the loss of its prefetcher.

It has a conversation, rings, a model and a cold cache of its own. Opens in one order, closes in the reverse, whatever happens in between.
"""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from protocol.conversation import Conversation
from protocol.errors import ConfigError
from protocol.faults import crash_point
from protocol.job import Job, Transport
from protocol.messages import PROTOCOL_VERSION, Bye, Hello, Mode, StopRequest, Welcome
from protocol.process import STOPPING, Crew, Signals, tell_peer
from protocol.session import Session, check_welcome
from protocol.stages import IDLE_WAIT_S, Stage
from protocol.tables import GroupSpec
from protocol.telemetry.build import versions
from protocol.telemetry.health import Health
from protocol.telemetry.logs import get_logger
from protocol.telemetry.timeline import traced_stages
from protocol.transport.ring import RingReader, RingWriter
from protocol.transport.ring_file import RingFile, RingMemory, attach_ring
from protocol.transport.zmq_link import ZmqLink
from protocol.watch import PeerWatch, Progress
from trainer.board import Board
from trainer.engine import EngineParts, TrainerEngine
from trainer.history import History
from trainer.metrics import TrainerCounters, TrainerGauges
from trainer.observe import engine_gauges, stall_clocks
from trainer.pinning import pinned
from trainer.plan_check import check_welcome_fits
from trainer.report import Report, RunFacts, make_report, write_report
from trainer.results import EvaluationOnly, ResultFiles
from trainer.run_report.page import write_page
from trainer.run_report.record import RunRecord
from trainer.runner import EvaluationRunner, StepRunner
from trainer.streams import make_streams, peak_device_bytes
from trainer.terminal import Progress as ProgressLine
from trainer.terminal import print_summary

GREETING_GRACE_S = 0.5  # after a stop, for a Welcome that may be on its way: a prefetcher that has sent one expects a trainer
RUNNERS: dict[Mode, type[StepRunner]] = {"train": StepRunner, "eval": EvaluationRunner}
REPORTS: dict[Mode, str] = {"train": "report.json", "eval": "eval.json"}
PAGE = "report.html"
DEVICE_POLL_S = 0.0002  # between looks at events of a device, which rings no bell


@dataclass(slots=True)
class Beginnings:
    """When the run began, by the performance counter: its first incarnation's times stay."""

    met_s: float | None = None  # the first prefetcher
    step_s: float | None = None  # the first step


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParts:
    """What all incarnations of a run share."""

    job: Job
    groups: tuple[GroupSpec, ...]
    mode: Mode
    fresh: bool
    device: torch.device
    threads: int
    tensorboard: Path | None  # folder for event files
    signals: Signals
    health: Health
    counters: TrainerCounters
    history: History
    began: Beginnings


class Incarnation:
    def __init__(self, run: RunParts, transport: Transport, crew: Crew) -> None:
        """`transport`: the job's, with the time-out that this incarnation waits for a prefetcher."""
        self._run = run
        self._job = run.job
        self._transport = transport
        self._crew = crew
        self._bell = run.signals.bell
        self._log = get_logger()
        self._engine: TrainerEngine | None = None
        self._welcome: Welcome | None = None
        self._left = threading.Event()  # the prefetcher has said good-bye
        self._results = EvaluationOnly(run.job.run_dir) if run.mode == "eval" else ResultFiles(run.job.run_dir)

    def live(self) -> None:
        """Returns when the run is finished or was stopped in order. Raises the first error of any stage, PeerLost among them."""
        with ExitStack() as stack:
            link = ZmqLink.trainer(self._job.run_dir, on_receive=self._bell.ring, transport=self._transport)
            stack.callback(link.close)
            link.start()
            conversation = Conversation(Session("trainer"), link)
            try:
                self._converse(stack, conversation, link)
            except BaseException as error:
                tell_peer(conversation, error)
                raise

    def gauges(self) -> TrainerGauges:
        evaluation, welcome = self._results.evaluation_result, self._welcome
        idle = TrainerGauges(
            train_step=self._results.train_steps,
            expected_train_steps=welcome.train_steps if welcome else None,
            auc=evaluation.auc if evaluation else None,
            logloss=evaluation.logloss if evaluation else None,
            accuracy=evaluation.accuracy if evaluation else None,
        )
        return idle if self._engine is None else engine_gauges(idle, self._engine)

    # until the two have met

    def _converse(self, stack: ExitStack, conversation: Conversation, link: ZmqLink) -> None:
        arrived: list[Welcome] = []
        conversation.listen({Welcome: arrived.append, Bye: lambda message: self._left.set()})
        watch = PeerWatch("prefetcher", conversation, link, self._transport, self._progress, lambda: bool(arrived))
        conversation.send(self._hello())
        crash_point("Hello sent")
        self._run.health.state = "connecting"
        self._log.info("waiting for the prefetcher", run_dir=str(self._job.run_dir.resolve()))
        if self._await_welcome(arrived, conversation, watch):
            check_welcome_fits(arrived[0], self._job, self._run.groups)
            self._accept(arrived[0])
            self._train(stack, conversation, watch, arrived[0])

    def _await_welcome(self, arrived: list[Welcome], conversation: Conversation, watch: PeerWatch) -> bool:
        """Waits for the Welcome; False where either process was stopped before it came."""
        give_up_s: float | None = None
        while not arrived:
            if self._left.is_set():
                self._log.info("the prefetcher was stopped before the run had begun")
                return False
            now_s = time.monotonic()
            if self._run.signals.stop_reason is not None:
                give_up_s = give_up_s or now_s + GREETING_GRACE_S
            if give_up_s is not None and now_s > give_up_s:
                return False
            seen = self._bell.rings
            watch.advance()
            if not conversation.advance():
                self._bell.wait(seen)
        return True

    def _hello(self) -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            job_digest=self._job.session_digest(),
            rank=0,
            world_size=1,
            pid=os.getpid(),
            threads=self._run.threads,
            device=str(self._run.device),
            mode=self._run.mode,
        )

    def _accept(self, welcome: Welcome) -> None:
        """Raises where this process cannot be the prefetcher's trainer."""
        check_welcome(welcome)
        path = self._job.run_dir / REPORTS["train"]
        if self._run.mode == "eval":
            return
        if path.exists() and not self._run.fresh and not welcome.restore_bytes:
            raise ConfigError(f"the run in {self._job.run_dir} has a report; add --fresh to start over, or set another job.run_dir")
        for earlier in (path, self._job.run_dir / PAGE):
            earlier.unlink(missing_ok=True)  # of an earlier run, given up by --fresh, or of this one, before it was stopped

    # training

    def _train(self, stack: ExitStack, conversation: Conversation, watch: PeerWatch, welcome: Welcome) -> None:
        run = self._run
        stack.enter_context(self._results)
        self._welcome = welcome
        rings = self._attach_rings(stack, welcome)
        self._crew.start({"watch": watch}, {})  # the prefetcher must hear of this process also while its model is built
        stack.callback(self._crew.stop)
        are_pinned = stack.enter_context(pinned([ring.buffer for ring in rings], run.device))
        engine = self._engine = self._make_engine(conversation, welcome, rings)
        crash_point("model built")
        self._crew.start(self._stages(engine, welcome), stall_clocks(engine))
        stack.callback(self._crew.stop)  # once more: before the rings are unpinned
        run.health.state = "running"
        run.began.met_s = run.began.met_s or time.perf_counter()
        progress = stack.enter_context(ProgressLine(run.counters, welcome.train_steps, first_step=welcome.first_train_step))
        board = stack.enter_context(Board(run.tensorboard, self._results, welcome.first_train_step))
        run.history.begin(welcome.first_train_step, board.marked)
        self._results.listeners = [progress.evaluation, board.evaluation]
        self._loop(engine, progress)
        progress.close()
        run.history.close(engine.loop.first_step_s)
        board.close()
        report = self._report(engine, welcome, are_pinned=are_pinned)
        self._results.close()  # before the good-bye, behind which the run counts as complete
        crash_point("report not written")
        write_report(self._job.run_dir / REPORTS[run.mode], report)
        if run.mode == "train":
            write_page(self._job.run_dir / PAGE, self._record(report))
        self._crew.stop()  # nothing may follow the good-bye, no heartbeat either
        crash_point("Bye not sent")
        engine.say_bye()
        crash_point("Bye sent")
        run.health.state = "stopped"
        page = self._job.run_dir / PAGE
        print_summary(report, page=page if run.mode == "train" and page.exists() else None)

    def _attach_rings(self, stack: ExitStack, welcome: Welcome) -> list[RingFile | RingMemory]:
        rings = [attach_ring(self._job.transport, spec) for spec in (welcome.fetch_ring, welcome.back_ring)]
        for ring in rings:
            stack.callback(ring.close)
            if ring.path:
                Path(ring.path).unlink(missing_ok=True)  # both sides have it now: from here on a kill leaves nothing behind
        return rings

    def _make_engine(self, conversation: Conversation, welcome: Welcome, rings: list[RingFile | RingMemory]) -> TrainerEngine:
        run, is_tcp = self._run, self._job.transport.is_tcp
        records = make_records(welcome.slots, run.groups, run.device)
        spent = run.counters.spent if run.device.type == "cpu" else run.counters.issued
        fetch_ring = RingReader(rings[0].buffer, mirror=is_tcp)
        back_ring = RingWriter(rings[1].buffer, always_checksum=is_tcp)
        if is_tcp:
            conversation.carry(back_ring, fetch_ring)
        return TrainerEngine(
            EngineParts(
                groups=run.groups,
                welcome=welcome,
                conversation=conversation,
                fetch_ring=fetch_ring,
                back_ring=back_ring,
                max_payload=back_ring.max_payload,
                streams=make_streams(run.device),
                records=records,
                runner=RUNNERS[run.mode](self._job, run.groups, records, welcome.num_dense, spent),
                results=self._results,
                counters=run.counters,
            )
        )

    def _stages(self, engine: TrainerEngine, welcome: Welcome) -> dict[str, Stage]:
        """Those with a thread of their own; the mail keeps no clock, and is put on the timeline, where one is recorded."""
        timeline = self._run.counters.timeline
        if timeline is not None:
            timeline.incarnation(welcome.incarnation)
            timeline.watch("back ring", "bytes", lambda: engine.back_ring.used_bytes)
        return traced_stages(timeline, {"mail": engine.conversation, "sender": engine.sender}, mail="deliver")

    def _loop(self, engine: TrainerEngine, progress: ProgressLine) -> None:
        """The main loop: `advance` until the end of the data."""
        run, stopping = self._run, False
        while not engine.finished:
            seen = self._bell.rings
            self._crew.check()
            if run.signals.stop_reason is not None and not stopping:
                stopping = True
                run.health.state = "stopping"
                self._log.info(STOPPING, reason=run.signals.stop_reason)
                engine.conversation.send(StopRequest(reason=f"{run.signals.stop_reason} to the trainer"))
            progress.update()
            run.began.step_s = run.began.step_s or engine.loop.first_step_s
            run.history.update(engine.loop.first_step_s)
            if engine.loop.advance():
                self._bell.ring()
                continue
            began_s = time.perf_counter()
            self._bell.wait(seen, IDLE_WAIT_S if run.device.type == "cpu" else DEVICE_POLL_S)
            engine.loop.idled(time.perf_counter() - began_s)

    def _progress(self) -> Progress:
        engine = self._engine
        if engine is None:
            return Progress(step_begun=None, step_done=None, work=0, waiting_for="its model to be built", ended=False)
        loop = engine.loop
        return Progress(
            step_begun=loop.step_begun,
            step_done=loop.step_done,
            work=engine.counters.total("rows_written_back"),
            waiting_for=loop.waiting_for,
            ended=loop.end is not None,
        )

    # what the run has to show

    def _report(self, engine: TrainerEngine, welcome: Welcome, *, are_pinned: bool) -> Report:
        run, end, now_s = self._run, engine.loop.end, time.perf_counter()
        assert end is not None, "the loop ends with EndOfData"
        assert run.began.met_s is not None, "the loop begins with a prefetcher"
        first_step_s = run.began.step_s or engine.loop.first_step_s or now_s
        return make_report(
            run.counters,
            RunFacts(
                wall_s=now_s - first_step_s,
                startup_s=first_step_s - run.began.met_s,
                train_steps=welcome.first_train_step if run.mode == "eval" else self._results.train_steps,
                loss=self._results.mean_loss,
                evaluation=self._results.evaluation_result,
                cache_bytes=sum(records.nbytes for records in engine.cache.records),
                device_bytes=peak_device_bytes(run.device, engine.cache.device_bytes),
                host_bytes=end.host_bytes,
                threads=run.threads,
                pinned=are_pinned,
                device=str(run.device),
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
            marks=self._run.history.marks,
            starts=self._run.history.starts,
            ended_at=datetime.now(UTC),
        )


def make_records(slots: Sequence[int], groups: Sequence[GroupSpec], device: torch.device) -> list[torch.Tensor]:
    """The cache: f32 [slots, record_floats] a group. Raises ConfigError where the device has not the memory."""
    try:
        return [torch.zeros(rows, group.record_floats, device=device) for rows, group in zip(slots, groups, strict=True)]
    except RuntimeError as error:
        nbytes = sum(rows * group.record_bytes for rows, group in zip(slots, groups, strict=True))
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"cache.capacity: no room for {nbytes} bytes of slots on {device} ({first_line}); make it smaller") from None
