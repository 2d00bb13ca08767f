"""Adds the results of a batch's parts in one order, the same for any number of ranks.

Neighbours are added in pairs, then the sums in pairs, and so on; a value without a neighbour passes unchanged. So the
parts of a rank are a branch of the tree over all parts, and the ranks' sums are added like parts.

A rank's results besides row gradients are one vector:

    | gradient of weight 0 | of weight 1 | ... | loss | 1 for each weight with a gradient | scalars | zeros, for equal
    slices |
      of each part, added in order              | of the rank
"""

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from rowcast.runtime.errors import ConfigError


def sum_in_order(values: Tensor) -> Tensor:
    """Adds values [n, ...] in their own memory. Returns the sum, which is the first."""
    distance = 1
    while distance < len(values):
        others = values[distance :: 2 * distance]
        values[:: 2 * distance][: len(others)].add_(others)
        distance *= 2
    return values[0]


def padded(length: int, ranks: int) -> int:
    return -(-length // ranks) * ranks


class PartVector:
    """That vector of a rank, and of each of its parts, for some weights."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], parts: int, ranks: int, device: torch.device, scalars: int = 0
    ) -> None:
        """`weights`: by name. `parts`: of this rank. `scalars`: the number of additional sums."""
        self._names, self._weights = list(weights), list(weights.values())
        sizes = [weight.numel() for weight in self._weights]
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + size)
        self._places = list(pairwise(ends))
        self._loss, self._flags = ends[-1], ends[-1] + 1
        self._scalars = self._flags + len(sizes)
        self._end = self._scalars + scalars
        self._of_parts = torch.zeros(parts, padded(self._end, ranks), dtype=torch.float32, device=device)
        self.own = self._of_parts[0]
        self.scalars = self.own[self._scalars : self._end]
        self._no_gradient = torch.zeros(max(sizes, default=0), dtype=torch.float32, device=device)
        self._given, self._told = [False] * len(sizes), [False] * len(sizes)
        self._gradients: list[Tensor | None] = []  # of the weights, once it is agreed which have one

    def take(self, part: int, loss: Tensor | None) -> None:
        """Takes a part's weighted loss and the gradients of its backward pass, and clears them. `loss`: None if the
        part has no samples."""
        of_part = self._of_parts[part, : self._flags]
        if loss is None:
            of_part.zero_()
            return
        pieces = []
        for index, (weight, (first, end)) in enumerate(zip(self._weights, self._places, strict=True)):
            gradient, weight.grad = weight.grad, None
            self._given[index] |= gradient is not None
            pieces.append(self._no_gradient[: end - first] if gradient is None else gradient.reshape(-1))
        torch.cat([*pieces, loss.view(1)], out=of_part)

    def add_up(self) -> None:
        """Adds the parts up: from here on, `own` is this rank's vector. The caller sets its `scalars`."""
        sum_in_order(self._of_parts[:, : self._flags])
        for index, (given, told) in enumerate(zip(self._given, self._told, strict=True)):
            if given != told:  # almost never: the vector's memory is kept
                self.own[self._flags + index : self._flags + index + 1].fill_(given)
        self._told, self._given = self._given, [False] * len(self._given)

    def give(self, total: Tensor) -> None:
        """Sets the gradients of the weights that have one: views of `total`, which is the same memory in each step.

        The first call agrees which have one, and waits for the device. To the others no optimizer is applied."""
        if not self._gradients:
            are_given = total[self._flags : self._scalars].tolist()
            self._gradients = [
                total[first:end].view_as(weight) if given else None
                for weight, (first, end), given in zip(self._weights, self._places, are_given, strict=True)
            ]
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient

    def told(self, total: Tensor) -> Tensor:
        """f32, a view: what `read` takes."""
        return total[self._loss : self._end]

    def read(self, told: Tensor, train_step: int) -> tuple[float, list[float]]:
        """Returns loss and scalars, from the host's copy of `told`. Raises ConfigError, the same on all ranks, if other
        weights have a gradient than was agreed."""
        loss, *others = told.tolist()
        for name, given, gradient in zip(self._names, others, self._gradients, strict=False):
            if bool(given) != (gradient is not None):
                now, before = ("a", "none") if given else ("no", "one")
                raise ConfigError(
                    f"train step {train_step} gives the weight {name} {now} gradient, and the first step gave it "
                    f"{before}; with several parts or ranks let every loss depend on the same weights, for example "
                    "by adding 0 times their sum"
                )
        return loss, others[len(self._weights) :]
