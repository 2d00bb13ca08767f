"""Runs `trainer run` and `trainer eval`: locks the pair's folder, serves metrics, makes attempts."""

import os
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from rowcast.job.pair import with_ports_of_pair
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.attempts import Attempts, RankPatience
from rowcast.protocol.counters import serve_metrics
from rowcast.runtime.checkpoint_manifest import newest_checkpoint, read_manifest
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.machine import Machine, keep_freed_memory, usable_cores
from rowcast.runtime.process import Signals
from rowcast.runtime.run_directory import RunDirectory, is_held, note_refusal, pair_folder
from rowcast.runtime.telemetry.build import build_info
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.timeline import Timeline
from rowcast.trainer.device.streams import choose_device, on_device
from rowcast.trainer.kernels.choose import choose_kernels
from rowcast.trainer.report.history import History
from rowcast.trainer.report.results import EarlierResults
from rowcast.trainer.report.tensorboard import check_board
from rowcast.trainer.run.attempt import TrainerAttempt
from rowcast.trainer.run.errands import TRAIN, Errand
from rowcast.trainer.run.launch import read_launch
from rowcast.trainer.run.machine import facts_of, set_threads, warn_of_overridden
from rowcast.trainer.run.rank_group import party_of
from rowcast.trainer.step.metrics import TrainerCollector, TrainerGauges, learning_rates, new_counters


class TrainerRun:
    """One run, from locking its directory: makes attempts until the run ends. What they have in common is here."""

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
        self.groups = group_specs(job)
        self.party = party_of(job, launch, errand.mode)  # all trainers of the run
        self.folder = pair_folder(job.run_dir, launch.rank, launch.world_size)  # of this pair of processes
        self.errand, self.fresh, self.tensorboard = errand, fresh, tensorboard
        self.signals = signals
        patience = RankPatience("prefetcher", job.transport) if launch.world_size > 1 else None
        self._attempts: Attempts[TrainerAttempt] = Attempts("trainer", "prefetcher", job.transport, signals, patience)
        self.health = self._attempts.health
        self.counters = new_counters(self.groups, launch.rank)
        self.history = History(self.counters)
        # by time.perf_counter(); set by the first attempt
        self.met_s: float | None = None  # the first prefetcher connected
        self.first_step_s: float | None = None
        self._timeline = timeline

    def run(self) -> None:
        """Returns when the run is finished or was stopped. Raises the first error of any stage."""
        try:
            if self.tensorboard is not None:
                check_board(self.tensorboard)
            self.device = self._choose_device()
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
            self._bring_back_results()
        if trains and self._launch.restarts and self._has_ended(of_run):
            get_logger().info("the run had ended before this trainer was started again")
            return
        if trains and not self.fresh:
            of_run.refuse_complete(self.job.data.epochs)
        if self._timeline:
            self.counters.timeline = stack.enter_context(Timeline(self.folder, "trainer"))
        build = build_info("trainer", self.job.job.name)
        # before the slow choice of kernels, so that a port in use is reported at once
        serve_metrics(stack, TrainerCollector(self.counters, self._gauges, build, self.health), self.job.metrics)
        self._prepare()
        if self.signals.stop_reason is None:
            self._attempts.run(lambda _, transport, crew: TrainerAttempt(self, transport, crew))

    def _has_ended(self, of_run: RunDirectory) -> bool:
        """Returns whether the run is over: a trainer killed after the last good-byes may be restarted without a
        prefetcher."""
        first = pair_folder(self.job.run_dir, 0, self._launch.world_size)
        return of_run.completion() is not None and not is_held(first, "prefetcher")

    def _prepare(self) -> None:
        trainers = self._launch.local_world_size
        self.cores = max(1, usable_cores() // trainers)  # for each trainer of this host
        threads = self.job.first_threads(self.cores)
        warn_of_overridden(threads, trainers, os.environ)
        set_threads(threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.kernels = choose_kernels(self.device, self.job)  # in parallel with the prefetcher's start
        # with the threads of a first start
        self.machine = Machine(threads=threads, facts=facts_of(self.device, self.kernels, os.environ))

    def _choose_device(self) -> torch.device:
        try:
            return choose_device(self.job.trainer.device, self._launch.local_rank)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _bring_back_results(self) -> None:
        """Restores the results that a fresh run set aside, if it was killed before its first checkpoint."""
        newest = newest_checkpoint(self.job.run_dir)
        with suppress(DataError):
            if newest is not None:
                EarlierResults(self.job.run_dir).bring_back_of(read_manifest(newest).run_id)

    def _gauges(self) -> TrainerGauges:
        if self._attempts.current is not None:
            return self._attempts.current.gauges()
        return TrainerGauges(train_step=0, learning_rates=learning_rates(self.job.optimizer, 0))
