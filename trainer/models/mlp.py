"""Stacks of linear layers with the initial values that DLRM published."""

import itertools
import warnings

import torch
from torch import Tensor, nn


def linear_layers(widths: list[int], generator: torch.Generator) -> nn.ModuleList:
    return nn.ModuleList(linear(width_in, width_out, generator) for width_in, width_out in itertools.pairwise(widths))


def linear(width_in: int, width_out: int, generator: torch.Generator) -> nn.Linear:
    """A layer with the published initial values: normal, deviation sqrt(2 / (in + out)) for weights and sqrt(1 / out) for biases.

    Of no input (a job without dense features) it gives its biases, a vector that is trained like the others.
    """
    layer = empty_linear(width_in, width_out)
    with torch.no_grad():
        layer.weight.normal_(0.0, (2 / (width_in + width_out)) ** 0.5, generator=generator)
        layer.bias.normal_(0.0, (1 / width_out) ** 0.5, generator=generator)
    return layer


def empty_linear(width_in: int, width_out: int, *, bias: bool = True) -> nn.Linear:
    """Without values: nn.Linear itself would draw them from the global random state."""
    with warnings.catch_warnings():  # of no input: torch says that it has nothing to draw
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors is a no-op")
        return nn.Linear(width_in, width_out, bias=bias, device="meta").to_empty(device="cpu")


def relu_layers(layers: nn.ModuleList, features: Tensor) -> Tensor:
    """Through all layers, each with a ReLU behind it."""
    for layer in layers:
        features = torch.relu(layer(features))
    return features


def logits_of(layers: nn.ModuleList, features: Tensor) -> Tensor:
    """Through all layers, each but the last with a ReLU behind it; f32 [B] of a last layer of width 1."""
    logits: Tensor = layers[-1](relu_layers(layers[:-1], features))
    return logits.squeeze(1)
