"""Reads the table of kernel rates that `trainer rates` measured, and fits its terms.

Counts that kernels are timed by; every kernel names those it needs:

    lookups        look-ups of a group in a step, over all its features
    rows           distinct rows of these look-ups; rows moved, for gather and scatter
    dim            weights of a row
    record_floats  4-byte words of a row's record: weights, optimizer state, padding
    bytes          bytes copied
    batch          samples that pass the model at once
    parts          that the samples of a rank are cut into

Overhead is in the same table, in seconds of a step beside its kernels, by type:

    launch     in the phases of a step, around its kernels: calls, autograd
    Python     between the phases, on the main thread: its loop, results, streams
    lock       threads of messages and checks, which hold Python's lock so long
    message    from one process to the other
    wait       until a thread takes up what another one of its process has given it
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from rowcast.job.schema import Job
from rowcast.runtime.arrays import F64
from rowcast.runtime.disk import Sealed, read_sealed
from rowcast.runtime.errors import ConfigError

RATES_VERSION = 3
NAME = "rates file"
OVERHEADS = ("launch", "Python", "lock", "message", "wait")
OF_MAIN = OVERHEADS[:3]  # delays the computing thread before the next kernel
FOLDS = 4  # each shape is judged by terms that were fitted to the shapes of the other folds


class KernelSample(NamedTuple):
    counts: dict[str, float]
    seconds: float


class KernelRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # seconds for each unit of a product of counts: "lookups*dim"; "1" is a call. Not below 0
    terms: dict[str, float]
    measured: dict[str, tuple[float, float]] = {}  # the least and the largest value of each count
    # the mean of |estimated / measured - 1| at shapes that were held out; None: too few to hold any out
    error: float | None = None
    samples: int = 1  # shapes that were measured

    def seconds(self, counts: Mapping[str, float]) -> float:
        return sum(rate * product(term, counts) for term, rate in self.terms.items())

    def covers(self, counts: Mapping[str, float]) -> bool:
        """Returns whether every count is within the measured range."""
        return all(least <= counts[name] <= most for name, (least, most) in self.measured.items())


class DeviceRates(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds are of the processor on a CPU with one thread (`cpu`), so that other programs do not count, `wall` with
    several, and of the device on CUDA."""

    machine: str  # processor and system
    device: str  # "cpu", or the GPU's name
    clock: Literal["cpu", "wall", "device"]
    torch: str
    threads: int  # that torch and the compiled kernels may use
    model: str  # `model_fingerprint` of the job that was measured
    parameters: int  # elements of its dense weights
    kernels: dict[str, KernelRates]

    def seconds(self, kernel: str, **counts: float) -> float:
        """Returns the time of one call. Raises ConfigError."""
        if kernel not in self.kernels:
            raise ConfigError(
                f"the rates file has no kernel {kernel}, only {', '.join(self.kernels)}; measure this job: "
                "`trainer rates --config` with its job file, and --network-gbs for ranks on several hosts"
            )
        return self.kernels[kernel].seconds(counts)


def product(term: str, counts: Mapping[str, float]) -> float:
    """Multiplies the counts in a term, such as "lookups*dim"; "1" is 1."""
    return 1.0 if term == "1" else math.prod(counts[name] for name in term.split("*"))


def fitted(samples: Sequence[KernelSample], terms: Sequence[str]) -> KernelRates:
    """Least squares of relative errors."""
    shuffled = [samples[index] for index in np.random.default_rng(0).permutation(len(samples))]
    away = []
    for fold in range(FOLDS if len(shuffled) >= FOLDS else 0):
        others = [sample for index, sample in enumerate(shuffled) if index % FOLDS != fold]
        held_out = KernelRates(terms=rates_of(others, terms))
        away += [abs(held_out.seconds(sample.counts) / sample.seconds - 1) for sample in shuffled[fold::FOLDS]]
    columns = {name: [sample.counts[name] for sample in samples] for name in samples[0].counts}
    return KernelRates(
        terms=rates_of(samples, terms),
        measured={name: (min(values), max(values)) for name, values in columns.items()},
        error=float(np.mean(away)) if away else None,
        samples=len(samples),
    )


def rates_of(samples: Sequence[KernelSample], terms: Sequence[str]) -> dict[str, float]:
    seconds = np.array([sample.seconds for sample in samples])
    products = np.array([[product(term, sample.counts) for term in terms] for sample in samples])
    rates = not_below_zero(products / seconds[:, None], np.ones(len(samples)))
    return {term: float(rate) for term, rate in zip(terms, rates, strict=True) if rate}


def not_below_zero(factors: F64, results: F64) -> F64:
    """Least squares of factors [n, k] @ found [k] = results [n]. A term that would need a result below 0 is left out,
    the one with the largest such share first."""
    rates, left = np.zeros(factors.shape[1]), list(range(factors.shape[1]))
    while left:
        scale = np.maximum(np.abs(factors[:, left]).max(axis=0), 1e-300)
        solved = np.linalg.lstsq(factors[:, left] / scale, results, rcond=None)[0]
        if (solved >= 0).all():
            rates[left] = solved / scale
            break
        left.pop(int(np.argmin(solved)))
    return rates


def read_rates(path: Path) -> DeviceRates:
    """Raises ConfigError if there is no such file, and DataError if it has another version or was changed."""
    try:
        return read_sealed(path, {RATES_VERSION: DeviceRates}, NAME)
    except OSError as error:
        raise ConfigError(f"--rates {path}: {error.strerror}; `trainer rates --out {path}` writes it") from None


def model_fingerprint(job: Job) -> str:
    """What the time of a job's model depends on besides the batch: model, dense optimizer, widths of the features."""
    content = [job.content()["model"], msgspec.to_builtins(job.optimizer.dense) or "the model's own"]
    features = [[table.embedding_dim, table.pooling, len(table.features)] for table in job.tables]
    return msgspec.json.encode([content, features], order="sorted").decode()
