"""What a run keeps of its script: state in checkpoints, losses and evaluations, and the metrics and report of them.

adopted.<n>.<number>    tensors of the n-th of the script's objects, as in trainer/models/user_objects.py
adopted.structure       u8, JSON: the nesting around the tensors
adopted.epochs_over     i64: epochs whose `for` loop has ended in the script
random.cpu, ...         torch's random state, as in trainer/models/model_state.py
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import numpy as np
import torch
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.protocol.messages import Welcome
from rowcast.protocol.scrape import serve_metrics
from rowcast.runtime.checkpoint_manifest import Position
from rowcast.runtime.errors import Mismatch
from rowcast.runtime.telemetry.logs import print_line
from rowcast.runtime.telemetry.metrics import Health, build_info
from rowcast.trainer.device.streams import Streams
from rowcast.trainer.models.evaluate import EvalMetrics, Evaluation
from rowcast.trainer.models.model_state import Tensors, random_state, restore_random
from rowcast.trainer.models.user_objects import Stateful, StatefulObjects
from rowcast.trainer.report.final_report import final_record, final_report
from rowcast.trainer.report.page import write_page
from rowcast.trainer.report.progress import History
from rowcast.trainer.report.report_json import write_report
from rowcast.trainer.report.results import PAGE, REPORT, EarlierResults, ResultFiles
from rowcast.trainer.run.rank_group import Group, gathered_report
from rowcast.trainer.step.engine import TrainerCollector, TrainerEngine, TrainerGauges, learning_rates
from rowcast.trainer.step.metrics import TrainerCounters

COMPLETED_EPOCHS = "adopted.epochs_over"


class ScriptObjects(StatefulObjects):
    def __init__(
        self,
        parts: Sequence[Stateful],
        device: torch.device,
        without_tables: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`without_tables`: a context in which a model's state omits the tables."""
        super().__init__(parts, "adopted", "connect: dense")
        self._device, self._without_tables = device, without_tables

    def state(self) -> Tensors:
        with self._without_tables():
            return {**super().state(), **random_state(self._device)}

    def restore(self, tensors: Tensors) -> bool:
        """Raises Mismatch if the tensors are not the states of these objects."""
        with self._without_tables():
            if not super().restore(tensors):
                raise Mismatch(
                    "the checkpoint has no state of a training script; connect with fresh=True, or continue it by "
                    "`trainer run`"
                )
        restore_random(self._device, tensors)
        return True


class EpochCount:
    """Counts the epochs of a script's `for` loops, also for a run that continues within or right after an epoch.

    checkpoint within epoch 1             | rest of 1 | 2 | 3 |
    after its last batch, in the loop     | (empty)   | 2 | 3 |      the script then does its work after an epoch
    after its `for` loop                  | 2 | 3 |
    """

    def __init__(self) -> None:
        self.first = 0  # the first epoch of this process
        self.completed = 0  # epochs whose `for` loop has ended; a checkpoint holds it
        self._start: Position | None = None  # the checkpoint's, until the first `for` loop has found its epoch

    def begin(self, start: Position | None) -> None:
        """`start`: the position of the checkpoint that the run continues from."""
        self._start, self.first = start, 0 if start is None else start.epoch

    def next(self, following: int | None) -> int | None:
        """The epoch of the next `for` loop, None if there is none. `following`: the epoch of the next batch."""
        start = self._start
        return start.epoch if start is not None and self._has_empty_rest(start, following) else following

    def consume_finished(self, following: int | None) -> bool:
        """Returns whether the next `for` loop is the empty rest of the checkpoint's epoch. Only the first call can
        return True."""
        start, self._start = self._start, None
        if start is None or not self._has_empty_rest(start, following):
            return False
        self.end(start.epoch)
        return True

    def end(self, epoch: int) -> None:
        self.completed = epoch + 1

    def _has_empty_rest(self, start: Position, following: int | None) -> bool:
        has_begun = start.train_batch > 0 or start.eval_batch is not None
        return has_begun and (following is None or start.epoch < following) and self.completed <= start.epoch


