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
from rowcast.runtime.cores import usable_cores
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.machine import Machine
from rowcast.runtime.memory import keep_freed_memory
from rowcast.runtime.pair_folder import pair_folder
from rowcast.runtime.process import Signals
from rowcast.runtime.run_directory import RunDirectory, is_held, note_refusal
from rowcast.runtime.telemetry.build import build_info
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.timeline import Timeline
from rowcast.trainer.device.streams import choose_device, on_device
from rowcast.trainer.kernels.choose import choose_kernels
from rowcast.trainer.report.history import History
from rowcast.trainer.report.results import EarlierResults
from rowcast.trainer.report.tensorboard import check_board
from rowcast.trainer.run.attempt import StartTimes, TrainerAttempt, TrainerRunParts
from rowcast.trainer.run.errands import TRAIN, Errand
from rowcast.trainer.run.launch import read_launch
from rowcast.trainer.run.machine import facts_of, set_threads, warn_of_overridden
from rowcast.trainer.run.rank_group import party_of
from rowcast.trainer.step.metrics import TrainerCollector, TrainerGauges, learning_rates, new_counters


class TrainerRun:
    """One run, from locking its directory: makes attempts until the run ends."""

    def __init__(self, job: Job, signals: Signals, errand: Errand, tensorboard: Path | None = None) -> None:
        """`tensorboard`: the folder for event files; None writes none. Raises ConfigError."""
        self._launch = launch = read_launch(os.environ)
        self._job = with_ports_of_pair(job, launch.rank)
        self._party = party_of(job, launch, errand.mode)
        self._folder = pair_folder(job.run_dir, launch.rank, launch.world_size)
        self._leads = launch.rank == 0
        self._signals = signals
        self._errand = errand
        self._tensorboard = tensorboard
        self._groups = group_specs(job)
        patience = RankPatience("prefetcher", job.transport) if launch.world_size > 1 else None
        self._attempts: Attempts[TrainerAttempt] = Attempts("trainer", "prefetcher", job.transport, signals, patience)
        self._health = self._attempts.health
        self._counters = new_counters(self._groups, self._launch.rank)

    def run(self, *, fresh: bool, timeline: bool) -> None:
        """Returns when the run is finished or was stopped. Raises the first error of any stage."""
        try:
            if self._tensorboard is not None:
                check_board(self._tensorboard)
            device = self._choose_device()
        except ConfigError as error:
            note_refusal(self._folder, "trainer", error)
            raise
        with ExitStack() as stack:
            directory = stack.enter_context(RunDirectory(self._folder, "trainer"))
            directory.clear_failure()
            stack.enter_context(on_device(device))
            try:
                self._run(stack, directory, device, fresh=fresh, timeline=timeline)
            except BaseException as error:
                self._health.state = "failed"
                directory.note_failure(error)
                raise

    def _run(
        self, stack: ExitStack, directory: RunDirectory, device: torch.device, *, fresh: bool, timeline: bool
    ) -> None:
        if self._errand.mode == "train" and self._leads:
            self._bring_back_results()
        if self._launch.restarts and self._has_ended():
            get_logger().info("the run had ended before this trainer was started again")
            return
        if self._errand.mode == "train" and not fresh:
            RunDirectory(self._job.run_dir, "trainer").refuse_complete(self._job.data.epochs)
        if timeline:
            self._counters.timeline = stack.enter_context(Timeline(self._folder, "trainer"))
        build = build_info("trainer", self._job.job.name)
        collector = TrainerCollector(self._counters, self._gauges, build, self._health)
        # before the slow choice of kernels, so that a port in use is reported at once
        serve_metrics(stack, collector, self._job.metrics)
        parts = self._parts(device, fresh=fresh)
        if self._signals.stop_reason is None:
            self._attempts.run(lambda _, transport, crew: TrainerAttempt(parts, transport, crew))

    def _has_ended(self) -> bool:
        """Returns whether the run is over: a trainer killed after the last good-byes may be restarted without a
        prefetcher."""
        first = pair_folder(self._job.run_dir, 0, self._launch.world_size)
        is_complete = RunDirectory(self._job.run_dir, "trainer").completion() is not None
        return self._errand.mode == "train" and is_complete and not is_held(first, "prefetcher")

    def _parts(self, device: torch.device, *, fresh: bool) -> TrainerRunParts:
        trainers = self._launch.local_world_size
        cores = max(1, usable_cores() // trainers)
        threads = self._job.first_threads(cores)
        warn_of_overridden(threads, trainers, os.environ)
        set_threads(threads)
        if device.type == "cpu":
            keep_freed_memory()
        kernels = choose_kernels(device, self._job)  # in parallel with the prefetcher's start
        return TrainerRunParts(
            job=self._job,
            groups=self._groups,
            party=self._party,
            folder=self._folder,
            errand=self._errand,
            fresh=fresh,
            device=device,
            machine=Machine(threads=threads, facts=facts_of(device, kernels, os.environ)),
            cores=cores,
            kernels=kernels,
            tensorboard=self._tensorboard,
            signals=self._signals,
            health=self._health,
            counters=self._counters,
            history=History(self._counters),
            start_times=StartTimes(),
        )

    def _choose_device(self) -> torch.device:
        try:
            return choose_device(self._job.trainer.device, self._launch.local_rank)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _bring_back_results(self) -> None:
        """Restores the results that a fresh run set aside, if it was killed before its first checkpoint."""
        newest = newest_checkpoint(self._job.run_dir)
        with suppress(DataError):
            if newest is not None:
                EarlierResults(self._job.run_dir).bring_back_of(read_manifest(newest).run_id)

    def _gauges(self) -> TrainerGauges:
        if self._attempts.current is not None:
            return self._attempts.current.gauges()
        return TrainerGauges(train_step=0, learning_rates=learning_rates(self._job.optimizer, 0))


def run_trainer(
    job: Job,
    signals: Signals,
    *,
    fresh: bool = False,
    timeline: bool = False,
    errand: Errand = TRAIN,
    tensorboard: Path | None = None,
) -> None:
    TrainerRun(job, signals, errand, tensorboard).run(fresh=fresh, timeline=timeline)
