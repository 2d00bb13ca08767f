"""The curve: each capacity with its traffic, with what a step has to take there, and with what twice as much would save."""

from rowcast.analysis.advise.advice import Choice, Point
from rowcast.analysis.advise.choice import first_without, knee
from rowcast.analysis.advise.curve import capacity_slots
from rowcast.analysis.advise.demand import Demand, cost, demand
from rowcast.analysis.advise.machine_rates import Rates
from rowcast.analysis.advise.observed import Observed
from rowcast.analysis.advise.trials import Trials

MOST_STALLING = 0.5  # of the stretches, with any capacity; where more do, capacity is not what the trainer waits for


class Points:
    def __init__(self, observed: Observed, trials: Trials, rates: Rates, step_s: float, depth: int) -> None:
        self._observed, self._trials, self._rates = observed, trials, rates
        self._step_s, self._depth = step_s, depth
        self._everything = self.demand(trials.capacities[-1])

    def demand(self, capacity_bytes: int) -> Demand:
        return demand(self._observed, self._trials.moved(capacity_bytes), self._rates, self._depth)

    def curve(self) -> tuple[Point, ...]:
        return tuple(map(self.at, self._trials.capacities))

    def at(self, capacity_bytes: int) -> Point:
        own = cost(self.demand(capacity_bytes), self._everything)
        return Point(
            capacity_bytes=capacity_bytes,
            capacity_rows=sum(capacity_slots(self._observed, capacity_bytes)),
            lookahead=self._trials.traffic(capacity_bytes, "lookahead"),
            lru=self._trials.traffic(capacity_bytes, "lru"),
            doubling_saves=self._doubling_saves(capacity_bytes),
            move_ms=1e3 * own.mean_s,
            limit=own.stage if own.mean_s > self._rates.plan_s else "planning",
            least_step_ms=1e3 * own.least_step_s,
            stalls=own.least_step_s > self._step_s,
        )

    def choice(self, curve: tuple[Point, ...]) -> Choice:
        """`curve` ends where every row that was touched fits."""
        anyway = 1.0 - float(self._everything.fits(self._step_s).mean())
        enough = curve[first_without([point.stalls for point in curve])].capacity_bytes
        return Choice(
            knee_bytes=curve[knee([point.doubling_saves for point in curve])].capacity_bytes,
            no_stall_bytes=enough if anyway <= MOST_STALLING else None,
            stalling_anyway=anyway,
        )

    def _doubling_saves(self, capacity_bytes: int) -> float:
        before = self._trials.fetched_bytes(capacity_bytes)
        after = self._trials.fetched_bytes(min(2 * capacity_bytes, self._trials.capacities[-1]))
        return max(0.0, 1 - after / before) if before else 0.0
