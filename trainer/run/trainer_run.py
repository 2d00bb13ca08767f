"""`trainer run` and `trainer eval`: the lock on the run directory, the metrics, and one incarnation after the other."""

import os
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.protocol.counters import new_registry
from rowcast.protocol.messages import Mode
from rowcast.protocol.peer_watch import Patience
from rowcast.runtime.checkpoint_manifest import newest_checkpoint, read_manifest
from rowcast.runtime.cores import usable_cores
from rowcast.runtime.errors import ConfigError, DataError, PeerLost
from rowcast.runtime.process import Crew, Signals
from rowcast.runtime.run_directory import RunDirectory
from rowcast.runtime.telemetry.build import build_info
from rowcast.runtime.telemetry.health import Health
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.server import TelemetryServer
from rowcast.runtime.telemetry.timeline import Timeline
from rowcast.trainer.execute.metrics import TrainerCollector, TrainerGauges, new_counters
from rowcast.trainer.execute.streams import choose_device
from rowcast.trainer.kernels.choose import choose_kernels
from rowcast.trainer.kernels.optim import warm_up_sqrt
from rowcast.trainer.report.history import History
from rowcast.trainer.report.results import EarlierResults
from rowcast.trainer.report.tensorboard import check_board
from rowcast.trainer.run.attempt import Beginnings, Incarnation, RunParts
from rowcast.trainer.run.gauges import learning_rates


class TrainerRun:
    """One run, from the lock on its directory on: one incarnation after the other, where peers come and go."""

    def __init__(self, job: Job, signals: Signals, mode: Mode, tensorboard: Path | None = None) -> None:
        """`tensorboard`: the folder for event files; None for none."""
        self._job = job
        self._signals = signals
        self._mode: Mode = mode
        self._tensorboard = tensorboard
        self._groups = group_specs(job)
        self._crew = Crew("trainer", signals.bell)
        self._health = Health(dead_stage=lambda: self._crew.dead_stage())
        self._counters = new_counters(self._groups)
        self._incarnation: Incarnation | None = None

    def run(self, *, fresh: bool, timeline: bool) -> None:
        """Returns when the run is finished or was stopped in order. Raises the first error of any stage."""
        refuse_several_ranks(os.environ.get("WORLD_SIZE", "1"))
        if self._tensorboard is not None:
            check_board(self._tensorboard)
        device = self._choose_device()
        with ExitStack() as stack:
            directory = stack.enter_context(RunDirectory(self._job.run_dir, "trainer"))
            if self._mode == "train":
                self._bring_back_results()
            if self._mode == "train" and not fresh:
                directory.refuse_complete(self._job.data.epochs)
            if timeline:
                self._counters.timeline = stack.enter_context(Timeline(self._job.run_dir, "trainer"))
            self._serve_metrics(stack)  # before the kernels, which may take a while: a port in use is told at once
            try:
                self._live(self._parts(device, fresh=fresh))
            except BaseException:
                self._health.state = "failed"
                raise

    def _parts(self, device: torch.device, *, fresh: bool) -> RunParts:
        threads = set_threads(self._job.trainer.threads)
        return RunParts(
            job=self._job,
            groups=self._groups,
            mode=self._mode,
            fresh=fresh,
            device=device,
            threads=threads,
            kernels=choose_kernels(device, self._job),  # while the prefetcher prepares, too
            tensorboard=self._tensorboard,
            signals=self._signals,
            health=self._health,
            counters=self._counters,
            history=History(self._counters),
            began=Beginnings(),
        )

    def _choose_device(self) -> torch.device:
        try:
            return choose_device(self._job.trainer.device)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _bring_back_results(self) -> None:
        """Of the run that is here, where a fresh one has set them aside and was killed."""
        newest = newest_checkpoint(self._job.run_dir)
        with suppress(DataError):
            if newest is not None:
                EarlierResults(self._job.run_dir).bring_back_of(read_manifest(newest).run_id)

    def _serve_metrics(self, stack: ExitStack) -> None:
        collector = TrainerCollector(
            self._counters, self._gauges, build_info("trainer", self._job.job.name), self._health
        )
        server = TelemetryServer("trainer", self._job.metrics, new_registry(collector), self._health)
        stack.enter_context(server)
        get_logger().info("serving metrics", address=server.address)

    def _gauges(self) -> TrainerGauges:
        if self._incarnation is not None:
            return self._incarnation.gauges()
        return TrainerGauges(train_step=0, learning_rates=learning_rates(self._job.optimizer, 0))

    def _live(self, parts: RunParts) -> None:
        patience = Patience("prefetcher", self._job.transport)
        while self._signals.stop_reason is None:
            self._incarnation = Incarnation(parts, patience.transport, self._crew)
            try:
                self._incarnation.live()
                return
            except PeerLost as error:
                patience.again(error)
                self._health.state = "connecting"
                self._crew = Crew("trainer", self._signals.bell)


def refuse_several_ranks(world_size: str) -> None:
    """`world_size`: what torchrun puts into the environment."""
    if world_size.strip() != "1":
        raise ConfigError(
            f"WORLD_SIZE = {world_size}, but training on several ranks is not supported yet; start one trainer alone"
        )


def set_threads(threads: int | str) -> int:
    """Threads of torch's operations; `auto` is one a core that this process may use. Returns their number."""
    number = usable_cores() if isinstance(threads, str) else threads
    torch.set_num_threads(1)
    warm_up_sqrt()
    torch.set_num_threads(number)
    return number


def run_trainer(
    job: Job,
    signals: Signals,
    *,
    fresh: bool = False,
    timeline: bool = False,
    mode: Mode = "train",
    tensorboard: Path | None = None,
) -> None:
    TrainerRun(job, signals, mode, tensorboard).run(fresh=fresh, timeline=timeline)
