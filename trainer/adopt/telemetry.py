"""Serves the metrics and health of a script's run, and writes its report at the end."""

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from rowcast.job.schema import Job
from rowcast.protocol.messages import Welcome
from rowcast.protocol.scrape import serve_metrics
from rowcast.runtime.telemetry.metrics import Health, build_info
from rowcast.trainer.adopt.script_state import ScriptResults
from rowcast.trainer.report.final_report import final_record, final_report
from rowcast.trainer.report.page import write_page
from rowcast.trainer.report.progress import History
from rowcast.trainer.report.report_json import write_report
from rowcast.trainer.report.results import PAGE, REPORT, EarlierResults
from rowcast.trainer.step.engine import TrainerCollector, TrainerEngine, TrainerGauges, learning_rates
from rowcast.trainer.step.metrics import TrainerCounters


class ScriptTelemetry:
    def __init__(
        self, job: Job, device: torch.device, counters: TrainerCounters, dead_stage: Callable[[], str | None]
    ) -> None:
        self.health = Health(dead_stage=dead_stage)
        self.results = ScriptResults(job.run_dir)
        self.train_steps = 0  # finished train steps of the run
        self._earlier = EarlierResults(job.run_dir)
        self._job, self._device, self._counters = job, device, counters
        self._history = History(counters)
        self._welcome: Welcome | None = None
        self._engine: TrainerEngine | None = None
        self._pinned, self._met_s = False, 0.0

    def serve(self, stack: ExitStack) -> str:
        """Serves until `stack` is closed; returns the bound "host:port". Raises ConfigError if it cannot be bound."""
        collector = TrainerCollector(
            self._counters, self._gauges, build_info("trainer", self._job.job.name), self.health
        )
        return serve_metrics(stack, collector, self._job.metrics)

    def accept(self, welcome: Welcome) -> None:
        """Sets aside the results of an earlier run, which `leave` restores if this run ends without a checkpoint."""
        self._welcome = welcome
        self._earlier.begin(welcome)

    def begin(self, engine: TrainerEngine, *, pinned: bool) -> None:
        assert self._welcome is not None, "accept comes before begin"
        self._engine, self._pinned, self._met_s = engine, pinned, time.perf_counter()
        self.train_steps = self._welcome.first_train_step
        self._history.begin(self.train_steps)
        self.health.state = "running"

    def update(self, engine: TrainerEngine) -> None:
        """Updates the figures. Cheap enough to call often: one reading of the clock."""
        self._history.update(engine.loop.first_step_s)

    def write(self) -> None:
        """Writes losses and report, before the good-bye. Raises RowcastError if they cannot be written."""
        engine, welcome = self._engine, self._welcome
        assert engine is not None, "a run that ends has begun"
        assert welcome is not None, "a run that ends has begun"
        self._history.close(engine.loop.first_step_s)
        report = final_report(
            engine,
            welcome,
            self.results,
            train_steps=self.train_steps,
            device=self._device,
            pinned=self._pinned,
            met_s=self._met_s,
            first_step_s=engine.loop.first_step_s,
        )
        self.results.close()
        write_report(self._job.run_dir / REPORT, report)
        write_page(self._job.run_dir / PAGE, final_record(self._job, report, self.results, self._history))

    def leave(self) -> None:
        if self.health.state != "stopped":
            self.health.state = "failed"
        engine, self._engine = self._engine, None  # which must not be kept
        if self._welcome is not None:
            has_checkpoint = engine is not None and engine.barrier.has_checkpoint
            self._earlier.end(self._welcome, has_checkpoint=has_checkpoint)

    def _gauges(self) -> TrainerGauges:
        steps = self.train_steps
        idle = TrainerGauges(
            train_step=steps,
            # the script has the dense optimizer
            learning_rates={"sparse": learning_rates(self._job.optimizer, steps)["sparse"]},
            expected_train_steps=None if self._engine is None or self._welcome is None else self._welcome.train_steps,
            evaluation=self.results.evaluation_result,
        )
        return idle if self._engine is None else self._engine.gauges(idle)
