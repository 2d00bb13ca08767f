"""Recommends a capacity: finds the knee of the cost curve, and writes sections to paste, with reasons.

knee    the smallest capacity from which doubling it saves less than a tenth of the bytes fetched
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from rowcast.analysis.advise.cost import Assumed, CoresNeed, Demand, Rates, cost, demand
from rowcast.analysis.advise.curve import Traffic, Trials
from rowcast.analysis.advise.read import Observed, Read
from rowcast.analysis.advise.tiers import MOST_WAITING, TierAdvice
from rowcast.job.schema import Job
from rowcast.runtime.telemetry.format_numbers import human_bytes, percent_number, size_text

KNEE_SAVING = 0.1
MOST_STALLING = 0.5  # of the stretches, at any capacity; if more stall, the trainer is not waiting for capacity
USUAL_DEPTH, MOST_DEPTH = 4, 16
TOML_WIDTH = 78


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    capacity_bytes: int
    traffic: Traffic
    doubling_saves: float  # share of the bytes fetched
    move_ms: float  # mean time per step of the slowest stage that moves rows
    limit: str  # that stage, or planning if it takes longer
    least_step_ms: float  # a shorter step waits for rows that a larger cache would have kept; 0 if there are none
    stalls: bool  # for such rows, at the assumed step time


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    knee_bytes: int
    no_stall_bytes: int | None  # None: the trainer waits most of the time at any capacity
    stalling_anyway: float  # share of the stretches of depth + 1 steps that take longer than a step at any capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    capacity: str
    depth: int
    id_bytes: str | None  # None: as the job has it
    reasons: dict[str, str]  # section.key -> a sentence
    toml: str
    predicted: Point


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    read: Read
    assumed: Assumed
    cores: CoresNeed
    curve: tuple[Point, ...]  # by capacity, ascending; the last one holds all rows that were touched
    choice: Choice
    recommended: Recommendation
    tier: (
        TierAdvice | None
    )  # at the recommended capacity, or the job's if that is smaller; None: the job's store has no memory tier
    notes: tuple[str, ...]  # what is guessed, and what else matters


def knee(savings: Sequence[float]) -> int:
    """Returns the index of the knee. `savings`: the bytes that doubling each capacity saves, by ascending capacity."""
    worth = [index for index, saving in enumerate(savings) if saving >= KNEE_SAVING]
    return min(len(savings) - 1, max(worth, default=-1) + 1)


def first_without(stalls: Sequence[bool]) -> int:
    """Returns the index of the smallest capacity from which none stalls; the last one never does."""
    assert not stalls[-1], "the largest capacity stalls although it holds every row"
    return max((index for index, stall in enumerate(stalls) if stall), default=-1) + 1


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
            traffic=self._trials.traffic(capacity_bytes),
            doubling_saves=self._doubling_saves(capacity_bytes),
            move_ms=1e3 * own.mean_s,
            limit=own.stage if own.mean_s > self._rates.plan_s else "planning",
            least_step_ms=1e3 * own.least_step_s,
            stalls=own.least_step_s > self._step_s,
        )

    def choice(self, curve: tuple[Point, ...]) -> Choice:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenValues:
    predicted: Point
    depth: int
    travel_ms: float  # of a step's rows, to the device and back
    step_ms: float
    horizon: int  # batches known ahead
    known_bytes: int  # of their ids
    id_bytes: int | None  # a larger budget for ids, if the job's is too small


def enough_depth(travel_s: float, step_s: float) -> int:
    """Returns the depth that hides the rows' travel behind earlier steps, and one step more for variation."""
    return min(MOST_DEPTH, max(USUAL_DEPTH, ceil(travel_s / step_s) + 1))


def sections(chosen: ChosenValues, tier: TierAdvice | None) -> dict[str, dict[str, str | int]]:
    lookahead: dict[str, str | int] = {"depth": chosen.depth, "horizon": "auto"}
    if chosen.id_bytes is not None:
        lookahead["id_bytes"] = size_text(chosen.id_bytes)
    found: dict[str, dict[str, str | int]] = {
        "cache": {"capacity": size_text(chosen.predicted.capacity_bytes), "policy": "lookahead"},
        "lookahead": lookahead,
    }
    if tier is not None and tier.recommended is not None:
        found["store"] = {"memory": tier.recommended.memory}
    return found


def reasons(job: Job, chosen: ChosenValues, choice: Choice, tier: TierAdvice | None) -> dict[str, str]:
    found = {
        "cache.capacity": capacity_reason(chosen, choice),
        "cache.policy": "keeps the rows of coming steps; `rowcast simulate` compares it with others",
        "lookahead.depth": (
            f"the rows of a step take {chosen.travel_ms:.2g} ms to the device and back; {chosen.depth} steps of "
            f"{chosen.step_ms:g} ms in flight cover that and even out busy ones"
        ),
        "lookahead.horizon": (
            f"grows until plans no longer guess: here to {chosen.horizon} batches, whose ids take "
            f"{human_bytes(chosen.known_bytes)} of the host's memory"
        ),
    }
    if chosen.id_bytes is not None:
        found["lookahead.id_bytes"] = (
            f"the ids known ahead would fetch more rows if they had to stay below {job.lookahead.id_bytes}"
        )
    if tier is not None and tier.recommended is not None:
        found["store.memory"] = (
            f"{tier.recommended.rows_from_cold_per_step:,.0f} rows from the cold tier per step; the smallest memory "
            f"with which steps of {chosen.step_ms:g} ms wait for it less than {100 * MOST_WAITING:g} % of the time"
        )
    return found


def capacity_reason(chosen: ChosenValues, choice: Choice) -> str:
    fetched = f"{chosen.predicted.traffic.rows_fetched_per_step:,.0f} rows fetched per step"
    if choice.no_stall_bytes is not None and choice.no_stall_bytes > choice.knee_bytes:
        step = f"a step of {chosen.step_ms:g} ms"
        return f"{fetched}; the smallest capacity at which {step} does not wait for rows that did not fit"
    saves = percent_number(max(0.0, chosen.predicted.doubling_saves))
    least = percent_number(KNEE_SAVING)
    return f"{fetched}; doubling it would save {saves} %; every doubling up to here saves {least} % or more"


def toml(values: Mapping[str, Mapping[str, str | int]], why: Mapping[str, str]) -> str:
    lines: list[str] = []
    for section, keys in values.items():
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for key, value in keys.items():
            lines += textwrap.wrap(why[f"{section}.{key}"], TOML_WIDTH, initial_indent="# ", subsequent_indent="# ")
            lines.append(f"{key} = {value}" if isinstance(value, int) else f'{key} = "{value}"')
    return "\n".join([*lines, ""])
