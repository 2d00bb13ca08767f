"""Adds the results of a batch's parts in one order, the same for any number of ranks.

Neighbours are added in pairs, then the sums in pairs, and so on; a value without a neighbour passes unchanged. So the
parts of a rank are a branch of the tree over all parts, and the ranks' sums are added like parts.

A rank's results besides row gradients are one vector:

    | gradient of weight 0 | of weight 1 | ... | parts with a gradient for each | loss | scalars | zeros, for equal
    slices |
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def sum_in_order(values: Sequence[Tensor]) -> Tensor:
    """Returns a new tensor, or the value itself if there is only one."""
    level = list(values)
    while len(level) > 1:
        pairs = [level[first : first + 2] for first in range(0, len(level), 2)]
        level = [pair[0] if len(pair) == 1 else pair[0] + pair[1] for pair in pairs]
    return level[0]


def padded(length: int, ranks: int) -> int:
    return -(-length // ranks) * ranks


class PartVector:
    """The layout of that vector for some weights."""

    def __init__(self, weights: Sequence[nn.Parameter], ranks: int, scalars: int = 0) -> None:
        """`scalars`: the number of additional sums."""
        self._weights = weights
        ends = [0]
        for weight in weights:
            ends.append(ends[-1] + weight.numel())
        self._places = list(pairwise(ends))
        self._given, self._loss = ends[-1], ends[-1] + len(weights)
        self._end = self._loss + 1 + scalars
        self.length = padded(self._end, ranks)

    def new(self, device: torch.device) -> Tensor:
        """Returns the vector of a part without samples."""
        return torch.zeros(self.length, dtype=torch.float32, device=device)

    def take(self, loss: Tensor) -> Tensor:
        """Returns the weighted loss and the gradients of its backward pass, and clears them."""
        vector = self.new(loss.device)
        for index, (weight, (first, end)) in enumerate(zip(self._weights, self._places, strict=True)):
            if weight.grad is not None:
                vector[first:end] = weight.grad.reshape(-1)
                vector[self._given + index] = 1
                weight.grad = None
        vector[self._loss] = loss.detach()
        return vector

    def scalars(self, vector: Tensor) -> Tensor:
        """f32 [scalars], a view."""
        return vector[self._loss + 1 : self._end]

    def give(self, vector: Tensor) -> Tensor:
        """Sets each weight's gradient, None if no part has one. Returns the loss. Reads the vector on the host."""
        given = vector[self._given : self._loss].tolist()
        for weight, (first, end), parts in zip(self._weights, self._places, given, strict=True):
            weight.grad = vector[first:end].view_as(weight).clone() if parts else None
        return vector[self._loss]
