"""Builds models and their dense optimizers.

Every model is called as `model(dense, embeddings) -> logits`: dense f32 [B, num_dense]; embeddings, a list of
f32 [B, D_f], one per feature in the job's feature order, or `Sequences` for a feature that is not pooled; logits
f32 [B], or the input of its `loss`. If a table has linear weights, it is called as `model(dense, embeddings, linear)`:
a list of f32 [B, 1], one per feature of such a table. If the data has arrays, they come as the keyword `inputs`.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss, mse_loss
from torch.optim import Optimizer

from rowcast.job.models import BUILT_IN_MODELS, BuiltInModel, ModelSettings
from rowcast.job.named_code import import_code
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.embedding import Embedded, Sequences, align_inputs

__all__ = ["Embedded", "Sequences", "build_dense_optimizer", "build_model"]


def build_model(job: Job, num_dense: int) -> nn.Module:
    """Builds the job's model on the CPU, as a function of only the job file.

    Its random numbers come from job.seed; the global random state does not change. Raises ConfigError if the factory
    named by `model.kind` returns no model."""
    built_in = BUILT_IN_MODELS.get(job.model.kind)
    model = build_custom(job, num_dense) if built_in is None else built_in_factory(built_in)(job, num_dense)
    if job.model.task == "regression":
        model = regression_of(model, job.model)
    model.register_forward_pre_hook(align_inputs)
    return model


def built_in_factory(model: BuiltInModel) -> Callable[[Job, int], nn.Module]:
    module, _, name = model.factory.partition(":")
    factory: Callable[[Job, int], nn.Module] = getattr(import_module(module), name)
    return factory


def build_dense_optimizer(job: Job, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Builds an optimizer of torch.optim. On a device, torch updates all tensors in a few launches (`foreach`)."""
    settings = job.optimizer.dense
    assert settings is not None, "the job file trains the dense weights"
    settings_of_torch: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.kind == "sgd":
        return without_dynamo(torch.optim.SGD)(parameters, momentum=settings.momentum, **settings_of_torch)
    if settings.eps is not None:
        settings_of_torch["eps"] = settings.eps
    if settings.kind == "adagrad":
        kind = without_dynamo(torch.optim.Adagrad)
        return kind(parameters, initial_accumulator_value=settings.initial_accumulator, **settings_of_torch)
    kind = without_dynamo(torch.optim.AdamW if settings.kind == "adamw" else torch.optim.Adam)
    return kind(parameters, betas=settings.betas, **settings_of_torch)


METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


@cache
def without_dynamo(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    """Returns a kind of torch.optim, under its name, whose methods import no torch._dynamo.

    torch imports it when the first optimizer is made and when it first steps, even if nothing is compiled: decorators
    of these methods do that, and it takes as long as the import of torch itself. The methods below the decorators are
    torch's own, and so are bits, hooks and state dictionaries."""
    methods = {name: unwrap(getattr(kind, name)) for name in METHODS}
    return type(kind.__name__, (kind,), {**methods, "step": torch.no_grad()(unwrap(kind.step))})


class Regression(nn.Module):
    """Mixed into the class of a built-in model with one logit a sample: its logit becomes a number in the unit of the
    labels."""

    eval_names = ("rmse", "mae")
    settings: ModelSettings

    def forward(self, *given: Any, **inputs: Any) -> Tensor:
        """Returns predictions f32 [B]; arguments as the model's."""
        mean, deviation = self.settings.target
        predicted: Tensor = mean + deviation * super().forward(*given, **inputs).float()
        return predicted

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """f32 []: the mean squared or Huber error in deviations of the labels. outputs, labels: f32 [B]."""
        mean, deviation = self.settings.target
        function = huber_loss if self.settings.error == "huber" else mse_loss
        return function((outputs - mean) / deviation, (labels - mean) / deviation)

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled, (type(self).__mro__[2], self.settings), self.__dict__

    def eval_sums(self, outputs: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, int]]:
        errors = outputs.double() - labels.double()
        return {"rmse": (errors.square().sum(), len(labels)), "mae": (errors.abs().sum(), len(labels))}


def regression_of(model: nn.Module, settings: ModelSettings) -> nn.Module:
    """Returns the model, whose parameters keep their names."""
    model.__class__ = type(f"{type(model).__name__}Regression", (Regression, type(model)), {"settings": settings})
    return model


def unpickled(kind: type[nn.Module], settings: ModelSettings) -> nn.Module:
    return regression_of(kind.__new__(kind), settings)


OwnLoss = Callable[[Any, Tensor], Tensor]


def own_loss(model: nn.Module) -> OwnLoss | None:
    """Returns the model's `loss(outputs, labels)`, checked at each call, or None if it has none. Raises ConfigError."""
    loss = getattr(model, "loss", None)
    if not callable(loss):
        return None
    try:
        inspect.signature(loss).bind("outputs", "labels")
    except TypeError as error:
        raise ConfigError(
            f"{type(model).__name__}.loss cannot be called with (outputs, labels): {error}; let it take these two, or "
            "give it another name"
        ) from None

    def checked(outputs: Any, labels: Tensor) -> Tensor:
        return require_scalar(loss(outputs, labels), f"{type(model).__name__}.loss")

    return checked


def require_scalar(mean: Any, name: str) -> Tensor:
    """Raises ConfigError for a loss that cannot be trained on."""
    if mean is None:
        raise ConfigError(
            f"{name} returned None, and every batch is trained; leave a sample out by a weight of 0 in the mean, and a "
            "batch by the data set that yields it"
        )
    if not isinstance(mean, Tensor) or mean.dim() or not mean.is_floating_point():
        returned = f"{mean.dtype} of shape {list(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
        raise ConfigError(
            f"{name} returned {returned}; return the batch's mean loss as a scalar tensor, such as losses.mean()"
        )
    if torch.is_grad_enabled() and not mean.requires_grad:
        raise ConfigError(
            f"{name} returned a loss without a gradient; compute it from the outputs by torch's operations, without "
            "detach()"
        )
    return mean


def as_fp32(outputs: Any) -> Any:
    """Converts every floating-point tensor of a model's outputs to fp32."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.is_floating_point() else outputs
    if isinstance(outputs, Mapping):
        return {name: as_fp32(output) for name, output in outputs.items()}
    if isinstance(outputs, list | tuple):
        values = [as_fp32(output) for output in outputs]
        return type(outputs)(*values) if hasattr(outputs, "_fields") else type(outputs)(values)
    return outputs


def build_custom(job: Job, num_dense: int) -> nn.Module:
    """Calls `factory(job, num_dense, **job.model.options)` with torch's random state seeded by job.seed.

    Raises ConfigError."""
    factory = import_code(job, "model.kind")
    try:
        inspect.signature(factory).bind(job, num_dense, **job.model.options)
    except TypeError as error:
        raise ConfigError(
            f"model.kind = {job.model.kind!r}: the factory cannot be called with (job, num_dense, **model.options): "
            f"{error}"
        ) from None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(job.job.seed)
        model = factory(job, num_dense, **job.model.options)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.kind = {job.model.kind!r} returned {type(model).__name__}; the factory must return a "
            "torch.nn.Module"
        )
    return model
