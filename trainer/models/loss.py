"""Computes the loss: binary cross entropy of logits, or the model's own `loss`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rowcast.runtime.errors import ConfigError

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
