"""What a run keeps of its script: state in checkpoints, and evaluations.

adopted.<n>.<number>    tensors of the n-th of the script's objects, as in trainer/models/model_state.py
adopted.structure       u8, JSON: the nesting around the tensors
adopted.epochs_over     i64: epochs whose `for` loop has ended in the script
random.cpu, ...         torch's random state, as in trainer/models/model_state.py
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.runtime.checkpoint_manifest import Position
from rowcast.runtime.errors import Mismatch
from rowcast.trainer.device.streams import Streams
from rowcast.trainer.models.evaluate import EvalMetrics, Evaluation
from rowcast.trainer.models.model_state import Stateful, StatefulObjects, Tensors, random_state, restore_random
from rowcast.trainer.report.results import ResultsInMemory

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
        self.evaluating = False  # logits were recorded since the last evaluation was closed
        self.epochs = EpochCount()
        self._job = job
        self._metrics = EvalMetrics(device, num_labels=len(job.data.columns.labels))
        self._dense = dense
        self.trained = () if dense is None else dense.parts

    def record(self, logits: Tensor, labels: Tensor) -> None:
        """`logits` and `labels`: f32 [size], or [size, T] with several labels, of an evaluation batch."""
        self._metrics.update(logits, labels)
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


class ScriptResults(ResultsInMemory):
    """Keeps the evaluations of what the script records."""

    def state(self) -> Tensors:
        return super().state() if self.evaluations else {}
