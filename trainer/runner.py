"""The model's side of a step: look up, forward, backward, update. Everything runs on the compute stream; nothing here reads a result."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from protocol.errors import RowcastError
from protocol.job import Job
from protocol.manifest import file_checksum, write_durably
from protocol.messages import Saved
from protocol.tables import GroupSpec
from trainer.cache import ArrivedStep
from trainer.embedding import Embeddings, GroupLookup
from trainer.evaluate import EvalCounts, EvalMetrics
from trainer.metrics import Phase
from trainer.models import build_dense_optimizer, build_model, mean_loss

DENSE_FILE = "dense.safetensors"
GROUP_ARRAYS = ("slots", "unique_slots", "segment_offsets", "bag_order", "lookup_order", "offsets", "weights")


class StepRunner:
    """Implements `loop.Runner` for a model over dense features and looked-up embeddings."""

    def __init__(
        self,
        job: Job,
        groups: tuple[GroupSpec, ...],
        records: list[Tensor],
        num_dense: int,
        spent: Callable[[Phase, float], None] = lambda phase, seconds: None,
    ) -> None:
        """`records`: f32 [slots, record_floats] a group. `spent` is told the seconds of each phase, where the device runs at once."""
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
        self._lap("lookup")
        self.model.train()
        mean = mean_loss(self.model(step.arrays["dense"], embeddings), step.arrays["labels"])
        self._lap("forward")
        torch.autograd.backward(mean)
        self._embeddings.finish_step()
        self._lap("backward")  # the rows' update included: it runs where autograd reaches the embeddings
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        loss.copy_(mean.detach(), non_blocking=True)
        self._lap("update")

    def evaluate(self, step: ArrivedStep) -> None:
        with torch.no_grad():
            embeddings = self._embeddings(self._lookups(step), step.header.train_step)
            self.model.eval()
            self._metrics.update(self.model(step.arrays["dense"], embeddings), step.arrays["labels"])

    def close_evaluation(self) -> EvalCounts:
        return self._metrics.close()

    def save(self, folder: Path) -> Saved:
        """Dense weights as `model.<name>`, their optimizer's state as `optimizer.<name>.<state>`."""
        names = [name for name, _ in self.model.named_parameters()]
        content = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, state in self._optimizer.state_dict()["state"].items():
            content |= {f"optimizer.{names[index]}.{key}": torch.as_tensor(value) for key, value in state.items() if value is not None}
        path = folder / DENSE_FILE
        try:
            write_durably(path, save({name: own_copy(tensor) for name, tensor in content.items()}))
        except OSError as error:
            raise RowcastError(f"{path}: the dense side of the checkpoint could not be written ({error.strerror}); free space") from None
        nbytes, checksum = file_checksum(path)
        return Saved(barrier=0, file=DENSE_FILE, nbytes=nbytes, checksum=checksum)

    def _lookups(self, step: ArrivedStep) -> list[GroupLookup]:
        return [
            GroupLookup(
                batch_size=step.header.batch_size,
                **{name: step.arrays[f"{group}.{name}"] for name in GROUP_ARRAYS if f"{group}.{name}" in step.arrays},
            )
            for group in range(self._num_groups)
        ]

    def _lap(self, phase: Phase) -> None:
        now_s = time.perf_counter()
        self._spent(phase, now_s - self._clock_s)
        self._clock_s = now_s


def own_copy(tensor: Tensor) -> Tensor:
    """On the host and sharing no memory, as safetensors wants it even of tied weights."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