class ScriptState:
    """Implements `barrier.ModelState`."""

    def __init__(self, dense: ScriptObjects | None, device: torch.device, job: Job) -> None:
        self.evaluating = False  # logits or ranks were recorded since the last evaluation was closed
        self.epochs = EpochCount()
        self._job = job
        self._metrics = EvalMetrics(device, num_labels=len(job.data.columns.labels))
        self._dense = dense
        self.trained = () if dense is None else dense.parts

    def record(self, logits: Tensor, labels: Tensor) -> None:
        """`logits` and `labels`: f32 [size], or [size, T] with several labels, of an evaluation batch."""
        self._metrics.update(logits, labels)
        self.evaluating = True

    def record_ranks(self, ranks: Tensor) -> None:
        """`ranks`: i64, of any number of positives of an evaluation batch."""
        self._metrics.update_ranks(ranks)
        self.evaluating = True

    def close_evaluation(self, train_steps: int) -> Evaluation | None:
        """Returns the result of what was recorded, None without any, and begins the next evaluation. Waits for the
        device."""
        self.evaluating = False
        result = self._metrics.counts.result(train_steps, self._job.data.columns.labels, self._job.eval.ranks)
        self._metrics.clear()
        return result

    def issue_state(self, streams: Streams) -> None:
        pass

    def state(self) -> Tensors:
        if self._dense is None:
            return {}
        return {
            **self._dense.state(),
            COMPLETED_EPOCHS: torch.tensor(self.epochs.completed, device="cpu"),
            **self._metrics.state(),
        }

    def restore(self, tensors: Tensors) -> bool:
        if self._dense is not None:
            self._dense.restore(tensors)
        self.epochs.completed = int(tensors[COMPLETED_EPOCHS]) if COMPLETED_EPOCHS in tensors else 0
        self.evaluating = self._metrics.restore(tensors)
        return False


class ScriptResults(ResultFiles):
    """Keeps the losses and evaluations that the script records."""

    _has_warned = False

    def loss(self, train_step: int, loss: np.float32) -> None:
        if train_step == self.train_steps:
            super().loss(train_step, loss)
        elif not self._has_warned:
            self._has_warned = True
            print_line(
                f"only the losses of the first {self.train_steps} train steps are kept: record(loss=...) was called "
                f"for train step {train_step}, but not for all before it"
            )

    def state(self) -> Tensors:
        return super().state() if self.train_steps or self.evaluations else {}

    def close(self) -> None:
        super().close()
        if not self.train_steps:
            self.path.unlink(missing_ok=True)  # without losses there is no file


class ScriptTelemetry:
    """Serves the metrics and health of a script's run, and writes its report at the end."""

    def __init__(self, job: Job, counters: TrainerCounters, dead_stage: Callable[[], str | None]) -> None:
        self.health = Health(dead_stage=dead_stage)
        self.results = ScriptResults(job.run_dir)
        self.train_steps = 0  # finished train steps of the run
        self._earlier = EarlierResults(job.run_dir)
        self._job, self._counters = job, counters
        self._history = History(counters)
        self._welcome: Welcome | None = None
        self._engine: TrainerEngine | None = None
        self._met_s = 0.0

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

    def begin(self, engine: TrainerEngine) -> None:
        assert self._welcome is not None, "accept comes before begin"
        self._engine, self._met_s = engine, time.perf_counter()
        self.train_steps = self._welcome.first_train_step
        self._history.begin(self.train_steps)
        self.health.state = "running"

    def update(self, engine: TrainerEngine) -> None:
        """Updates the figures. Cheap enough to call often: one reading of the clock."""
        self._history.update(engine.loop.first_step_s)

    def write(self, group: Group) -> None:
        """Writes losses, and the report of all ranks, before the good-bye. Raises RowcastError if they cannot be
        written."""
        engine, welcome = self._engine, self._welcome
        assert engine is not None, "a run that ends has begun"
        assert welcome is not None, "a run that ends has begun"
        self._history.close(engine.loop.first_step_s)
        own = final_report(
            engine,
            welcome,
            self.results,
            train_steps=self.train_steps,
            met_s=self._met_s,
            first_step_s=engine.loop.first_step_s,
        )
        report = gathered_report(group, own)
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
