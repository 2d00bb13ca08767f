"""Computes a step with the job's model: issues look-up, forward, backward and update to the compute stream."""

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.protocol.messages import PlanHeader
from rowcast.protocol.plan_layout import LOOKUP_ARRAYS
from rowcast.trainer.device.streams import PhaseClock, Shown, Streams
from rowcast.trainer.kernels import Kernels
from rowcast.trainer.kernels.choose import choose_kernels
from rowcast.trainer.kernels.derived import Chunks
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
    """A runner's view of a step; implemented by `cache.Step`."""

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


class Runner:
    """A model and its evaluation: what runners of whole batches and of parts share. Implements `barrier.ModelState`."""

    trains = True
    needs_labels = True
    keeps_random_state = True

    def __init__(
        self,
        job: Job,
        device: torch.device,
        num_dense: int,
        clock: PhaseClock | None = None,
        kernels: Kernels | None = None,
        parts: int = 1,
    ) -> None:
        """`clock` times the steps' stream. `kernels`: None chooses those for the device."""
        self.device = device
        self._job = job
        self._clock: PhaseClock = clock or PhaseClock()
        self._side = JobModel(job, num_dense, device, trains=self.trains, needs_labels=self.needs_labels, parts=parts)
        self.model = self._side.model
        self.trained = [self.model, self._side.optimizer]
        self._kernels = kernels or choose_kernels(device, job)
        self._metrics = EvalMetrics(device, parts, len(job.data.columns.labels))

    def count(self, step: int, outputs: Any, labels: Tensor, part: int = 0) -> None:
        """Adds the outputs of an evaluation step, or of one of its parts, to the metrics."""
        self._side.count(self._metrics, outputs, labels, part)

    def completed(self, step: int) -> None:
        pass

    def issue_state(self, streams: Streams) -> None:
        pass

    def state(self) -> Tensors:
        """The state of model, optimizer, random numbers and evaluation; called when every issued step is complete."""
        return {
            **model_state(self.model),
            **optimizer_state(self.model, self._side.optimizer),
            **(random_state(self.device) if self.keeps_random_state else {}),
            **self._metrics.state(),
        }

    def restore(self, tensors: Tensors) -> bool:
        """Continues from a `state`; does not change what it lacks. Returns whether an evaluation is in progress. To
        evaluate, restores only weights."""
        restore_model(self.model, tensors)
        if not self.trains:
            return False
        restore_optimizer(self.model, self._side.optimizer, tensors)
        if self.keeps_random_state:
            restore_random(self.device, tensors)
        return self._metrics.restore(tensors)


class StepRunner(Runner):
    """Implements `loop.Steps` for whole batches of dense features and embeddings."""

    def __init__(
        self,
        job: Job,
        groups: tuple[GroupSpec, ...],
        records: list[Tensor],
        num_dense: int,
        clock: PhaseClock | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """`records`: f32 [slots, record_floats] of each group."""
        super().__init__(job, records[0].device, num_dense, clock, kernels)
        self._embeddings = Embeddings(groups, records, self._kernels, self._clock.lap)

    def issue_train(self, streams: Streams, step: StepInputs, loss: Tensor) -> None:
        streams.compute.run(lambda: self.train(step, loss))

    def issue_evaluate(self, streams: Streams, step: StepInputs, shown: Shown) -> None:
        def evaluate() -> None:
            with shown():
                self.evaluate(step)

        streams.compute.run(evaluate)

    def issue_close(self, streams: Streams, closed: list[EvalCounts]) -> None:
        streams.compute.run(lambda: closed.append(self._metrics.close()))

    def train(self, step: StepInputs, loss: Tensor) -> None:
        self._clock.begin(step.step)
        embeddings = self._embeddings(step_lookups(step), step.header.train_step)
        self._clock.lap("lookup")
        outputs = self._side.forward(step.arrays["dense"], embeddings, named_inputs(step.arrays), training=True)
        mean = self._side.loss(outputs, step.arrays["labels"])
        # a copy to the host as the step's last work would hold up the next step behind copies of rows that leave
        loss.copy_(mean.detach(), non_blocking=True)
        self._clock.lap("forward")
        torch.autograd.backward(mean)
        self._embeddings.finish_step()
        self._clock.lap("backward")
        self._side.step(step.header.train_step)
        self._clock.lap("update")

    def evaluate(self, step: StepInputs) -> None:
        with torch.no_grad():
            embeddings = self._embeddings(step_lookups(step), step.header.train_step)
            outputs = self._side.forward(step.arrays["dense"], embeddings, named_inputs(step.arrays), training=False)
            self.count(step.step, outputs, step.arrays["labels"])


class EvaluationRunner(StepRunner):
    """The runner of `trainer eval`."""

    trains = False
