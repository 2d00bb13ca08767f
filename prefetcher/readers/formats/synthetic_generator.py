"""Computes synthetic data: random numbers by counter, Zipf ranks, permuted ids, effects on the label.

Everything is a pure function of (seed, stream, counter): a sample needs no earlier samples, and no column's memory
grows with its ids.
"""

import numpy as np

from rowcast.prefetcher.readers.columns import Ids
from rowcast.runtime.arrays import F64, GOLDEN, U64, mix

HEAD_RANKS = 1024  # ranks with tabulated probability; the others are summed by an integral, exact to a part in 10^6


def streams(seed: int, num_streams: int) -> U64:
    """Returns u64 [num_streams] keys of independent streams of random numbers."""
    start = mix(np.array([seed], np.uint64) + GOLDEN)
    return mix(start + np.arange(1, num_streams + 1, dtype=np.uint64) * GOLDEN)


def uniform(key: U64, counters: U64) -> F64:
    """Returns a number in [0, 1) for each counter (and key, broadcast)."""
    return (mix(key + counters * GOLDEN) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Zipf:
    """Ranks 0 to n - 1; rank k has a probability proportional to (k + 1) ** -exponent."""

    def __init__(self, num_ids: int, exponent: float) -> None:
        self._num_ids, self._exponent = num_ids, exponent
        head = min(num_ids, HEAD_RANKS)
        self._tail_start = head + 0.5
        masses = np.arange(1, head + 1, dtype=np.float64) ** -exponent
        tail = self._integral(num_ids + 0.5) if num_ids > head else 0.0
        self._total = float(masses.sum()) + tail
        self._cumulative = np.cumsum(masses)
        self.head_probabilities: F64 = masses / self._total
        self.concentration = float((self.head_probabilities**2).sum())  # how likely two samples have one id of the head

    def ranks(self, u: F64) -> Ids:
        mass = u * self._total
        ranks = np.searchsorted(self._cumulative, mass, side="right")
        beyond = ranks == len(self._cumulative)
        if self._num_ids > len(self._cumulative):
            ranks[beyond] = self._tail_ranks(mass[beyond] - self._cumulative[-1])
        return np.minimum(ranks, self._num_ids - 1)

    def _integral(self, end: float) -> float:
        power = 1.0 - self._exponent
        if power == 0:
            return float(np.log(end / self._tail_start))
        return float((end**power - self._tail_start**power) / power)

    def _tail_ranks(self, mass: F64) -> Ids:
        power = 1.0 - self._exponent
        if power == 0:
            ends = self._tail_start * np.exp(mass)
        else:  # rounding may leave a heavy tail's last mass slightly below 0
            base = np.maximum(self._tail_start**power + power * mass, np.finfo(np.float64).tiny)
            ends = base ** (1.0 / power)
        return np.minimum(ends - 0.5, float(self._num_ids - 1)).astype(np.int64)


class Permutation:
    """A pseudo-random bijection of 0 to n - 1: rounds of invertible steps on just enough bits, repeated for results
    outside."""

    ROUNDS = 3

    def __init__(self, num_ids: int, key: np.uint64) -> None:
        bits = max(1, (num_ids - 1).bit_length())
        self._num_ids, self._mask = np.uint64(num_ids), np.uint64(2**bits - 1)
        self._shift = np.uint64(max(1, bits // 2))
        self._factors, self._addends = streams(int(key >> np.uint64(1)), 2 * self.ROUNDS).reshape(2, self.ROUNDS)

    def __call__(self, ranks: Ids) -> Ids:
        ids = self._rounds(ranks.astype(np.uint64))
        outside = np.flatnonzero(ids >= self._num_ids)
        while len(outside):
            ids[outside] = self._rounds(ids[outside])
            outside = outside[ids[outside] >= self._num_ids]
        return ids.astype(np.int64)

    def _rounds(self, x: U64) -> U64:
        for factor, addend in zip(self._factors, self._addends, strict=True):
            x = (x * (factor | np.uint64(1)) + addend) & self._mask
            x ^= x >> self._shift
        return x


class Effects:
    """What each id adds to the logit: mean 0 and variance 1 over the column's samples, 0 in a column of one id."""

    def __init__(self, zipf: Zipf, key: U64) -> None:
        self._key = key
        probabilities = zipf.head_probabilities
        head = self._raw(np.arange(len(probabilities)))
        tail = 1.0 - float(probabilities.sum())  # its effects already have mean 0 and variance 1
        self._mean = float(probabilities @ head)
        variance = float(probabilities @ head**2) + tail - self._mean**2
        self._scale = variance**-0.5 if variance > 1e-9 else 0.0

    def __call__(self, ranks: Ids) -> F64:
        return (self._raw(ranks) - self._mean) * self._scale

    def _raw(self, ranks: Ids) -> F64:
        return (uniform(self._key, ranks.astype(np.uint64)) - 0.5) * 12**0.5
