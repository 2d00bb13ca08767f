"""Measures kernels: each shape several times, in random rounds over all shapes.

A shared machine is slower for seconds at a time. In rounds over all shapes, each in another order, such a time falls on
a few measurements of many shapes instead of all measurements of a few, and the medians leave it out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from rowcast.analysis.estimate.device_rates import KernelRates
from rowcast.analysis.estimate.rates.fit import Sample, fitted, tabulated

ROUNDS = 3
ENOUGH_S = 0.25  # spent on a shape: no further round


@dataclass(frozen=True, slots=True)
class Shape:
    counts: dict[str, float]
    time: Callable[[], float]  # seconds of one call


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """Its time is a sum of terms, or a table over `axes`, whose grid `shapes` are, the last axis fastest."""

    name: str
    shapes: list[Shape]
    terms: Sequence[str] = ()
    axes: dict[str, Sequence[float]] = field(default_factory=dict)
    held_out: list[Shape] = field(default_factory=list)  # by which a table is judged

    def rates(self, seconds: Sequence[float]) -> KernelRates:
        """`seconds`: of the shapes, then of those held out."""
        samples = [
            Sample(shape.counts, own) for shape, own in zip((*self.shapes, *self.held_out), seconds, strict=True)
        ]
        if self.terms:
            return fitted(samples, self.terms)
        return tabulated(self.axes, samples[: len(self.shapes)], samples[len(self.shapes) :])


def measured(kernels: Sequence[Kernel]) -> dict[str, KernelRates]:
    shapes = [shape for kernel in kernels for shape in (*kernel.shapes, *kernel.held_out)]
    found: list[list[float]] = [[] for _ in shapes]
    orders = np.random.default_rng(0)
    for _ in range(ROUNDS):
        for number in orders.permutation(len(shapes)):
            if sum(found[number]) < ENOUGH_S:
                found[number].append(shapes[number].time())
    medians = iter([median(own) for own in found])
    return {
        kernel.name: kernel.rates([next(medians) for _ in (*kernel.shapes, *kernel.held_out)]) for kernel in kernels
    }
