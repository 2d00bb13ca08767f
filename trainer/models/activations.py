"""Activations with a weight for each unit: Dice and PReLU, as Zhou et al. write them (arXiv 1706.06978, section 5.3).

    y = p(s) s + (1 - p(s)) alpha s
    Dice   p(s) = sigmoid((s - mean) / sqrt(variance + eps))
    PReLU  p(s) = 1 if s > 0, else 0

Mean and variance are the mini-batch's in training, and moving averages in evaluation.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Activation = Literal["dice", "prelu"]
EPSILON, MOMENTUM = 1e-8, 0.1  # the paper's; torch.nn.BatchNorm1d's


class Dice(nn.Module):
    """Parameter `alpha` [width], from 0; buffers `running_mean` and `running_var` [width], which training changes."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(width, device="cpu"))
        self.register_buffer("running_mean", torch.zeros(width, device="cpu"))
        self.register_buffer("running_var", torch.ones(width, device="cpu"))

    def forward(self, features: Tensor, present: Tensor) -> Tensor:
        """features f32 [n, width], present f32 [n, 1]: 1 for a row that counts in mean and variance, and 0 for padding.

        Variances divide by the number of rows. A batch without rows does not change the moving averages."""
        mean, variance = self.statistics(features, present) if self.training else (self.running_mean, self.running_var)
        gate = torch.sigmoid((features - mean) / torch.sqrt(variance + EPSILON))
        return features * (gate + (1 - gate) * self.alpha)

    def statistics(self, features: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        count = present.sum().clamp(min=1)
        mean = (features * present).sum(0) / count
        variance = ((features - mean).square() * present).sum(0) / count
        share = MOMENTUM * present.amax()
        self.running_mean.lerp_(mean.detach(), share)
        self.running_var.lerp_(variance.detach(), share)
        return mean, variance


class PReLU(nn.Module):
    """Parameter `alpha` [width], from 0.25 as in torch.nn.PReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((width,), 0.25, device="cpu"))

    def forward(self, features: Tensor, present: Tensor) -> Tensor:
        """features f32 [n, width]. Ignores `present`, an argument of `Dice`."""
        return torch.where(features > 0, features, self.alpha * features)


def activations(kind: Activation, widths: Sequence[int]) -> nn.ModuleList:
    return nn.ModuleList(Dice(width) if kind == "dice" else PReLU(width) for width in widths)


def activated(layers: nn.ModuleList, between: nn.ModuleList, features: Tensor, present: Tensor) -> Tensor:
    """Applies all layers, with an activation after each but the last, which has width 1; returns f32 [n]."""
    for layer, activation in zip(layers[:-1], between, strict=True):
        features = activation(layer(features).float(), present)
    last: Tensor = layers[-1](features)
    return last.squeeze(1)
