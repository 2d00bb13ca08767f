"""Serves the metrics and health of a script's run, and writes its report at the end."""

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from rowcast.job.schema import Job
from rowcast.protocol.counters import serve_metrics
from rowcast.protocol.messages import Welcome
from rowcast.runtime.telemetry.build import build_info
from rowcast.runtime.telemetry.health import Health
from rowcast.trainer.adopt.script_state import ScriptResults
from rowcast.trainer.execute.engine import TrainerEngine
from rowcast.trainer.execute.metrics import TrainerCollector, TrainerCounters, TrainerGauges
from rowcast.trainer.report.final_report import final_record, final_report
from rowcast.trainer.report.history import History
from rowcast.trainer.report.page.page import write_page
from rowcast.trainer.report.report_json import write_report
from rowcast.trainer.report.results import PAGE, REPORT, EarlierResults
from rowcast.trainer.run.gauges import engine_gauges, learning_rates


class ScriptTelemetry:
    def __init__(
        self, job: Job, device: torch.device, counters: TrainerCounters, dead_stage: Callable[[], str | None]
    ) -> None:
        self.health = Health(dead_stage=dead_stage)
        self.results = ScriptResults(job.run_dir)
        self.train_steps = 0  # train steps of the run that are finished
        self._earlier = EarlierResults(job.run_dir)
        self._job, self._device, self._counters = job, device, counters
        self._history = History(counters)
        self._met: tuple[TrainerEngine, Welcome, bool] | None = None
        self._met_s = 0.0

    def serve(self, stack: ExitStack) -> str:
        """Serves until `stack` is closed; returns the bound "host:port". Raises ConfigError if it cannot be bound."""
        collector = TrainerCollector(
            self._counters, self._gauges, build_info("trainer", self._job.job.name), self.health
        )
        return serve_metrics(stack, collector, self._job.metrics)

    def accept(self, welcome: Welcome) -> None:
        """Sets aside the results of an earlier run, which `leave` restores if this run ends without a checkpoint."""
        if welcome.fresh:
            self._earlier.set_aside(welcome.replaces)
            return
        self._earlier.give_up()
        for name in (REPORT, PAGE):
            (self._job.run_dir / name).unlink(missing_ok=True)  # written by this run before it was stopped

    def begin(self, engine: TrainerEngine, welcome: Welcome, *, pinned: bool) -> None:
        self._met, self._met_s = (engine, welcome, pinned), time.perf_counter()
        self.train_steps = welcome.first_train_step
        self._history.begin(welcome.first_train_step)
        self.health.state = "running"

    def update(self, engine: TrainerEngine) -> None:
        """Called often: it costs one reading of the clock."""
        self._history.update(engine.loop.first_step_s)

    def write(self) -> None:
        """Writes losses and report, before the good-bye. Raises RowcastError if they cannot be written."""
        assert self._met is not None, "a run that ends has begun"
        engine, welcome, pinned = self._met
        self._history.close(engine.loop.first_step_s)
        report = final_report(
            engine,
            welcome,
            self.results,
            train_steps=self.train_steps,
            device=self._device,
            threads=torch.get_num_threads(),
            pinned=pinned,
            met_s=self._met_s,
            first_step_s=engine.loop.first_step_s,
        )
        self.results.close()
        write_report(self._job.run_dir / REPORT, report)
        write_page(self._job.run_dir / PAGE, final_record(self._job, report, self.results, self._history))

    def leave(self) -> None:
        if self.health.state != "stopped":
            self.health.state = "failed"
        met, self._met = self._met, None  # the engine, which may not stay
        if met is None or not met[1].fresh:
            return
        if met[0].barrier.has_checkpoint:
            self._earlier.give_up()
        else:
            self._earlier.bring_back()

    def _gauges(self) -> TrainerGauges:
        evaluation, steps = self.results.evaluation_result, self.train_steps
        idle = TrainerGauges(
            train_step=steps,
            # the script has the dense optimizer
            learning_rates={"sparse": learning_rates(self._job.optimizer, steps)["sparse"]},
            expected_train_steps=None if self._met is None else self._met[1].train_steps,
            auc=None if evaluation is None else evaluation.auc,
            logloss=None if evaluation is None else evaluation.logloss,
            accuracy=None if evaluation is None else evaluation.accuracy,
            tasks=() if evaluation is None else evaluation.tasks,
        )
        return idle if self._met is None else engine_gauges(idle, self._met[0])
