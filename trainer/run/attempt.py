"""Implements `trainer run` and `trainer eval`: `TrainerRun` locks the folder of the pair, and makes attempts.

An attempt runs from the handshake to the last good-bye, or to the loss of the prefetcher. It has a new conversation,
rings, model and cold cache. It always closes them in the reverse order of opening.
"""

import io
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from rowcast.job.file import with_ports_of_pair
from rowcast.job.schema import Job, Transport
from rowcast.job.tables import group_specs
from rowcast.job.training_identity import refuse_finished
from rowcast.protocol.attempts import Attempts, RankPatience
from rowcast.protocol.messages import Mode, Welcome
from rowcast.protocol.scrape import serve_metrics
from rowcast.runtime.checkpoint_manifest import newest_checkpoint, read_manifest
from rowcast.runtime.crash_points import crash_point
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.machine import UNRECORDED, Machine, keep_freed_memory, seen, usable_cores
from rowcast.runtime.process import STOPPING, UNTRAINED, Signals
from rowcast.runtime.run_directory import RunDirectory, holder, note_refusal, pair_folder
from rowcast.runtime.stages import Crew
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.metrics import build_info, versions
from rowcast.runtime.telemetry.timeline import Timeline
from rowcast.trainer.device.cuda import choose_device, make_streams
from rowcast.trainer.device.streams import PhaseClock, on_device
from rowcast.trainer.models.runner import StepRunner
from rowcast.trainer.models.shared_runner import AgreedStop, SharedRunner
from rowcast.trainer.report.earlier_results import EarlierResults
from rowcast.trainer.report.progress import MarkHistory, TerminalProgress, ignore
from rowcast.trainer.report.report_json import Report, make_report, write_report
from rowcast.trainer.report.results import PAGE, REPORT, EvaluationOnly, ResultFiles, ResultsInMemory
from rowcast.trainer.report.tensorboard import TensorBoardWriter, check_board
from rowcast.trainer.run.connection import MODEL, PrefetcherConnection
from rowcast.trainer.run.launch import read_launch
from rowcast.trainer.run.machine import prepared, set_threads, settle, warn_of_overridden
from rowcast.trainer.run.rank_group import Party, RankGroup, await_complete, gathered_report, meet_together, same_states
from rowcast.trainer.step.engine import TrainerCollector, TrainerEngine, TrainerGauges, learning_rates
from rowcast.trainer.step.metrics import new_counters

if TYPE_CHECKING:
    from rowcast.trainer.report.score_file import ScoreFile  # imports pyarrow, which no other trainer needs

Runner = StepRunner | SharedRunner


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    mode: Mode
    report: str  # its file in the run directory
    scores: "ScoreFile | None" = None  # None if evaluations have metrics

    def finish(self, run_dir: Path, report: Report) -> None:
        """Called by the first rank after the last step."""
        if report.finished and self.scores is not None:
            self.scores.finish()
        write_report(run_dir / self.report, report)


TRAIN = Errand(mode="train", report=REPORT)
EVALUATE = Errand(mode="eval", report="eval.json")


def score_to(path: Path, job: Job, *, probability: bool) -> Errand:
    """Raises ConfigError."""
    if job.ranks.count > 1:
        raise ConfigError(
            f"--scores: one trainer writes the scores, but ranks.count = {job.ranks.count}; set ranks.count = 1 and "
            f"ranks.parts = {job.ranks.num_parts}, which gives the same bits"
        )
    from rowcast.trainer.report.score_file import ScoreFile

    scores = ScoreFile(path, job.data.columns.labels, probability=probability)
    return Errand(mode="eval", report="score.json", scores=scores)


class RankLeft(Exception):
    """A rank was stopped while the ranks joined."""


