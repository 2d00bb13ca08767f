"""Reads a device's measured rates, written by `trainer rates`, and computes a kernel's time from them.

Counts that kernels are timed by; every kernel names those it needs:

    lookups        look-ups of a group in a step, over all its features
    rows           distinct rows of these look-ups; rows moved, for gather and scatter
    dim            weights of a row
    record_floats  4-byte words of a row's record: weights, optimizer state, padding
    bytes          bytes copied
    batch          samples
    parts          that the samples of a rank are cut into
    inputs         width of a layer's input
    outputs        width of a layer's output
    rank           width between the two matrices of a cross layer
    vectors        vectors of a sample that enter an interaction: one for each feature and the bottom MLP's output
    width          floats of a sample in a concatenation
    tensors        weight tensors of the model
    parameters     their elements
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from rowcast.job.schema import Job
from rowcast.runtime.arrays import F64
from rowcast.runtime.disk import Sealed, read_sealed
from rowcast.runtime.errors import ConfigError

RATES_VERSION = 2
NAME = "rates file"


class Errors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Relative errors |estimated / measured - 1| at shapes that the estimate was not made from."""

    geometric_mean: float
    mean: float
    worst: float


class KernelRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of a kernel: a sum of terms, or a table between whose points the logarithm is interpolated."""

    # seconds for each unit of a product of counts: "lookups*dim"; "1" is a call. Not below 0. Empty: see `table`
    terms: dict[str, float] = {}
    # seconds, in the order of the axes, the last one fastest; between the values of each axis in `axes`
    table: list[float] = []
    axes: dict[str, list[float]] = {}  # ascending
    measured: dict[str, tuple[float, float]]  # the least and the largest value of each count
    errors: Errors | None = None  # None: too few shapes to hold any out
    samples: int  # shapes that were measured, those held out included

    def seconds(self, counts: Mapping[str, float]) -> float:
        """At shapes outside what was measured the terms are extended, and the table in proportion to its count."""
        if not self.table:
            return sum(rate * product(term, counts) for term, rate in self.terms.items())
        points = np.log(np.array(self.table)).reshape([len(values) for values in self.axes.values()])
        scale = 1.0
        for name, values in self.axes.items():
            count = min(max(counts[name], values[0]), values[-1])
            scale *= max(1.0, counts[name] / values[-1])
            points = between(points, values, count)
        return float(np.exp(points)) * scale

    def covers(self, counts: Mapping[str, float]) -> bool:
        """Returns whether every count is within the measured range."""
        return all(least <= counts[name] <= most for name, (least, most) in self.measured.items())


class HostRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of the trainer's main thread beside all kernels, measured in small runs of the trainer itself."""

    per_step: float
    per_lookup: float = 0.0  # checks of a plan's arrays


class ModelRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job's own model, measured as a whole: embeddings in, gradients of the embeddings and trained weights out."""

    fingerprint: str  # `model_fingerprint` of the job
    batch: list[int]  # ascending
    forward: list[float]  # seconds, the loss included
    backward: list[float]
    update: list[float]
    tensors: int  # weights of the dense side
    parameters: int  # their elements

    def seconds(self, batch: float) -> tuple[float, float, float]:
        """Forward, backward and update, interpolated between batch sizes; beyond the largest in proportion to it."""
        beyond = max(1.0, batch / self.batch[-1])
        forward, backward, update = (
            float(np.interp(batch, self.batch, values)) for values in (self.forward, self.backward, self.update)
        )
        return forward * beyond, backward * beyond, update

    def covers(self, batch: float) -> bool:
        return self.batch[0] <= batch <= self.batch[-1]


class DeviceRates(Sealed, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds are of the processor on a CPU with one thread (`cpu`), so that other programs do not count, `wall` with
    several, and of the device on CUDA."""

    machine: str  # processor and system
    device: str  # "cpu", or the GPU's name
    clock: Literal["cpu", "wall", "device"]
    torch: str
    threads: int  # that torch and the compiled kernels may use
    probe: float  # seconds of one fixed matrix product, to detect that the machine's speed has changed
    kernels: dict[str, KernelRates]
    host: HostRates
    model: ModelRates | None = None

    def seconds(self, kernel: str, **counts: float) -> tuple[float, bool]:
        """Returns the time of one call, and whether the counts are within the measured range. Raises ConfigError."""
        rates = self.kernels.get(kernel)
        if rates is None:
            raise ConfigError(
                f"the rates file has no kernel {kernel}, only {', '.join(self.kernels)}; measure the device again with "
                "this version of `trainer rates`"
            )
        return rates.seconds(counts), rates.covers(counts)


def product(term: str, counts: Mapping[str, float]) -> float:
    """Multiplies the counts in a term, such as "lookups*dim"; "1" is 1."""
    return 1.0 if term == "1" else math.prod(counts[name] for name in term.split("*"))


def between(points: F64, values: list[float], count: float) -> F64:
    """Interpolates the first axis of `points`, linear in the logarithm of its values."""
    after = min(max(1, int(np.searchsorted(values, count))), len(values) - 1) if len(values) > 1 else 0
    if after == 0:
        first: F64 = points[0]
        return first
    low, high = math.log(values[after - 1]), math.log(values[after])
    share = (math.log(count) - low) / (high - low)
    found: F64 = points[after - 1] * (1 - share) + points[after] * share
    return found


def read_rates(path: Path) -> DeviceRates:
    """Raises ConfigError if there is no such file, and DataError if it has another version or was changed."""
    try:
        return read_sealed(path, {RATES_VERSION: DeviceRates}, NAME)
    except OSError as error:
        raise ConfigError(f"--rates {path}: {error.strerror}; `trainer rates --out {path}` writes it") from None


def model_fingerprint(job: Job) -> str:
    """What the time of a job's model depends on besides the batch: model, dense optimizer, widths of the features."""
    content = [job.content()["model"], msgspec.to_builtins(job.optimizer.dense)]
    features = [[table.embedding_dim, table.pooling, len(table.features)] for table in job.tables]
    return msgspec.json.encode([content, features], order="sorted").decode()
