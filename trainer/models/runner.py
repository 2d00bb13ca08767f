"""Computes a step with the job's model: issues look-up, forward, backward and update to the compute stream."""

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.protocol.messages import PlanHeader
from rowcast.protocol.plan_layout import LOOKUP_ARRAYS
from rowcast.trainer.device.phases import HostClock, PhaseClock, Shown
from rowcast.trainer.device.streams import Streams
from rowcast.trainer.kernels import Kernels
from rowcast.trainer.kernels.choose import choose_kernels
from rowcast.trainer.kernels.chunks import Chunks
from rowcast.trainer.models.embedding import Embeddings, GroupLookup
from rowcast.trainer.models.evaluate import EvalCounts, EvalMetrics
from rowcast.trainer.models.job_model import JobModel, named_inputs
from rowcast.trainer.models.model_state import (
    Tensors,
    model_state,
    optimizer_state,
    random_state,
    restore_model,
    restore_optimizer,
    restore_random,
)

LOOKUP_FIELDS = tuple(LOOKUP_ARRAYS)


class StepInputs(Protocol):
    """A runner's view of a step; implemented by `cache.ArrivedStep`."""

    @property
    def step(self) -> int: ...

    @property
    def header(self) -> PlanHeader: ...

    @property
    def arrays(self) -> dict[str, Tensor]:
        """Arrays on the device, by name."""


@cache
def array_names(group: int, fields: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each field with the name of the group's array."""
    return [(field, f"{group}.{field}") for field in fields]


def step_lookups(step: StepInputs) -> list[GroupLookup]:
    arrays = step.arrays
    return [
        GroupLookup(
            batch_size=step.header.batch_size,
            sequence_lookups=header.sequence_lookups,
            chunks=Chunks(*[arrays[name] for _, name in array_names(group, Chunks._fields)]),
            **{field: arrays[name] for field, name in array_names(group, LOOKUP_FIELDS) if name in arrays},
        )
        for group, header in enumerate(step.header.groups)
    ]


class StepRunner:
    """Implements `loop.Steps` and `loop.ModelState` for a model over dense features and embeddings."""

    trains = True
    needs_labels = True

    def __init__(
        self,
        job: Job,
        groups: tuple[GroupSpec, ...],
        records: list[Tensor],
        num_dense: int,
        clock: PhaseClock | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """`records`: f32 [slots, record_floats] of each group. `kernels`: None chooses those for the device.

        `clock` times the steps' stream."""
        self.device = records[0].device
        self._clock: PhaseClock = clock or HostClock()
        self._side = JobModel(job, num_dense, self.device, trains=self.trains, needs_labels=self.needs_labels)
        self.model = self._side.model
        self.trained = [self.model, self._side.optimizer]
        kernels = kernels or choose_kernels(self.device, job)
        self._embeddings = Embeddings(groups, job.optimizer.sparse, records, kernels, self._clock.lap)
        self._metrics = EvalMetrics(self.device, num_labels=len(job.data.columns.labels))

    def issue_train(self, streams: Streams, step: StepInputs, loss: Tensor) -> None:
        streams.compute.run(lambda: self.train(step, loss))

    def issue_evaluate(self, streams: Streams, step: StepInputs, shown: Shown) -> None:
        def evaluate() -> None:
            with shown():
                self.evaluate(step)

        streams.compute.run(evaluate)

    def issue_close(self, streams: Streams, closed: list[EvalCounts]) -> None:
        streams.compute.run(lambda: closed.append(self.close_evaluation()))

    def completed(self, step: int) -> None:
        pass

    def train(self, step: StepInputs, loss: Tensor) -> None:
        self._clock.begin(step.step)
        embeddings = self._embeddings(step_lookups(step), step.header.train_step)
        self._clock.lap("lookup")
        outputs = self._side.forward(step.arrays["dense"], embeddings, named_inputs(step.arrays), training=True)
        mean = self._side.loss(outputs, step.arrays["labels"])
        self._clock.lap("forward")
        torch.autograd.backward(mean)
        self._embeddings.finish_step()
        self._clock.lap("backward")
        self._side.step(step.header.train_step)
        loss.copy_(mean.detach(), non_blocking=True)
        self._clock.lap("update")

    def evaluate(self, step: StepInputs) -> None:
        with torch.no_grad():
            embeddings = self._embeddings(step_lookups(step), step.header.train_step)
            inputs = named_inputs(step.arrays)
            self.count(step, self._side.forward(step.arrays["dense"], embeddings, inputs, training=False))

    def count(self, step: StepInputs, outputs: Any) -> None:
        """Adds the outputs of an evaluation step to the metrics."""
        labels = step.arrays["labels"]
        loss = None if self._side.own_loss is None else self._side.loss(outputs, labels)
        self._metrics.update(self._side.logits(outputs), labels, loss)
        self._metrics.update_ranks(self._side.ranks(outputs))

    def close_evaluation(self) -> EvalCounts:
        return self._metrics.close()

    def issue_state(self, streams: Streams) -> None:
        pass

    def state(self) -> Tensors:
        """The state of model, optimizer, random numbers and evaluation; called when every issued step is complete."""
        return {
            **model_state(self.model),
            **optimizer_state(self.model, self._side.optimizer),
            **random_state(self.device),
            **self._metrics.state(),
        }

    def restore(self, tensors: Tensors) -> bool:
        """Continues from a `state`; does not change what it lacks. Returns whether an evaluation is in progress."""
        restore_model(self.model, tensors)
        restore_optimizer(self.model, self._side.optimizer, tensors)
        restore_random(self.device, tensors)
        return self._metrics.restore(tensors)


class EvaluationRunner(StepRunner):
    """The runner of `trainer eval`: restores only a checkpoint's weights."""

    trains = False

    def restore(self, tensors: Tensors) -> bool:
        restore_model(self.model, tensors)
        return False
