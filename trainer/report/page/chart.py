"""Draws charts as paths in a square of SPAN x SPAN units.

The page stretches the square but not the lines, and writes every word in HTML around it, so text has the same size at
any width.

    y ticks |  ________
            | / layers \\___     a layer is one path: a line, an area or dots
            |/              \\
            +----------------
              x ticks
"""

from dataclasses import dataclass

import numpy as np

from rowcast.trainer.report.page.axis import SPAN, WORDS, Axis, Floats

TABLE_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One path. `look` is a class of the page's style sheet, which sets its colour and, as a second mark, a dash."""

    look: str
    path: str
    name: str = ""  # in the legend; a layer without a name is not listed


@dataclass(frozen=True, kw_only=True)
class Series:
    """The numbers that layers show, for the text and the table."""

    name: str
    y: Floats


@dataclass(frozen=True, kw_only=True)
class ChartTable:
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    caption: str  # its content and how to read it
    x: Axis
    y: Axis
    layers: list[Layer]
    text: str  # for readers who cannot see the chart
    table: ChartTable  # a few of its points

    @property
    def legend(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.name]


@dataclass(frozen=True, kw_only=True)
class NoChart:
    """Replaces a chart without data."""

    title: str
    caption: str  # why


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Draws paths between two axes. Each path needs at least one point."""

    x: Axis
    y: Axis

    def line(self, x: Floats, y: Floats) -> str:
        return "M" + "L".join(self._points(x, y))

    def dots(self, x: Floats, y: Floats) -> str:
        """Draws lines without length, which round ends make visible."""
        return "".join(f"M{point}h0" for point in self._points(x, y))

    def area(self, x: Floats, low: Floats, high: Floats) -> str:
        return "M" + "L".join([*self._points(x, high), *self._points(x[::-1], low[::-1])]) + "Z"

    def across(self, x: float) -> str:
        return f"M{self.x.place(np.array([x]))[0]:.5g} 0V{SPAN:g}"

    def _points(self, x: Floats, y: Floats) -> list[str]:
        return [f"{a:.5g} {b:.5g}" for a, b in zip(self.x.place(x), SPAN - self.y.place(y), strict=True)]


def stairs(edges: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Turns means of intervals into points of a line: edges [n + 1], values [n] -> x and y [2n]."""
    return np.repeat(edges, 2)[1:-1], np.repeat(values, 2)


def describe(x: Floats, x_axis: Axis, y_axis: Axis, *series: Series) -> str:
    say, where = WORDS[y_axis.unit], WORDS[x_axis.unit]
    sentences = []
    for one in series:
        low, high = int(np.argmin(one.y)), int(np.argmax(one.y))
        sentences.append(
            f"{one.name}: first {say(one.y[0])}, last {say(one.y[-1])}, least {say(one.y[low])} at {where(x[low])}, "
            f"largest {say(one.y[high])} at {where(x[high])}."
        )
    return f"Over {x_axis.label} from {where(x[0])} to {where(x[-1])}. " + " ".join(sentences)


def some_points(x: Floats, x_axis: Axis, y_axis: Axis, *series: Series) -> ChartTable:
    chosen = np.unique(np.linspace(0, len(x) - 1, min(TABLE_ROWS, len(x))).round().astype(int))
    say, where = WORDS[y_axis.unit], WORDS[x_axis.unit]
    return ChartTable(
        columns=[x_axis.label, *(one.name for one in series)],
        rows=[[where(float(x[i])), *(say(float(one.y[i])) for one in series)] for i in chosen],
    )
