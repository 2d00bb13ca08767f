"""The model's side of a step: look up, forward, backward, update. Everything runs on the compute stream; nothing here reads a result."""

import time

import torch
from torch import Tensor

from protocol.job import Job
from protocol.tables import GroupSpec
from trainer.cache import ArrivedStep
from trainer.dense import Tensors, model_state, optimizer_state, random_state, restore_model, restore_optimizer, restore_random
from trainer.embedding import Embeddings, GroupLookup
from trainer.evaluate import EvalCounts, EvalMetrics
from trainer.metrics import Phase, Spent
from trainer.models import build_dense_optimizer, build_model, mean_loss

GROUP_ARRAYS = ("slots", "unique_slots", "segment_offsets", "bag_order", "lookup_order", "offsets", "weights")


class StepRunner:
    """Implements `loop.Runner` for a model over dense features and looked-up embeddings."""

    def __init__(
        self,
        job: Job,
        groups: tuple[GroupSpec, ...],
        records: list[Tensor],
        num_dense: int,
        spent: Spent = lambda phase, seconds, step, ended_s: None,
    ) -> None:
        """`records`: f32 [slots, record_floats] a group. `spent` is told the seconds that each phase took here; a device runs it later."""
        self.device = records[0].device
        self.model = build_model(job, num_dense).to(self.device)
        torch.manual_seed(job.job.seed)  # for a model that draws random numbers, such as dropout
        self._num_groups = len(groups)
        self._embeddings = Embeddings(groups, job.optimizer.sparse, records)
        self._optimizer = build_dense_optimizer(job, self.model.parameters())
        self._metrics = EvalMetrics(self.device)
        self._spent = spent
        self._clock_s = 0.0

    def train(self, step: ArrivedStep, loss: Tensor) -> None:
        self._clock_s = time.perf_counter()
        embeddings = self._embeddings(self._lookups(step), step.header.train_step)
        self._lap("lookup", step)
        self.model.train()
        mean = mean_loss(self.model(step.arrays["dense"], embeddings), step.arrays["labels"])
        self._lap("forward", step)
        torch.autograd.backward(mean)
        self._embeddings.finish_step()
        self._lap("backward", step)  # the rows' update included: it runs where autograd reaches the embeddings
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        loss.copy_(mean.detach(), non_blocking=True)
        self._lap("update", step)

    def evaluate(self, step: ArrivedStep) -> None:
        with torch.no_grad():
            embeddings = self._embeddings(self._lookups(step), step.header.train_step)
            self.model.eval()
            self._metrics.update(self.model(step.arrays["dense"], embeddings), step.arrays["labels"])

    def close_evaluation(self) -> EvalCounts:
        return self._metrics.close()

    def state(self) -> Tensors:
        """Of the model, its optimizer, random numbers and the evaluation in progress; every step issued is complete."""
        return {
            **model_state(self.model),
            **optimizer_state(self.model, self._optimizer),
            **random_state(self.device),
            **self._metrics.state(),
        }

    def restore(self, tensors: Tensors) -> bool:
        """Goes on from a `state`; what it lacks stays as it is. Whether an evaluation is in progress."""
        restore_model(self.model, tensors)
        restore_optimizer(self.model, self._optimizer, tensors)
        restore_random(self.device, tensors)
        return self._metrics.restore(tensors)

    def _lookups(self, step: ArrivedStep) -> list[GroupLookup]:
        return [
            GroupLookup(
                batch_size=step.header.batch_size,
                **{name: step.arrays[f"{group}.{name}"] for name in GROUP_ARRAYS if f"{group}.{name}" in step.arrays},
            )
            for group in range(self._num_groups)
        ]

    def _lap(self, phase: Phase, step: ArrivedStep) -> None:
        now_s = time.perf_counter()
        self._spent(phase, now_s - self._clock_s, step.step, now_s)
        self._clock_s = time.perf_counter()  # what telling took is of no phase


class EvaluationRunner(StepRunner):
    """Of `trainer eval`: takes a checkpoint's weights, and nothing of what was going on there."""

    def restore(self, tensors: Tensors) -> bool:
        restore_model(self.model, tensors)
        return False
