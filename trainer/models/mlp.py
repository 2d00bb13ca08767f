"""Builds stacks of linear layers with the initial values that DLRM published."""

import itertools
import warnings

import torch
from torch import Tensor, nn


def linear_layers(widths: list[int], generator: torch.Generator) -> nn.ModuleList:
    return nn.ModuleList(linear(width_in, width_out, generator) for width_in, width_out in itertools.pairwise(widths))


def linear(width_in: int, width_out: int, generator: torch.Generator) -> nn.Linear:
    """A layer with the published initial values: normal, deviation sqrt(2 / (in + out)), sqrt(1 / out) for biases.

    Without input (a job without dense features) it returns its biases, which are trained like any others."""
    layer = empty_linear(width_in, width_out)
    with torch.no_grad():
        layer.weight.normal_(0.0, (2 / (width_in + width_out)) ** 0.5, generator=generator)
        layer.bias.normal_(0.0, (1 / width_out) ** 0.5, generator=generator)
    return layer


def empty_linear(width_in: int, width_out: int, *, bias: bool = True) -> nn.Linear:
    """A layer without values, because nn.Linear would draw them from the global random state."""
    with warnings.catch_warnings():  # without input, torch warns that the weights are empty
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors is a no-op")
        return nn.Linear(width_in, width_out, bias=bias, device="meta").to_empty(device="cpu")


def relu_layers(layers: nn.ModuleList, features: Tensor) -> Tensor:
    for layer in layers:
        features = torch.relu(layer(features))
    return features


def logits_of(layers: nn.ModuleList, features: Tensor) -> Tensor:
    """Applies all layers, with a ReLU after each but the last, which has width 1; returns f32 [B]."""
    logits: Tensor = layers[-1](relu_layers(layers[:-1], features))
    return logits.squeeze(1)
