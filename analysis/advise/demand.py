"""How long the stages that move rows need for a step's rows, and so how short a step may be before the trainer waits for want of room.

    tables read | link to the device | link from the device | tables written      each in a thread of its own, so that
    step p+5    | p+5                | p+4                  | p+4                 the slowest one is the limit

Up to `depth` steps are in flight, so what counts is the mean over depth + 1 steps that follow each other: a stretch. One that takes as
long with every row on the device, as at the start, where all rows are new, says nothing about a capacity. Planning goes on beside all
that, and takes as long at any capacity.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowcast.analysis.advise.curve import F64, Moved
from rowcast.analysis.advise.machine_rates import Rates
from rowcast.analysis.advise.observed import Observed

Flags = npt.NDArray[np.bool_]

STAGES = (
    "reading rows from the tables",
    "the link to the device",
    "the link from the device",
    "writing rows to the tables",
)
NO_MORE = 0.01  # of the time that a stretch takes with every row on the device: no difference


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
        return float(self.seconds.mean(axis=1).sum())


def demand(observed: Observed, moved: Moved, rates: Rates, depth: int) -> Demand:
    counted = slice(len(observed) - observed.num_counted, None)
    fetched, written = moved.fetched[counted], moved.written_back[counted]
    first = np.minimum(fetched, observed.first_touches[counted] / np.array(observed.shares))
    read_s, first_s, write_s = (
        1 / np.array([getattr(own, name) for own in rates.rows]) for name in ("read", "first", "write")
    )
    seconds = [
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
class Cost:
    """What a capacity costs that one for every row does not."""

    mean_s: float  # a step, of the slowest stage
    stage: str
    least_step_s: float  # a shorter step waits for what a larger cache would have kept; 0: nothing is


def cost(own: Demand, everything: Demand) -> Cost:
    of_stages = own.seconds.mean(axis=1)
    slowest = int(np.argmax(of_stages))
    more = own.stretch_s > (1 + NO_MORE) * everything.stretch_s
    return Cost(
        mean_s=float(of_stages[slowest]),
        stage=STAGES[slowest],
        least_step_s=float(own.stretch_s[more].max(initial=0.0)),
    )
