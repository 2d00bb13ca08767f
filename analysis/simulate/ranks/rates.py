"""Models the time of a step from its moves and measured rates.

    ranks       compute | rows | gradients | dense sums        one after the other, as the runner issues them today
    host link   fetched rows come | victims leave              beside them, up to depth + 1 steps ahead

An exchange takes as long as the busiest rank sends or receives, within its host or across hosts, at the full rate of
that link. A step takes as long as ranks or host link, whichever is slower. Waits for data, launches, the start of a
message and the jitter of many ranks are not modelled, so a real step is slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rowcast.analysis.simulate.ranks.counts import ACROSS, IN_HOST, RunCounts
from rowcast.job.tables import GroupSpec
from rowcast.runtime.arrays import F64, I64
from rowcast.runtime.errors import ConfigError

WEIGHT_BYTES = 4  # dense gradients are summed in fp32
GB = 1e9


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rates of one rank's device and links, in 10^9 bytes/s each way."""

    ms_per_sample: float  # of the device, for everything but exchanges and host copies
    host_gbs: float  # between host memory and device
    in_host_gbs: float  # to the other ranks of a host
    network_gbs: float  # to the ranks of other hosts
    ranks_per_host: int
    dense_weights: int = 0  # of the model, whose gradients are summed over ranks

    def __post_init__(self) -> None:
        for name in ("ms_per_sample", "host_gbs", "in_host_gbs", "network_gbs", "ranks_per_host"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be more than 0")
        if self.dense_weights < 0:
            raise ValueError(f"dense_weights = {self.dense_weights} must not be below 0")


class Modelled(msgspec.Struct, frozen=True, kw_only=True):
    """The mean milliseconds of a train step."""

    step_ms: float
    compute_ms: float
    rows_ms: float
    gradients_ms: float
    dense_ms: float
    host_link_ms: float  # beside the others
    critical_path: list[str]  # a step's components, longest first, without those under 1 %
    samples_per_s: float
    efficiency: float | None = None  # samples/s over those of one rank times the ranks; None if none was simulated


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of each train step [P]."""

    compute: F64
    rows: F64
    gradients: F64
    dense: float


def load_rates(path: Path) -> Rates:
    """Raises ConfigError."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Rates)
    except OSError as error:
        raise ConfigError(f"--rates {path}: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"--rates {path}: {error}") from None


def modelled(groups: Sequence[GroupSpec], counts: RunCounts, rates: Rates, depth: int) -> Modelled:
    """The counts must have a train step, and their hosts `rates.ranks_per_host` ranks."""
    trains = [position for position, step in enumerate(counts.steps) if step.kind == "train"]
    steps = [counts.steps[position] for position in trains]
    sizes = np.array([step.batch_size for step in steps])
    times = Times(
        compute=-(-sizes // counts.count) * rates.ms_per_sample / 1e3,
        rows=np.array([exchange_s(step.row_bytes, rates) for step in steps]),
        gradients=np.array([exchange_s(step.gradient_bytes, rates) for step in steps]),
        dense=dense_s(counts.count, rates),
    )
    ranks = times.compute + times.rows + times.gradients + times.dense
    link = host_link_s(groups, counts, rates, depth)[trains]
    seconds = float(np.maximum(ranks, link).mean())
    parts = {
        "compute": float(times.compute.mean()),
        "rows": float(times.rows.mean()),
        "gradients": float(times.gradients.mean()),
        "dense sums": times.dense,
        "host link": seconds - float(ranks.mean()),
    }
    return Modelled(
        step_ms=1e3 * seconds,
        compute_ms=1e3 * parts["compute"],
        rows_ms=1e3 * parts["rows"],
        gradients_ms=1e3 * parts["gradients"],
        dense_ms=1e3 * times.dense,
        host_link_ms=1e3 * float(link.mean()),
        critical_path=[name for name, own in sorted(parts.items(), key=lambda item: -item[1]) if own >= 0.01 * seconds],
        samples_per_s=float(sizes.mean()) / seconds,
    )


def exchange_s(nbytes: I64, rates: Rates) -> float:
    """`nbytes`: [2, 2, N] as in StepExchange. Both links and both directions work at once."""
    busiest = nbytes.max(axis=(0, 2))
    return float(max(busiest[IN_HOST] / rates.in_host_gbs, busiest[ACROSS] / rates.network_gbs) / GB)


def dense_s(count: int, rates: Rates) -> float:
    """Each rank sends every other one a slice of its gradients, and then the sum of its own slice."""
    on_host = min(count, rates.ranks_per_host)
    slice_bytes = WEIGHT_BYTES * rates.dense_weights / count
    in_host, across = slice_bytes * (on_host - 1), slice_bytes * (count - on_host)
    return 2 * max(in_host / rates.in_host_gbs, across / rates.network_gbs) / GB


def host_link_s(groups: Sequence[GroupSpec], counts: RunCounts, rates: Rates, depth: int) -> F64:
    """[P] of every step: the mean of the last depth + 1 steps of the rank that moves most, the busier direction."""
    record_bytes = np.array([group.record_bytes for group in groups])
    moved = np.stack([np.array(counts.fetched), np.array(counts.written_back)]) @ record_bytes  # [2, P, N]
    sums = np.cumsum(np.concatenate([np.zeros_like(moved[:, :1]), moved], axis=1), axis=1)
    ends = np.arange(1, moved.shape[1] + 1)
    first = np.maximum(0, ends - depth - 1)
    means = (sums[:, ends] - sums[:, first]) / (ends - first)[:, None]
    found: F64 = means.max(axis=(0, 2)) / rates.host_gbs / GB
    return found
