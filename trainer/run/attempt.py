"""One attempt of a run on the trainer's side: from the greeting to the last good-bye, or to the loss of its prefetcher.

It has a conversation, rings, a model and a cold cache of its own. Opens in one order, closes in the reverse, whatever happens in between.
"""

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from rowcast.job.schema import Job, Transport
from rowcast.job.tables import GroupSpec
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import Bye, Mode, StopRequest, Welcome
from rowcast.protocol.peer_watch import PeerWatch, tell_peer
from rowcast.protocol.session import Session, check_welcome
from rowcast.protocol.transport.ring_file import RingFile, RingMemory
from rowcast.protocol.transport.zmq_link import ZmqLink
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.process import STOPPING, Crew, Signals
from rowcast.runtime.run_directory import failure_since
from rowcast.runtime.stages import IDLE_WAIT_S, Stage
from rowcast.runtime.telemetry.health import Health
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.timeline import traced_stages
from rowcast.trainer.execute.engine import TrainerEngine
from rowcast.trainer.execute.metrics import TrainerCounters, TrainerGauges
from rowcast.trainer.execute.page_locking import pinned
from rowcast.trainer.execute.phases import phase_clock
from rowcast.trainer.execute.plan_check import check_welcome_fits
from rowcast.trainer.execute.streams import make_streams
from rowcast.trainer.kernels import Kernels
from rowcast.trainer.models.runner import EvaluationRunner, StepRunner
from rowcast.trainer.report.final_report import final_record, final_report
from rowcast.trainer.report.history import History
from rowcast.trainer.report.page.page import write_page
from rowcast.trainer.report.page.record import RunRecord
from rowcast.trainer.report.report_json import Report, write_report
from rowcast.trainer.report.results import PAGE, REPORT, EarlierResults, EvaluationOnly, ResultFiles
from rowcast.trainer.report.tensorboard import Board
from rowcast.trainer.report.terminal import Progress as ProgressLine
from rowcast.trainer.report.terminal import print_summary
from rowcast.trainer.run import handshake as encounter
from rowcast.trainer.run.gauges import engine_gauges, learning_rates, stall_clocks
from rowcast.trainer.run.handshake import attach_rings, await_welcome, make_engine, make_records, progress_of

RUNNERS: dict[Mode, type[StepRunner]] = {"train": StepRunner, "eval": EvaluationRunner}
REPORTS: dict[Mode, str] = {"train": REPORT, "eval": "eval.json"}
DEVICE_POLL_S = 0.0002  # between looks at events of a device, which rings no bell


@dataclass(slots=True)
class Beginnings:
    """When the run began, by the performance counter: its first attempt's times stay."""

    met_s: float | None = None  # the first prefetcher
    step_s: float | None = None  # the first step


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParts:
    """What all attempts of a run share."""

    job: Job
    groups: tuple[GroupSpec, ...]
    mode: Mode
    fresh: bool
    device: torch.device
    threads: int
    kernels: Kernels
    tensorboard: Path | None  # folder for event files
    signals: Signals
    health: Health
    counters: TrainerCounters
    history: History
    began: Beginnings


