"""Runs one attempt, from the handshake to the last good-bye or the loss of the prefetcher.

An attempt has a new conversation, rings, model and cold cache. It always closes them in the reverse order of opening.
"""

import io
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import torch
from rich.console import Console

from rowcast.job.schema import Transport
from rowcast.job.units import parse_seconds
from rowcast.protocol.messages import Welcome
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import PeerLost, RowcastError
from rowcast.runtime.machine import UNRECORDED
from rowcast.runtime.process import STOPPING, Crew
from rowcast.runtime.run_directory import RunDirectory
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.trainer.device.phases import PhaseClock
from rowcast.trainer.device.streams import make_streams
from rowcast.trainer.models.agreed_stop import AgreedStop
from rowcast.trainer.models.runner import StepRunner
from rowcast.trainer.models.shared_runner import SharedRunner
from rowcast.trainer.report.all_ranks import report_of_all
from rowcast.trainer.report.final_report import final_record, final_report
from rowcast.trainer.report.page.page import write_page
from rowcast.trainer.report.report_json import Report
from rowcast.trainer.report.results import PAGE, EarlierResults, EvaluationOnly, ResultFiles, ResultsInMemory
from rowcast.trainer.report.summary import print_summary
from rowcast.trainer.report.tensorboard import TensorBoardWriter
from rowcast.trainer.report.terminal import TerminalProgress as ProgressLine
from rowcast.trainer.run.connection import Connection
from rowcast.trainer.run.machine import settle
from rowcast.trainer.run.meeting import POLL_S, decoded
from rowcast.trainer.run.rank_group import Group, all_start, failed_start, start_of
from rowcast.trainer.step.engine import TrainerEngine
from rowcast.trainer.step.metrics import TrainerGauges, learning_rates

if TYPE_CHECKING:
    from rowcast.trainer.run.trainer_run import TrainerRun

Runner = StepRunner | SharedRunner


class TrainerAttempt:
    def __init__(self, run: "TrainerRun", transport: Transport, crew: Crew) -> None:
        """`transport`: the job's, with this attempt's time-out for a prefetcher."""
        self._run = run
        self._job = run.job
        self._log = get_logger()
        self._connection = Connection(run.job, transport, crew, run.health, run.counters, run.device, run.party.rank)
        self._earlier = EarlierResults(run.job.run_dir)
        # the first rank writes the results of all
        self._leads = run.party.rank.number == 0
        self._keeps_results = self._leads and run.errand.mode == "train"
        kind = EvaluationOnly if run.errand.mode == "eval" else ResultFiles if self._leads else ResultsInMemory
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
            if self._keeps_results:
                self._earlier.begin(welcome)
            try:
                self._train(connection, group, welcome)
            finally:
                if self._keeps_results:
                    engine = connection.engine
                    self._earlier.end(welcome, has_checkpoint=engine is not None and engine.barrier.has_checkpoint)
        group.close()

    def _given_up(self) -> bool:
        return self._run.signals.stop_reason is not None

    def _meet(self, connection: Connection, group: Group) -> Welcome | None:
        """Connects to the prefetcher. Returns once all ranks are connected to theirs, None if any of them leaves."""

        def given_up() -> bool:
            if connection.welcome is not None:
                connection.attend()
            return self._given_up()

        run, machine = self._run, UNRECORDED
        timeout_s = sum(map(parse_seconds, (self._job.transport.connect_timeout, self._job.ranks.timeout)))
        try:
            welcome = connection.meet(run.machine, run.errand.mode, self._given_up, run.signals.began_s)
            if welcome is not None:
                machine = settle(self._job, run.errand.mode, run.machine, run.cores, welcome.machine)
            if welcome is not None and self._keeps_results:
                self._earlier.check(welcome, fresh=run.fresh)
        except RowcastError as error:
            if not self._given_up():
                with suppress(RowcastError):
                    all_start(group, failed_start(error), 0.0, lambda: False)
            raise
        return welcome if all_start(group, start_of(welcome, machine), timeout_s, given_up) else None

    def gauges(self) -> TrainerGauges:
        welcome, engine = self._connection.welcome, self._connection.engine
        idle = TrainerGauges(
            train_step=self._results.train_steps,
            learning_rates=learning_rates(self._job.optimizer, self._results.train_steps),
            expected_train_steps=welcome.train_steps if welcome else None,
            evaluation=self._results.evaluation_result,
        )
        return idle if engine is None else engine.gauges(idle)

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
        run.met_s = run.met_s or time.perf_counter()
        progress = stack.enter_context(
            ProgressLine(
                run.counters,
                welcome.train_steps,
                first_step=welcome.first_train_step,
                mode=run.errand.mode,
                eval_steps=welcome.epoch_batches[1],
                console=None if self._leads else Console(quiet=True, file=io.StringIO()),
            )
        )
        folder = run.tensorboard if self._leads else None
        board = stack.enter_context(TensorBoardWriter(folder, self._results, welcome.first_train_step))
        run.history.begin(welcome.first_train_step, board.marked)
        self._results.listeners = [progress.evaluation, board.evaluation]
        checkpoints = {"checkpoints": self._job.checkpoint.described}
        doing, also = ("training", checkpoints) if run.errand.mode == "train" else ("evaluating", {})
        self._log.info(doing, data=welcome.data, after_train_steps=welcome.first_train_step, **also)
        self._loop(connection, engine, progress, stop)
        progress.close()
        run.history.close(engine.loop.first_step_s)
        board.close()
        own = self._report(engine, welcome, are_pinned=connection.has_page_locked_rings)
        report = report_of_all([decoded(content, Report) for content in group.gather(msgspec.json.encode(own))])
        self._results.close()  # before the good-bye: after it the run counts as complete
        if self._leads:
            self._write_report(report)
        elif run.errand.mode == "train" and report.finished:
            self._await_complete()
        connection.say_bye()
        if self._leads:
            page = self._job.run_dir / PAGE
            print_summary(report, page=page if run.errand.mode == "train" and page.exists() else None)

    def _await_complete(self) -> None:
        """Waits for the first rank to end, so that the others are still running if it has to restart.

        Raises PeerLost if the run is not complete within ranks.timeout."""
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
        self._run.errand.finish(self._job.run_dir, report)
        if self._run.errand.mode == "train":
            write_page(self._job.run_dir / PAGE, final_record(self._job, report, self._results, self._run.history))

    def _runner(
        self, group: Group, records: list[torch.Tensor], num_dense: int, clock: PhaseClock, stop: AgreedStop
    ) -> Runner:
        run = self._run
        if not group.rank.is_divided:
            return run.errand.runner(run.job, run.groups, records, num_dense, clock, run.kernels)
        collectives = group.connect(run.device, self._crew.check)
        parts = run.job, run.groups, records, num_dense, group.rank, collectives, stop
        return run.errand.shared_runner(*parts, run.kernels, clock, run.counters.balanced)

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
            run.first_step_s = run.first_step_s or engine.loop.first_step_s
            run.history.update(engine.loop.first_step_s)
            return engine.loop.advance()

        connection.drive(advance, until=lambda: engine.finished)

    # the report

    def _report(self, engine: TrainerEngine, welcome: Welcome, *, are_pinned: bool) -> Report:
        run = self._run
        assert run.met_s is not None, "the loop begins after the handshake"
        steps = welcome.first_train_step if run.errand.mode == "eval" else self._results.train_steps
        return final_report(
            engine,
            welcome,
            self._results,
            train_steps=steps,
            device=run.device,
            pinned=are_pinned,
            met_s=run.met_s,
            first_step_s=run.first_step_s or engine.loop.first_step_s,
        )
