"""Axes of a chart: places values and ticks, and formats numbers there and in the text.

low             ticks              high
|     |         |         |        |
0                                  SPAN     the chart's units, which the page stretches
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log2, log10
from typing import Literal

import numpy as np

from rowcast.runtime.arrays import F64
from rowcast.runtime.telemetry.format_numbers import human_bytes, human_count, human_seconds

SPAN = 1000.0
MOST_TICKS = 5  # ticks that fit on a narrow page
LONGEST_COUNT = 10_000  # the largest count written in full at a tick
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400
SECONDS = [
    *(1, 2, 5, 10, 20, 30),
    *(m * MINUTE_S for m in (1, 2, 5, 10, 20, 30)),
    *(h * HOUR_S for h in (1, 2, 4, 6, 12)),
    DAY_S,
]

Unit = Literal["steps", "seconds", "count", "share", "bytes", "plain"]
Floats = F64


@dataclass(frozen=True, kw_only=True)
class Tick:
    percent: float  # of the axis's length
    label: str


@dataclass(frozen=True, kw_only=True)
class Axis:
    label: str
    unit: Unit
    low: float
    high: float
    step: float | None = None  # between ticks; None: chosen for the length

    def __post_init__(self) -> None:
        assert self.low < self.high, f"an axis from {self.low} to {self.high} has no length"

    def place(self, values: Floats) -> Floats:
        """Converts to the chart's units; values outside the axis move to its edge."""
        return np.clip((values - self.low) / (self.high - self.low), 0.0, 1.0) * SPAN

    @property
    def ticks(self) -> list[Tick]:
        step = self.step or tick_step(self.high - self.low, self.unit)
        numbers = range(ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9) + 1)
        places = self.place(np.array(numbers, np.float64) * step) * (100 / SPAN)
        return [
            Tick(percent=float(place), label=tick_label(n * step, step, self.unit))
            for n, place in zip(numbers, places, strict=True)
        ]


def outwards(low: float, high: float, label: str, unit: Unit) -> Axis:
    """Makes an axis that begins and ends with a tick, with room on both sides if all values are equal."""
    if not low < high:
        room = abs(low) / 10 or 1.0
        low, high = low - room, high + room
    step = tick_step(high - low, unit)
    return Axis(label=label, unit=unit, low=floor(low / step) * step, high=ceil(high / step) * step, step=step)


def tick_step(length: float, unit: Unit) -> float:
    """Returns the distance of two ticks: round in the unit, and large enough for at most MOST_TICKS."""
    least = length / MOST_TICKS
    if unit == "seconds" and least >= 1:
        days = ceil(least / DAY_S)
        return float(days * DAY_S if days > 1 else SECONDS[bisect_left(SECONDS, least)])
    if unit == "bytes" and least >= 1:
        return float(2 ** ceil(log2(least)))
    if unit in ("steps", "bytes"):
        least = max(least, 1.0)
    magnitude = 10.0 ** floor(log10(least))
    return next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= least * (1 - 1e-9))


def tick_label(value: float, step: float, unit: Unit) -> str:
    if unit == "share":
        return f"{100 * value:.{decimals(100 * step)}f} %"
    if unit == "plain":
        return f"{value:.{decimals(step)}f}"
    if unit == "seconds":
        return time_label(value, step)
    if unit == "steps" and value > LONGEST_COUNT:
        return human_count(value)
    return f"{value:g}" if unit == "count" and step < 1 else WORDS[unit](value)


def decimals(step: float) -> int:
    return max(0, -floor(log10(step) + 1e-9))


def time_label(seconds: float, step: float) -> str:
    """Uses the largest unit in which the step is whole: three minutes are "180 s" between "160 s" and "200 s"."""
    unit_s, unit = next(
        found
        for found in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min"), (1, "s"))
        if step >= found[0] or found[0] == 1
    )
    return f"{seconds / unit_s:.{decimals(step) if step < 1 else 0}f} {unit}"


def share(value: float) -> str:
    """Formats a fraction with two significant digits, even a very small one."""
    return f"{100 * value:.1f} %" if value >= 0.01 or not value else f"{100 * value:.2g} %"


WORDS: dict[Unit, Callable[[float], str]] = {
    "steps": lambda value: f"{value:,.0f}",
    "seconds": human_seconds,
    "count": human_count,
    "share": share,
    "bytes": human_bytes,
    "plain": lambda value: f"{value:.4f}",
}  # a number in running text
