"""Times a job's model as a whole."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rowcast.analysis.estimate.device_rates import ModelRates, model_fingerprint
from rowcast.analysis.estimate.rates.stopwatch import Stopwatch
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.job_model import JobModel


class TimedModel:
    """A job's model and one batch for it, made at random."""

    def __init__(self, job: Job, num_dense: int, batch: int, device: torch.device) -> None:
        self._side = JobModel(job, num_dense, device)
        self.weights = [weight.numel() for weight in self._side.model.parameters()]
        self._dense = torch.randn(batch, num_dense, device=device)
        self._labels = torch.randint(0, 2, (batch, *job.data.columns.label_shape), device=device).float()
        self._rows = [
            torch.randn(batch, table.width, device=device, requires_grad=True)
            for table in job.tables
            for _ in table.features
        ]
        self._loss: Tensor | None = None

    def forward(self) -> None:
        """The loss included."""
        for rows in self._rows:
            rows.grad = None
        self._side.optimizer.zero_grad(set_to_none=True)
        self._loss = self._side.loss(self._side.forward(self._dense, self._rows, {}, training=True), self._labels)

    def backward(self) -> None:
        assert self._loss is not None, "forward comes first"
        torch.autograd.backward(self._loss)

    def update(self) -> None:
        self._side.step(0)

    def up_to_backward(self) -> None:
        self.forward()
        self.backward()


def model_rates(watch: Stopwatch, job: Job, num_dense: int, batches: Sequence[int]) -> ModelRates:
    """Raises ConfigError for a model of sequences, whose time depends on their lengths."""
    for table in job.tables:
        if table.pooling == "none":
            raise ConfigError(
                f'table {table.name} has pooling = "none": the time of the model depends on the lengths of sequences, '
                "which are not known here; leave out --config"
            )
    models = [TimedModel(job, num_dense, batch, watch.device) for batch in batches]
    return ModelRates(
        fingerprint=model_fingerprint(job),
        batch=list(batches),
        forward=[watch.seconds(own.forward) for own in models],
        backward=[watch.seconds(own.backward, own.forward) for own in models],
        update=[watch.seconds(own.update, own.up_to_backward) for own in models],
        tensors=len(models[0].weights),
        parameters=sum(models[0].weights),
    )
