"""Fits rates to measured times: terms by least squares of relative errors, or a table. Computes their errors.

A rate is never below 0: a term that would need one is left out, the one with the largest such share first.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from rowcast.analysis.estimate.device_rates import Errors, KernelRates, product
from rowcast.runtime.arrays import F64

FOLDS = 4  # each shape is judged by terms that were fitted to the shapes of the other folds
SMALLEST_ERROR = 1e-4  # a lucky hit would make the geometric mean 0


class Sample(NamedTuple):
    counts: dict[str, float]
    seconds: float


def fitted(samples: Sequence[Sample], terms: Sequence[str]) -> KernelRates:
    shuffled = [samples[index] for index in np.random.default_rng(0).permutation(len(samples))]
    judged = []
    for fold in range(FOLDS):
        others = [sample for index, sample in enumerate(shuffled) if index % FOLDS != fold]
        if others and fold < len(shuffled):
            own = rates_of(others, terms)
            judged += [own.seconds(sample.counts) / sample.seconds for sample in shuffled[fold::FOLDS]]
    return msgspec.structs.replace(rates_of(samples, terms), errors=errors(judged))


def rates_of(samples: Sequence[Sample], terms: Sequence[str]) -> KernelRates:
    seconds = np.array([sample.seconds for sample in samples])
    products = np.array([[product(term, sample.counts) for term in terms] for sample in samples])
    rates = not_below_zero(products / seconds[:, None], np.ones(len(samples)))
    return KernelRates(
        terms={term: float(rate) for term, rate in zip(terms, rates, strict=True) if rate},
        measured=ranges(samples),
        samples=len(samples),
    )


def not_below_zero(factors: F64, results: F64) -> F64:
    """Least squares of factors [n, k] @ found [k] = results [n], with no result below 0."""
    found, left = np.zeros(factors.shape[1]), list(range(factors.shape[1]))
    while left:
        scale = np.maximum(np.abs(factors[:, left]).max(axis=0), 1e-300)
        solved = np.linalg.lstsq(factors[:, left] / scale, results, rcond=None)[0]
        if (solved >= 0).all():
            found[left] = solved / scale
            break
        left.pop(int(np.argmin(solved)))
    return found


def tabulated(axes: Mapping[str, Sequence[float]], grid: Sequence[Sample], others: Sequence[Sample]) -> KernelRates:
    """A table of the grid's times, the last axis fastest, judged by `others`."""
    rates = KernelRates(
        axes={name: [float(value) for value in values] for name, values in axes.items()},
        table=[sample.seconds for sample in grid],
        measured=ranges(grid),
        samples=len(grid) + len(others),
    )
    ratios = [rates.seconds(own.counts) / own.seconds for own in others]
    return msgspec.structs.replace(rates, errors=errors(ratios))


def ranges(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    columns = {name: [sample.counts[name] for sample in samples] for name in samples[0].counts}
    return {name: (min(values), max(values)) for name, values in columns.items()}


def errors(ratios: Sequence[float]) -> Errors | None:
    """`ratios`: estimated over measured times."""
    if not ratios:
        return None
    away = np.abs(np.array(ratios) - 1)
    return Errors(
        geometric_mean=float(np.exp(np.log(np.maximum(away, SMALLEST_ERROR)).mean())),
        mean=float(away.mean()),
        worst=float(away.max()),
    )
