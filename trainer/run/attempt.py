"""Makes one attempt of a run, from the handshake to the last good-bye or to the loss of the prefetcher.

An attempt has its own conversation, rings, model and cold cache. It opens them in one order and always closes them in
the reverse order.
"""

import io
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from rowcast.job.schema import Job, Transport, parse_seconds
from rowcast.job.tables import GroupSpec
from rowcast.protocol.messages import Mode, Welcome
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import ConfigError, PeerLost, RowcastError
from rowcast.runtime.process import STOPPING, Crew, Signals
from rowcast.runtime.run_directory import RunDirectory
from rowcast.runtime.telemetry.health import Health
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.execute.agreed_stop import AgreedStop
from rowcast.trainer.execute.engine import TrainerEngine
from rowcast.trainer.execute.metrics import TrainerCounters, TrainerGauges
from rowcast.trainer.execute.phases import PhaseClock
from rowcast.trainer.execute.streams import make_streams
from rowcast.trainer.kernels import Kernels
from rowcast.trainer.models.runner import EvaluationRunner, StepRunner
from rowcast.trainer.models.shared_runner import SharedEvaluationRunner, SharedRunner
from rowcast.trainer.report.all_ranks import report_of_all
from rowcast.trainer.report.final_report import final_record, final_report
from rowcast.trainer.report.history import History
from rowcast.trainer.report.pace import pace_of
from rowcast.trainer.report.page.page import write_page
from rowcast.trainer.report.page.record import RunRecord
from rowcast.trainer.report.report_json import Report, write_report
from rowcast.trainer.report.results import (
    PAGE,
    REPORT,
    EarlierResults,
    EvaluationOnly,
    ResultFiles,
    ResultsInMemory,
)
from rowcast.trainer.report.summary import print_summary
from rowcast.trainer.report.tensorboard import TensorBoardWriter
from rowcast.trainer.report.terminal import TerminalProgress as ProgressLine
from rowcast.trainer.run.agreement import all_start, failed_start, start_of
from rowcast.trainer.run.connection import Connection, ConnectionParts
from rowcast.trainer.run.gauges import engine_gauges, learning_rates
from rowcast.trainer.run.meeting import POLL_S
from rowcast.trainer.run.rank_group import Group, Party

Runner = StepRunner | SharedRunner
RUNNERS: dict[Mode, type[StepRunner]] = {"train": StepRunner, "eval": EvaluationRunner}
REPORTS: dict[Mode, str] = {"train": REPORT, "eval": "eval.json"}


@dataclass(slots=True)
class StartTimes:
    """When the run began, by time.perf_counter(); set by the first attempt."""

    met_s: float | None = None  # the first prefetcher was met
    step_s: float | None = None  # the first step began


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerRunParts:
    """Everything that the attempts of a run share."""

    job: Job
    groups: tuple[GroupSpec, ...]
    party: Party  # all trainers of the run
    folder: Path  # of this pair of processes
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
    start_times: StartTimes


