"""Generates click logs of any length for any tables, with Zipf-distributed ids and labels that only embeddings explain.

Sample i of column c is a function of (seed, c, i), so any row is computed directly: `shuffle = "full"` is allowed and a
run can continue at any batch. The label is drawn from a hidden logistic model

    logit = base + sum over features of effect(feature, id) + DENSE_SIGMA * sum over dense of (x - 1) / sqrt(13)

with a label rate of about 0.26. Together the effects have deviation SIGMA; most of it is in features with few or very
frequent ids, which a model learns first. At the Criteo cardinalities the true model's AUC is about 0.85, and 0.54 from
the dense features alone. Several labels (data.columns.labels) are independent draws from the same model.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from rowcast.job.schema import Job
from rowcast.prefetcher.readers.columns import Floats, Ids
from rowcast.prefetcher.readers.formats.synthetic_generator import Effects, Permutation, Zipf, streams, uniform
from rowcast.prefetcher.readers.id_check import Feature, IdCheck, dense_names, job_features, refuse_weights
from rowcast.prefetcher.readers.row_reader import RowReader
from rowcast.protocol.batch import Batch
from rowcast.runtime.arrays import F64, U64
from rowcast.runtime.errors import ConfigError

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
    def __init__(self, feature: Feature, exponent: float, keys: U64) -> None:
        self._zipf = Zipf(feature.num_embeddings, exponent)
        self._key = keys[0]
        self._permutation = Permutation(feature.num_embeddings, keys[1])
        self._effects = Effects(self._zipf, keys[2])
        self.concentration = self._zipf.concentration if feature.num_embeddings > 1 else None

    def sample(self, counters: U64) -> tuple[Ids, F64]:
        ranks = self._zipf.ranks(uniform(self._key, counters))
        return self._permutation(ranks), self._effects(ranks)


def variance_shares(concentrations: list[float | None]) -> F64:
    """Returns each column's fraction of the logit's variance, 1 in total. None: a column of one id, which has no
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
