"""Times what a step does besides, if batches are cut into parts: the dense gradients of each part become a vector, and
vectors are added and given back."""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import nn

from rowcast.analysis.estimate.device_rates import KernelRates
from rowcast.analysis.estimate.rates.kernel import Kernel, Shape, measured
from rowcast.analysis.estimate.rates.stopwatch import Stopwatch
from rowcast.analysis.estimate.step_kernels import DENSE_SUMS
from rowcast.trainer.models.ordered import PartVector, sum_in_order

TERMS = ("1", "tensors*parts", "parameters", "parameters*parts")
PARTS, TENSORS, PARAMETERS = (1, 2, 4), (4, 12, 24), (10**4, 10**5, 10**6)
RANKS = 2


def part_kernels(watch: Stopwatch) -> dict[str, KernelRates]:
    shapes = [
        Shape(
            {"parts": float(parts), "tensors": float(tensors), "parameters": float(parameters)},
            partial(watch.seconds, sums(watch.device, parts, tensors, parameters)),
        )
        for parts, tensors, parameters in product(PARTS, TENSORS, PARAMETERS)
    ]
    return measured([Kernel(name=DENSE_SUMS, shapes=shapes, terms=TERMS)])


def sums(device: torch.device, parts: int, tensors: int, parameters: int) -> Callable[[], object]:
    """What `SharedRunner` does with dense gradients between backward passes and the optimizer, without exchanges."""
    weights = [nn.Parameter(torch.zeros(parameters // tensors, device=device)) for _ in range(tensors)]
    gradients = [torch.ones_like(weight) for weight in weights]
    layout, loss = PartVector(weights, RANKS), torch.zeros((), device=device)
    own = layout.new(device)

    def of_part() -> torch.Tensor:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        return layout.take(loss)

    def work() -> None:
        own.copy_(sum_in_order([of_part() for _ in range(parts)]))
        sum_in_order(own.view(RANKS, -1).unbind())
        layout.give(own)

    return work
