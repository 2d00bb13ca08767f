"""How long each stage of a run needs for a step's rows, and so how short a step may be before the trainer waits.

    planning | tables read | link to the device | link from the device | tables written      each in a thread of its own, so that
    step p+9 | p+5         | p+5                | p+4                  | p+4                 the slowest one is the limit

Up to `depth` steps are in flight, so what counts is the mean over depth + 1 steps that follow each other: a stretch. At the start of a run
every row is new, and some stretches ask for more than a step's time with any capacity; they say nothing about the capacity.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefetcher.analysis.advise.curve import F64, Moved
from prefetcher.analysis.advise.machine_rates import Rates
from prefetcher.analysis.advise.observed import Observed

Flags = npt.NDArray[np.bool_]

STAGES = ("planning", "reading rows from the tables", "the link to the device", "the link from the device", "writing rows to the tables")
LEAST_TELLING = 0.5  # of the stretches; where more ask for too much with any capacity, capacity is not the question


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Of one capacity."""

    seconds: F64  # [stages, stretches] a step, on average over each stretch

    @property
    def stretch_s(self) -> F64:
        """[stretches] the slowest stage's."""
        return np.asarray(self.seconds.max(axis=0))

    def fits(self, step_s: float) -> Flags:
        """[stretches] whether no stage takes longer than a step."""
        return np.asarray(self.stretch_s <= step_s)

    @property
    def travel_s(self) -> float:
        """From the tables to the device and back, on average."""
        return float(self.seconds[1:].mean(axis=1).sum())


def demand(observed: Observed, moved: Moved, rates: Rates, depth: int) -> Demand:
    counted = slice(len(observed) - observed.num_counted, None)
    fetched, written = moved.fetched[counted], moved.written_back[counted]
    first = np.minimum(fetched, observed.first_touches[counted] / np.array(observed.shares))
    read_s, first_s, write_s = (1 / np.array([getattr(own, name) for own in rates.rows]) for name in ("read", "first", "write"))
    seconds = [
        np.full(len(fetched), rates.plan_s),
        (fetched - first) @ read_s + first @ first_s,
        (fetched @ observed.record_bytes + rates.plan_bytes) / rates.link_bytes_s,
        written @ observed.record_bytes / rates.link_bytes_s,
        written @ write_s,
    ]
    return Demand(seconds=np.stack([stretches(of_stage, depth + 1) for of_stage in seconds]))


def stretches(values: F64, length: int) -> F64:
    """Means of all `length` values that follow each other; of all where there are fewer."""
    length = min(length, len(values))
    return np.convolve(values, np.full(length, 1 / length), mode="valid")


@dataclass(frozen=True, kw_only=True, slots=True)
class Busiest:
    """Of the stretches that a capacity can help."""

    seconds: float  # a step, in the busiest one
    stage: str  # that is the slowest there


def telling(everything: Demand, step_s: float) -> Flags | None:
    """[stretches] which ones fit a step's time where the cache holds every row; None where too few do, so that no capacity helps."""
    fits = everything.fits(step_s)
    return fits if fits.mean() >= LEAST_TELLING else None


def busiest(own: Demand, which: Flags | None) -> Busiest:
    """Of the stretches `which`, or of all."""
    seconds = own.seconds if which is None else own.seconds[:, which]
    stage, _ = np.unravel_index(np.argmax(seconds), seconds.shape)
    return Busiest(seconds=float(seconds.max()), stage=STAGES[int(stage)])