class TrainerAttempt:
    def __init__(self, run: TrainerRunParts, transport: Transport, crew: Crew) -> None:
        """`transport`: the job's, with the time-out for which this attempt waits for a prefetcher."""
        self._run = run
        self._job = run.job
        self._log = get_logger()
        self._connection = Connection(
            ConnectionParts(
                job=run.job,
                groups=run.groups,
                folder=run.folder,
                mode=run.mode,
                device=run.device,
                threads=run.threads,
                transport=transport,
                counters=run.counters,
                health=run.health,
                bell=run.signals.bell,
                crew=crew,
                began_s=run.signals.began_s,
                rank=run.party.rank,
            )
        )
        self._earlier = EarlierResults(run.job.run_dir)
        # the first rank writes what belongs to all
        self._leads = run.party.rank is None or run.party.rank.number == 0
        kind = EvaluationOnly if run.mode == "eval" else ResultFiles if self._leads else ResultsInMemory
        self._results = kind(run.job.run_dir)
        self._crew = crew

    def live(self) -> None:
        """Returns when the run is finished or was stopped. Raises the first error of any stage, PeerLost included."""
        group = self._run.party.join(self._given_up)
        if group is None:
            return
        with self._connection as connection:
            welcome = self._meet(connection, group)
            if welcome is None:
                who = "the prefetcher was stopped" if connection.has_left else "stopped"
                self._log.info(f"{who} before the run had begun")
                return
            self._begin_results(welcome)
            try:
                self._train(connection, group, welcome)
            finally:
                self._leave_earlier(welcome)
        group.close()

    def _given_up(self) -> bool:
        return self._run.signals.stop_reason is not None

    def _meet(self, connection: Connection, group: Group) -> Welcome | None:
        """Meets the prefetcher; returns once all ranks have met theirs. None if one of them leaves."""

        def given_up() -> bool:
            if connection.welcome is not None:
                connection.attend()
            return self._given_up()

        timeout_s = sum(map(parse_seconds, (self._job.transport.connect_timeout, self._job.ranks.timeout)))
        try:
            welcome = connection.meet(self._given_up)
            if welcome is not None and self._leads:
                self._check_earlier(welcome)
        except RowcastError as error:
            if not self._given_up():
                with suppress(RowcastError):
                    all_start(group, failed_start(error), 0.0, lambda: False)
            raise
        return welcome if all_start(group, start_of(welcome), timeout_s, given_up) else None

    def gauges(self) -> TrainerGauges:
        evaluation, welcome, engine = self._results.evaluation_result, self._connection.welcome, self._connection.engine
        idle = TrainerGauges(
            train_step=self._results.train_steps,
            learning_rates=learning_rates(self._job.optimizer, self._results.train_steps),
            expected_train_steps=welcome.train_steps if welcome else None,
            auc=evaluation.auc if evaluation else None,
            logloss=evaluation.logloss if evaluation else None,
            accuracy=evaluation.accuracy if evaluation else None,
            tasks=evaluation.tasks if evaluation else (),
        )
        return idle if engine is None else engine_gauges(idle, engine)

    # results of an earlier run

    def _check_earlier(self, welcome: Welcome) -> None:
        """Raises ConfigError if the results of an earlier run would be lost."""
        if self._run.mode == "eval":
            return
        run_dir, resumes = self._job.run_dir, welcome.checkpoint != "" and not welcome.fresh
        if (run_dir / REPORT).exists() and not self._run.fresh and not resumes:
            raise ConfigError(
                f"a new run begins, but {run_dir} holds the report of an earlier one; add --fresh to this command too, "
                "or set another job.run_dir in both"
            )

    def _begin_results(self, welcome: Welcome) -> None:
        if self._run.mode == "eval" or not self._leads:
            return
        if welcome.fresh:
            self._earlier.set_aside(welcome.replaces)
            return
        self._earlier.give_up()
        for name in (REPORT, PAGE):
            (self._job.run_dir / name).unlink(missing_ok=True)  # written by this run before it was stopped

    def _leave_earlier(self, welcome: Welcome) -> None:
        """Discards the results of the run that this one replaces, or restores them if this run has no checkpoint."""
        if not welcome.fresh or not self._leads:
            return
        engine = self._connection.engine
        if engine is not None and engine.barrier.has_checkpoint:
            self._earlier.give_up()
        else:
            self._earlier.bring_back()

    # training

    def _train(self, connection: Connection, group: Group, welcome: Welcome) -> None:
        run, stack = self._run, connection.stack
        stack.enter_context(self._results)

        assert connection.conversation is not None, "the prefetcher was met"
        stop = AgreedStop(group.rank, welcome.depth, connection.conversation.send)

        def make_model(records: list[torch.Tensor], clock: PhaseClock) -> tuple[Runner, Runner]:
            runner = self._runner(group, records, welcome.num_dense, clock, stop)
            return runner, runner

        engine = connection.start(make_streams, make_model, self._results)
        run.health.state = "running"
        run.start_times.met_s = run.start_times.met_s or time.perf_counter()
        progress = stack.enter_context(
            ProgressLine(
                run.counters,
                welcome.train_steps,
                first_step=welcome.first_train_step,
                mode=run.mode,
                eval_steps=welcome.epoch_batches[1],
                console=None if self._leads else Console(quiet=True, file=io.StringIO()),
            )
        )
        folder = run.tensorboard if self._leads else None
        board = stack.enter_context(TensorBoardWriter(folder, self._results, welcome.first_train_step))
        run.history.begin(welcome.first_train_step, board.marked)
        self._results.listeners = [progress.evaluation, board.evaluation]
        self._log.info(
            "training", after_train_steps=welcome.first_train_step, checkpoints=self._job.checkpoint.described
        )
        self._loop(connection, engine, progress, stop)
        progress.close()
        run.history.close(engine.loop.first_step_s)
        board.close()
        own = self._report(engine, welcome, are_pinned=connection.has_page_locked_rings)
        report = report_of_all(group.gather(msgspec.json.encode(own)))
        self._results.close()  # before the good-bye, after which the run counts as complete
        if self._leads:
            self._write_report(report)
        elif run.mode == "train" and report.finished:
            self._await_complete()
        connection.say_bye()
        if self._leads:
            page = self._job.run_dir / PAGE
            print_summary(report, page=page if run.mode == "train" and page.exists() else None)

    def _await_complete(self) -> None:
        """The first rank ends before the others, so that they are still here if it has to come again.

        Raises PeerLost if the run is not complete within ranks.timeout.
        """
        directory = RunDirectory(self._job.run_dir, "trainer")
        deadline_s = time.monotonic() + parse_seconds(self._job.ranks.timeout)
        while directory.completion() is None:
            self._crew.check()
            if time.monotonic() > deadline_s:
                raise PeerLost(
                    f"rank 0 has not completed the run within {self._job.ranks.timeout} (ranks.timeout) after its last "
                    "step; its log says why"
                )
            time.sleep(POLL_S)

    def _write_report(self, report: Report) -> None:
        crash_point("report not written")
        write_report(self._job.run_dir / REPORTS[self._run.mode], report)
        if self._run.mode == "train":
            write_page(self._job.run_dir / PAGE, self._record(report))

    def _runner(
        self, group: Group, records: list[torch.Tensor], num_dense: int, clock: PhaseClock, stop: AgreedStop
    ) -> Runner:
        run = self._run
        if group.rank is None:
            return RUNNERS[run.mode](run.job, run.groups, records, num_dense, clock, run.kernels)
        make = SharedEvaluationRunner if run.mode == "eval" else SharedRunner
        collectives = group.connect(run.device, self._crew.check)
        parts = run.job, run.groups, records, num_dense, group.rank, collectives, stop
        return make(*parts, run.kernels, clock, run.counters.balanced)

    def _loop(self, connection: Connection, engine: TrainerEngine, progress: ProgressLine, stop: AgreedStop) -> None:
        run, stopping = self._run, False

        def advance() -> bool:
            nonlocal stopping
            number = run.signals.stop_reason
            reason = connection.asked_to_stop if number is None else f"{number} to the trainer"
            if reason is not None and not stopping:
                stopping = True
                run.health.state = "stopping"
                self._log.info(STOPPING, reason=reason)
                stop.ask(reason)
            progress.update()
            run.start_times.step_s = run.start_times.step_s or engine.loop.first_step_s
            run.history.update(engine.loop.first_step_s)
            return engine.loop.advance()

        connection.drive(advance, until=lambda: engine.finished)

    # the report

    def _report(self, engine: TrainerEngine, welcome: Welcome, *, are_pinned: bool) -> Report:
        run = self._run
        assert run.start_times.met_s is not None, "the loop begins after the handshake"
        steps = welcome.first_train_step if run.mode == "eval" else self._results.train_steps
        return final_report(
            engine,
            welcome,
            self._results,
            train_steps=steps,
            device=run.device,
            threads=run.threads,
            pinned=are_pinned,
            met_s=run.start_times.met_s,
            first_step_s=run.start_times.step_s or engine.loop.first_step_s,
            pace=pace_of(self._job.run_dir, run.history.marks) if run.mode == "train" and self._leads else None,
        )

    def _record(self, report: Report) -> RunRecord:
        return final_record(self._job, report, self._results, self._run.history)
