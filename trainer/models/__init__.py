"""Builds models and their dense optimizers.

Every model is called as `model(dense, embeddings) -> logits`: dense f32 [B, num_dense]; embeddings, a list of
f32 [B, D_f], one per feature in the job's feature order, or `Sequences` for a feature that is not pooled; logits
f32 [B], or the input of its `loss`. If a table has linear weights, it is called as `model(dense, embeddings, linear)`:
a list of f32 [B, 1], one per feature of such a table. If the data has arrays, they come as the keyword `inputs`.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rowcast.job.models import BUILT_IN_MODELS, BuiltInModel
from rowcast.job.schema import Job
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.models.sequences import Embedded, Sequences

__all__ = ["Embedded", "Sequences", "build_dense_optimizer", "build_model", "mean_loss"]

MATRIX_ALIGNMENT = 64  # bytes


def build_model(job: Job, num_dense: int) -> nn.Module:
    """Builds the job's model on the CPU, as a function of only the job file.

    Its random numbers come from job.seed; the global random state does not change. Raises ConfigError if the factory
    named by `model.kind` returns no model."""
    built_in = BUILT_IN_MODELS.get(job.model.kind)
    model = build_custom(job, num_dense) if built_in is None else built_in_factory(built_in)(job, num_dense)
    model.register_forward_pre_hook(align_inputs)
    return model


def built_in_factory(model: BuiltInModel) -> Callable[[Job, int], nn.Module]:
    module, _, name = model.factory.partition(":")
    factory: Callable[[Job, int], nn.Module] = getattr(import_module(module), name)
    return factory


Inputs = tuple[Tensor, *tuple[Sequence[Embedded], ...]]  # dense, embeddings, and linear weights if there are any


def align_inputs(model: nn.Module, inputs: Inputs) -> Inputs:
    """Aligns a model's inputs: on the CPU, the bits of a matrix product depend on alignment and strides."""
    if torch.compiler.is_compiling():
        return inputs  # `JobModel` has aligned them
    dense, *lists = inputs
    return aligned(dense), *([aligned_embedding(embedding) for embedding in own] for own in lists)


def aligned_embedding(embedding: Embedded) -> Embedded:
    if isinstance(embedding, Sequences):
        return Sequences(values=aligned(embedding.values), offsets=embedding.offsets)
    return aligned(embedding)


def aligned(tensor: Tensor) -> Tensor:
    # a dimension of 1 may have any stride, and products read it
    if tensor.is_contiguous() and 1 not in tensor.shape and tensor.data_ptr() % MATRIX_ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def build_dense_optimizer(job: Job, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Builds an optimizer of torch.optim. On a device, torch updates all tensors in a few launches (`foreach`)."""
    settings = job.optimizer.dense
    parameters = list(parameters)
    if settings.kind == "sgd":
        return torch.optim.SGD(
            parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
    if settings.kind == "adagrad":
        return torch.optim.Adagrad(
            parameters,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            initial_accumulator_value=settings.initial_accumulator,
            eps=1e-10 if settings.eps is None else settings.eps,
        )
    kind = torch.optim.AdamW if settings.kind == "adamw" else torch.optim.Adam
    return kind(
        parameters,
        lr=settings.lr,
        betas=settings.betas,
        eps=1e-8 if settings.eps is None else settings.eps,
        weight_decay=settings.weight_decay,
    )


OwnLoss = Callable[[Any, Tensor], Tensor]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross entropy, the mean over the batch. logits and labels f32 [B], or both [B, T] with several labels.

    An unknown label, NaN, has no loss and no gradient, but counts in the mean: it divides by B * T. So a sample's
    contribution does not depend on other samples, and the parts of a batch add up to its mean. Raises ConfigError for
    other shapes."""
    found = f"logits of shape {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(logits, Tensor) or logits.shape != labels.shape:
        needed = "one logit per sample" if labels.dim() == 1 else "one logit per sample and label"
        raise ConfigError(
            f"the model returned {found}; return {needed}, shape {list(labels.shape)}, or give the model a method "
            "loss(outputs, labels)"
        )
    if labels.dim() > 1:
        known = ~labels.isnan()
        return nn.functional.binary_cross_entropy_with_logits(logits, labels.where(known, 0.0), known.to(logits.dtype))
    return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def own_loss(model: nn.Module) -> OwnLoss | None:
    """The model's `loss(outputs, labels)`, checked at each call; None if it has none. Raises ConfigError."""
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
    if not isinstance(mean, Tensor) or mean.dim() or not mean.is_floating_point():
        found = f"{mean.dtype} of shape {list(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
        raise ConfigError(
            f"{name} returned {found}; return the batch's mean loss as a scalar tensor, such as losses.mean()"
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
    factory = load_factory(job.model.kind)
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


def load_factory(kind: str) -> Any:
    """Imports the callable that "package.module:factory" names. Raises ConfigError."""
    module_name, _, factory_name = kind.partition(":")
    if str(Path.cwd()) not in sys.path:  # as for readers, modules in the working folder are found
        sys.path.append(str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"model.kind = {kind!r}: cannot import {module_name} ({error}); put its folder on PYTHONPATH"
        ) from None
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise ConfigError(
            f"model.kind = {kind!r}: module {module_name} has no function {factory_name!r}; name one that returns a "
            "model"
        )
    return factory
