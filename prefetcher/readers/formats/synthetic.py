"""Generates click logs of any length for any tables, with Zipf-distributed ids and labels that only embeddings explain.

Sample i of column c is a function of (seed, c, i), so any row is computed directly: `shuffle = "full"` is allowed and a
run can continue at any batch. The label is drawn from a hidden logistic model

    logit = base + sum over features of effect(feature, id) + DENSE_SIGMA * sum over dense of (x - 1) / sqrt(13)

with a label rate of about 0.26. Together the effects have deviation SIGMA; most of it is in features with few or very
frequent ids, which a model learns first. At the Criteo cardinalities the true model's AUC is about 0.85, and 0.54 from
the dense features alone. Several labels (data.columns.labels) are independent draws from the same model.

Computes synthetic data: random numbers by counter, Zipf ranks, permuted ids, effects on the label.

Everything is a pure function of (seed, stream, counter): a sample needs no earlier samples, and no column's memory
grows with its ids.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import Floats, Ids
from rowcast.prefetcher.readers.id_check import CheckedFeature, IdCheck, dense_names, job_features, refuse_weights
from rowcast.prefetcher.readers.row_reader import RowReader
from rowcast.protocol.batch import Batch
from rowcast.runtime.arrays import F64, GOLDEN, U64, mix
from rowcast.runtime.errors import ConfigError

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
        power, end = 1.0 - exponent, num_ids + 0.5
        tail = 0.0
        if num_ids > head:  # the integral of the power from the head's end to that of the ids
            tail = np.log(end / self._tail_start) if power == 0 else (end**power - self._tail_start**power) / power
        self._total = float(masses.sum()) + float(tail)
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


NUM_DENSE = 13
LABEL_RATE = 0.26
SIGMA = 1.75  # standard deviation of the logit's part from ids
CONCENTRATED = 0.8  # fraction of that variance split by how likely two samples have the same id, the rest evenly
DENSE_SIGMA = 0.2  # standard deviation of the logit's part from dense features


def open_reader(job: Job) -> RowReader:
    """Raises ConfigError if synthetic data cannot be as the job requires."""
    refuse_weights(job)
    if job.data.of:
        raise ConfigError(
            "data.of: synthetic data has no other arrays, and one look-up per sample and feature; remove it"
        )
    if job.data.eval_path is not None:
        raise ConfigError("data.eval_path: synthetic data has no files; remove it and set data.eval_fraction")
    return RowReader(job, IdCheck(job), SyntheticRows(job))


class SyntheticRows:
    """It holds nothing, so it is also its cursor. Labels depend on ids, so reading fewer columns saves nothing."""

    dense_names = dense_names(NUM_DENSE)

    def __init__(self, job: Job) -> None:
        self.paths: list[Path] = []
        self.num_rows = job.data.synthetic.samples
        features = job_features(job)
        more_labels = len(job.data.columns.label_names) - 1
        keys = streams(job.job.seed, NUM_DENSE + 1 + 3 * len(features) + more_labels)
        keys, more_keys = np.split(keys, [len(keys) - more_labels])
        self._label_keys, self._dense_keys = np.array([keys[0], *more_keys]), keys[1 : NUM_DENSE + 1, None]
        self._label_shape = job.data.columns.label_shape
        self._columns = [
            SyntheticColumn(feature, job.data.synthetic.zipf, own)
            for feature, own in zip(features, keys[NUM_DENSE + 1 :].reshape(-1, 3), strict=True)
        ]
        self._scales = SIGMA * variance_shares([column.concentration for column in self._columns]) ** 0.5
        self._base = base_logit(LABEL_RATE, float((self._scales**2).sum() ** 0.5))

    def cursor(self) -> AbstractContextManager["SyntheticRows"]:
        return nullcontext(self)

    def take(self, rows: Ids, within: range) -> Batch:
        counters = rows.astype(np.uint64)
        ids = np.empty((len(self._columns), len(rows)), np.int64)
        logits = np.full(len(rows), self._base)
        for i, column in enumerate(self._columns):
            ids[i], effects = column.sample(counters)
            logits += self._scales[i] * effects
        dense = self._dense(counters)
        logits += DENSE_SIGMA * (dense.sum(axis=1, dtype=np.float64) - NUM_DENSE) / NUM_DENSE**0.5
        labels = uniform(self._label_keys, counters[:, None]) < sigmoid(logits)[:, None]
        return Batch(dense=dense, labels=labels.astype(np.float32).reshape(-1, *self._label_shape), ids=ids.ravel())

    def _dense(self, counters: U64) -> Floats:
        """Draws exponential values with mean and variance 1: never negative, like logarithms of counts."""
        return np.ascontiguousarray(-np.log1p(-uniform(self._dense_keys, counters)).T.astype(np.float32))


class SyntheticColumn:
    def __init__(self, feature: CheckedFeature, exponent: float, keys: U64) -> None:
        self._zipf = Zipf(feature.num_embeddings, exponent)
        self._key = keys[0]
        self._permutation = Permutation(feature.num_embeddings, keys[1])
        self._effects = Effects(self._zipf, keys[2])
        self.concentration = self._zipf.concentration if feature.num_embeddings > 1 else None

    def sample(self, counters: U64) -> tuple[Ids, F64]:
        ranks = self._zipf.ranks(uniform(self._key, counters))
        return self._permutation(ranks), self._effects(ranks)


def variance_shares(concentrations: list[float | None]) -> F64:
    """Returns each column's fraction of the logit's variance, 1 in total; None for a column of one id, which has no
    variance."""
    own = np.array([concentration or 0.0 for concentration in concentrations])
    varied = own > 0
    if not varied.any():
        return own
    shares: F64 = CONCENTRATED * own / own.sum() + (1 - CONCENTRATED) * varied / varied.sum()
    return shares


def sigmoid(logits: F64) -> F64:
    return 1.0 / (1.0 + np.exp(-logits))


def base_logit(rate: float, sigma: float) -> float:
    """Finds, by bisection, the base at which normal logits of deviation `sigma` give the label rate `rate`."""
    quantiles = np.linspace(-4, 4, 161)
    masses = np.exp(-(quantiles**2) / 2)
    low, high = -20.0, 20.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if float((masses * sigmoid(middle + sigma * quantiles)).sum() / masses.sum()) < rate:
            low = middle
        else:
            high = middle
    return low