class TrainerAttempt:
    def __init__(self, run: "TrainerRun", transport: Transport, crew: Crew) -> None:
        """`transport`: the job's, with this attempt's time-out for a prefetcher."""
        self._run = run
        self._job = run.job
        self._log = get_logger()
        self._connection = PrefetcherConnection(
            run.job, transport, crew, run.health, run.counters, run.device, run.party.rank
        )
        self._earlier = EarlierResults(run.job.run_dir)
        # the first rank writes the results of all
        self._leads = run.party.rank.number == 0
        self._keeps_results = self._leads and run.errand.mode == "train"
        kind = EvaluationOnly if run.errand.mode == "eval" else ResultFiles if self._leads else ResultsInMemory
        self._results = kind(run.job.run_dir)
        self._crew = crew
        self._watch: Callable[[], None] = lambda: None  # over exchanges with other ranks

    def live(self) -> None:
        """Returns when the run is finished or was stopped. Raises the first error of any stage, PeerLost included."""
        run = self._run
        group = run.party.join(self._given_up)
        if group is None:
            return
        with self._connection as connection:
            welcome = self._meet(connection, group)
            if welcome is None:
                who = "the prefetcher" if connection.left.is_set() else "a rank"
                if not self._given_up():
                    self._log.info(f"{who} was stopped before the run had begun")
                return
            if self._keeps_results:
                self._earlier.begin(welcome)
            try:
                self._train(connection, group, welcome)
            except RankLeft:
                self._log.info("a rank was stopped before the run had begun")
            except BaseException:
                group.abandon(run.device)
                raise
            finally:
                engine = connection.engine
                if engine is not None:
                    run.first_step_s = run.first_step_s or engine.loop.first_step_s
                if self._keeps_results:
                    self._earlier.end(welcome, has_checkpoint=engine is not None and engine.barrier.has_checkpoint)
        group.close()

    def _given_up(self) -> bool:
        return self._run.signals.stop_reason is not None

    def _meet(self, connection: PrefetcherConnection, group: RankGroup) -> Welcome | None:
        """Connects to the prefetcher. Returns once all ranks are connected to theirs, None if any of them leaves."""
        run = self._run

        def meet() -> tuple[Welcome | None, Machine]:
            welcome = connection.meet(run.machine, run.errand.mode, self._given_up, run.signals.began_s)
            if welcome is None:
                return None, UNRECORDED
            machine = settle(self._job, run.errand.mode, run.machine, run.cores, welcome.machine)
            if self._keeps_results:
                self._earlier.check(welcome, fresh=run.fresh)
            return welcome, machine

        return meet_together(group, meet, self._job, self._given_up, connection.attend)

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

    def _train(self, connection: PrefetcherConnection, group: RankGroup, welcome: Welcome) -> None:
        run, stack = self._run, connection.stack
        stack.enter_context(self._results)

        assert connection.conversation is not None, "the prefetcher was met"
        stop = AgreedStop(group.rank, self._job, connection.conversation.send)

        def make_model(records: list[torch.Tensor], clock: PhaseClock) -> tuple[Runner, Runner]:
            runner = self._runner(group, records, welcome.num_dense, clock, stop)
            if run.errand.scores is not None:
                run.errand.scores.begin(runner.score_name)
            runner.dense_step.skipped = self._results.skipped
            if run.errand.mode == "train":
                same_states(group, runner.tried)
            return runner, runner

        engine = connection.start(make_streams, make_model, self._results)
        run.health.state, run.signals.left_undone = "running", ""
        run.met_s = run.met_s or time.perf_counter()
        progress = stack.enter_context(
            TerminalProgress(
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
        run.history.begin(welcome.first_train_step, board.marked if folder else ignore)
        self._results.listeners = [progress.evaluation, board.evaluation]
        checkpoints = {"checkpoints": self._job.checkpoint.described}
        doing, also = ("training", checkpoints) if run.errand.mode == "train" else ("evaluating", {})
        self._log.info(doing, data=welcome.data, after_train_steps=welcome.first_train_step, **also)
        self._loop(engine, progress, stop)
        progress.close()
        run.history.close(engine.loop.first_step_s)
        board.close()
        report = gathered_report(group, self._report(engine, welcome))
        self._results.close()  # before the good-bye: after it the run counts as complete
        if self._leads:
            self._write_report(report)
        elif run.errand.mode == "train" and report.finished:
            await_complete(self._job, self._crew.check)
        connection.say_bye()
        if self._leads:
            from rowcast.trainer.report.page import print_summary

            page = self._job.run_dir / PAGE
            print_summary(report, page=page if run.errand.mode == "train" and page.exists() else None)

    def _write_report(self, report: Report) -> None:
        crash_point("report not written")
        self._run.errand.finish(self._job.run_dir, report)
        if self._run.errand.mode == "train":
            from rowcast.trainer.report.charts import RunRecord
            from rowcast.trainer.report.page import write_page

            record = RunRecord(
                job=self._job,
                report=report,
                losses=self._results.losses_from(0),
                evaluations=self._results.evaluations,
                marks=self._run.history.marks,
                starts=self._run.history.starts,
                ended_at=datetime.now(UTC),
            )
            write_page(self._job.run_dir / PAGE, record)

    def _runner(
        self, group: RankGroup, records: list[torch.Tensor], num_dense: int, clock: PhaseClock, stop: AgreedStop
    ) -> Runner:
        run = self._run
        trains, scores = run.errand.mode == "train", run.errand.scores
        take_scores = None if scores is None else scores.write
        if not group.rank.is_divided:
            return StepRunner(run.job, records, num_dense, clock, run.kernels, trains=trains, take_scores=take_scores)
        connection = self._connection
        connection.waits_for = "the other ranks"
        collectives = group.connect(run.device, self._crew.check, self._given_up)
        connection.waits_for = MODEL
        if collectives is None:
            raise RankLeft
        self._watch = collectives.watch
        parts = connection.job, records, num_dense, collectives, stop
        runner = SharedRunner(*parts, run.kernels, clock, trains=trains, take_scores=take_scores)
        runner.balanced = run.counters.balanced
        return runner

    def _loop(self, engine: TrainerEngine, progress: TerminalProgress, stop: AgreedStop) -> None:
        run, connection, stopping = self._run, self._connection, False

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
            run.history.update(engine.loop.first_step_s)
            self._watch()
            return engine.loop.advance()

        connection.drive(advance, until=lambda: engine.loop.finished)

    # the report

    def _report(self, engine: TrainerEngine, welcome: Welcome) -> Report:
        """Returns the report of this rank, after the engine's loop has ended."""
        run, results, end, now_s = self._run, self._results, engine.barrier.end, time.perf_counter()
        assert run.met_s is not None, "the loop begins after the handshake"
        assert end is not None, "the loop ends with EndOfData"
        first_step_s = run.first_step_s or engine.loop.first_step_s or now_s
        return make_report(
            engine.counters,
            wall_s=now_s - first_step_s,
            startup_s=first_step_s - run.met_s,
            train_steps=welcome.first_train_step if run.errand.mode == "eval" else results.train_steps,
            skipped_steps=len(results.skipped),
            loss=results.mean_loss,
            first_loss=results.first_loss,
            evaluations=results.evaluations,
            table_bytes=engine.slots.table_bytes,
            cache_bytes=engine.slots.cache_bytes,
            staging_bytes=engine.cache.staging_bytes,
            plans_bytes=engine.cache.plans_bytes,
            device_bytes=engine.device_bytes,
            host_bytes=end.host_bytes,
            prefetcher_waits_s={wait.reason: wait.seconds for wait in end.waits},
            tier=end.tier,
            row_copies=end.row_copies,
            data_delay=end.data_delay,
            threads=torch.get_num_threads(),
            pinned=engine.has_page_locked_rings,
            device=str(engine.device),
            versions=versions("torch", "numpy"),
            pids={"prefetcher": welcome.pid, "trainer": os.getpid()},
            finished=end.finished,
            stopped_by=None if end.finished else engine.barrier.stop_reason,
            ended_early=engine.loop.ended_by,
        )


class TrainerRun:
    """One run, from locking its directory: makes attempts until the run ends, and holds what they share."""

    def __init__(
        self,
        job: Job,
        signals: Signals,
        *,
        fresh: bool = False,
        timeline: bool = False,
        errand: Errand = TRAIN,
        tensorboard: Path | None = None,
    ) -> None:
        """`tensorboard`: the folder for event files; None writes none. Raises ConfigError."""
        self._launch = launch = read_launch(os.environ)
        self.job = with_ports_of_pair(job, launch.rank)
        self.party = Party(job, launch, errand.mode)  # all trainers of the run
        self.folder = pair_folder(job.run_dir, launch.rank, launch.world_size)  # of this pair of processes
        self.errand, self.fresh, self.tensorboard = errand, fresh, tensorboard
        self.signals = signals
        signals.left_undone = "" if launch.rank else UNTRAINED
        patience = RankPatience("prefetcher", job.transport) if launch.world_size > 1 else None
        self._attempts: Attempts[TrainerAttempt] = Attempts("trainer", "prefetcher", job.transport, signals, patience)
        self.health = self._attempts.health
        self.counters = new_counters(group_specs(job), launch.rank)
        self.history = MarkHistory(self.counters)
        # by time.perf_counter(); set by the first attempt
        self.met_s: float | None = None  # the first prefetcher connected
        self.first_step_s: float | None = None
        self._timeline = timeline

    def run(self) -> None:
        """Returns when the run is finished or was stopped. Raises the first error of any stage."""
        try:
            if self.tensorboard is not None:
                check_board(self.tensorboard)
            self.device = choose_device(self.job.trainer.device, self._launch.local_rank)
        except ConfigError as error:
            note_refusal(self.folder, "trainer", error)
            raise
        with ExitStack() as stack:
            directory = stack.enter_context(RunDirectory(self.folder, "trainer"))
            directory.clear_failure()
            stack.enter_context(on_device(self.device))
            try:
                self._run(stack)
            except BaseException as error:
                self.health.state = "failed"
                directory.note_failure(error)
                raise

    def _run(self, stack: ExitStack) -> None:
        trains, of_run = self.errand.mode == "train", RunDirectory(self.job.run_dir, "trainer")
        if trains and self._launch.rank == 0:
            newest = newest_checkpoint(self.job.run_dir)
            with suppress(DataError):  # a fresh run set results aside, and was killed before its first checkpoint
                if newest is not None:
                    EarlierResults(self.job.run_dir).bring_back_of(read_manifest(newest).run_id)
        if trains and self._launch.restarts and self._has_ended(of_run):
            get_logger().info("the run had ended before this trainer was started again")
            return
        if trains and not self.fresh:
            refuse_finished(of_run, self.job, None)
        if self._timeline:
            self.counters.timeline = stack.enter_context(Timeline(self.folder, "trainer", self._launch.rank))
        build = build_info("trainer", self.job.job.name)
        # before the slow choice of kernels, so that a port in use is reported at once
        serve_metrics(stack, TrainerCollector(self.counters, self._gauges, build, self.health), self.job.metrics)
        trainers = self._launch.local_world_size
        self.cores = max(1, usable_cores() // trainers)  # for each trainer of this host
        threads = self.job.first_threads(self.cores)
        warn_of_overridden(threads, trainers, os.environ)
        set_threads(threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.kernels, self.machine = prepared(self.job, self.device, self.cores)
        if self.signals.stop_reason is None:
            self._attempts.run(lambda _, transport, crew: TrainerAttempt(self, transport, crew))

    def _has_ended(self, of_run: RunDirectory) -> bool:
        """Returns whether the run has ended since torchrun began: a trainer killed after the last good-byes may be
        restarted without a prefetcher."""
        first, torchrun = pair_folder(self.job.run_dir, 0, self._launch.world_size), seen(os.getppid())
        has_ended = torchrun is not None and of_run.was_completed_since(torchrun.began_s)
        return has_ended and holder(first, "prefetcher") is None

    def _gauges(self) -> TrainerGauges:
        if self._attempts.current is not None:
            return self._attempts.current.gauges()
        return TrainerGauges(train_step=0, learning_rates=learning_rates(self.job.optimizer, 0))