class TrainerAttempt:
    def __init__(self, run: RunParts, transport: Transport, crew: Crew) -> None:
        """`transport`: the job's, with the time-out that this attempt waits for a prefetcher."""
        self._run = run
        self._job = run.job
        self._transport = transport
        self._crew = crew
        self._bell = run.signals.bell
        self._log = get_logger()
        self._engine: TrainerEngine | None = None
        self._welcome: Welcome | None = None
        self._left = threading.Event()  # the prefetcher has said good-bye
        self._earlier = EarlierResults(run.job.run_dir)
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
            learning_rates=learning_rates(self._job.optimizer, self._results.train_steps),
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
        watch = PeerWatch(
            "prefetcher",
            conversation,
            link,
            self._transport,
            lambda: progress_of(self._engine),
            lambda: bool(arrived),
            lambda: failure_since(self._job.run_dir, "prefetcher", self._run.signals.began_s),
        )
        conversation.send(encounter.hello(self._job, self._run.mode, self._run.threads, self._run.device))
        crash_point("Hello sent")
        self._run.health.state = "connecting"
        self._log.info("waiting for the prefetcher", run_dir=str(self._job.run_dir.resolve()))
        stopped = self._run.signals
        welcome = await_welcome(
            arrived, conversation, watch, self._bell, lambda: stopped.stop_reason is not None, self._left.is_set
        )
        if welcome is not None:
            check_welcome_fits(welcome, self._job, self._run.groups)
            self._accept(welcome)
            try:
                self._train(stack, conversation, watch, welcome)
            finally:
                self._leave_earlier(welcome)
        elif self._left.is_set():
            self._log.info("the prefetcher was stopped before the run had begun")

    def _accept(self, welcome: Welcome) -> None:
        """Raises where this process cannot be the prefetcher's trainer."""
        check_welcome(welcome)
        if self._run.mode == "eval":
            return
        run_dir, goes_on = self._job.run_dir, welcome.restore_bytes > 0 and not welcome.fresh
        if (run_dir / REPORT).exists() and not self._run.fresh and not goes_on:
            raise ConfigError(
                f"a new run begins, but {run_dir} holds the report of an earlier one; add --fresh to this command too, or set another "
                "job.run_dir in both"
            )
        if welcome.fresh:
            self._earlier.set_aside(welcome.replaces)
            return
        self._earlier.give_up()
        for name in (REPORT, PAGE):
            (run_dir / name).unlink(missing_ok=True)  # of this run, before it was stopped

    def _leave_earlier(self, welcome: Welcome) -> None:
        """The results of the run whose place this one was to take."""
        if not welcome.fresh:
            return
        if self._engine is not None and self._engine.loop.has_checkpoint:
            self._earlier.give_up()
        else:
            self._earlier.bring_back()

    # training

    def _train(self, stack: ExitStack, conversation: Conversation, watch: PeerWatch, welcome: Welcome) -> None:
        run = self._run
        stack.enter_context(self._results)
        self._welcome = welcome
        rings = attach_rings(stack, self._job.transport, welcome)
        self._crew.start({"watch": watch}, {})  # the prefetcher must hear of this process also while its model is built
        stack.callback(self._crew.stop)
        are_pinned = stack.enter_context(pinned([ring.buffer for ring in rings], run.device))
        engine = self._engine = self._make_engine(conversation, welcome, rings, pinned=are_pinned)
        crash_point("model built")
        self._crew.start(self._stages(engine, welcome), stall_clocks(engine))
        stack.callback(self._crew.stop)  # once more: before the rings are unpinned
        run.health.state = "running"
        run.began.met_s = run.began.met_s or time.perf_counter()
        progress = stack.enter_context(
            ProgressLine(run.counters, welcome.train_steps, first_step=welcome.first_train_step)
        )
        board = stack.enter_context(Board(run.tensorboard, self._results, welcome.first_train_step))
        run.history.begin(welcome.first_train_step, board.marked)
        self._results.listeners = [progress.evaluation, board.evaluation]
        self._log.info(
            "training", after_train_steps=welcome.first_train_step, checkpoints=self._job.checkpoint.described
        )
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

    def _make_engine(
        self, conversation: Conversation, welcome: Welcome, rings: list[RingFile | RingMemory], *, pinned: bool
    ) -> TrainerEngine:
        run = self._run
        records = make_records(welcome.slots, run.groups, run.device)
        streams = make_streams(run.device)
        clock = phase_clock(streams.compute, run.counters.spent)
        return make_engine(
            self._job,
            run.groups,
            conversation,
            welcome,
            rings,
            pinned=pinned,
            streams=streams,
            clock=clock,
            records=records,
            runner=RUNNERS[run.mode](self._job, run.groups, records, welcome.num_dense, clock, run.kernels),
            results=self._results,
            counters=run.counters,
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

    # what the run has to show

    def _report(self, engine: TrainerEngine, welcome: Welcome, *, are_pinned: bool) -> Report:
        run = self._run
        assert run.began.met_s is not None, "the loop begins with a prefetcher"
        steps = welcome.first_train_step if run.mode == "eval" else self._results.train_steps
        return final_report(
            engine,
            welcome,
            self._results,
            train_steps=steps,
            device=run.device,
            threads=run.threads,
            pinned=are_pinned,
            met_s=run.began.met_s,
            first_step_s=run.began.step_s or engine.loop.first_step_s,
        )

    def _record(self, report: Report) -> RunRecord:
        return final_record(self._job, report, self._results, self._run.history)
