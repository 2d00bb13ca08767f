"""Draws miss-ratio curves: the share of the steps' distinct rows that must be fetched, over the capacity, with a line
per policy. With memory tiers, other panels show the share from the cold tier, over the rows in memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from rowcast.analysis.simulate.grid import BOUND
from rowcast.analysis.simulate.results import Simulation, batches_of
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import human_count

SUFFIXES = (".png", ".svg")
LOOKS = {  # distinguishable with red-green colour blindness (Okabe and Ito)
    "lookahead": ("#0072B2", "o"),
    "lru": ("#D55E00", "s"),
    "lfu": ("#CC79A7", "D"),
    "static": ("#E69F00", "v"),
    "window": ("#56B4E9", "^"),
    "ttl": ("#009E73", "P"),
}
BOUND_STYLE = {
    "color": "#d0d0d0",
    "linewidth": 7.0,
    "solid_capstyle": "round",
    "marker": "o",
    "markersize": 7,
    "zorder": 2,
}
OTHER_LOOK = ("#000000", "x")
STYLES = ("-", "--", ":", "-.")
LABELS = {"lookahead": "look-ahead", "lru": "LRU", "lfu": "LFU", "ttl": "time to live"}
SIDE_INCHES = (5.2, 4.0)  # width and height of a panel
LEGEND_INCHES = 2.2
FAR_APART = 4  # times the smallest capacity
MOST_TICKS = 8


@dataclass(frozen=True, slots=True)
class Curves:
    """The fields of a `Simulation` that a panel shows."""

    size: str
    rows: str
    bound: str
    x_label: str
    y_label: str


FETCHED = Curves(
    "capacity_rows",
    "rows_fetched",
    "bound_rows_fetched",
    "capacity in rows",
    "distinct rows of a step that are fetched",
)
FROM_COLD = Curves(
    "memory_rows",
    "rows_from_cold",
    "bound_rows_from_cold",
    "rows in memory",
    "distinct rows of a step from the cold tier",
)


def check_plot(path: Path) -> None:
    """Raises ConfigError, before any work, if no picture can be drawn to `path`."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: name a file that ends in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.absolute().parent} does not exist; make it")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; `pip install matplotlib` adds it")


def plot_results(results: Sequence[Simulation], path: Path) -> None:
    """Draws to `path`, one panel per batch size and order. Raises ConfigError if it cannot be written."""
    from matplotlib.figure import Figure

    shown = [result for result in results if result.rows_fetched is not None and result.unique_rows]
    panels: dict[str, list[Simulation]] = {}
    for result in shown:
        panels.setdefault(f"batches of {batches_of(result)}", []).append(result)
    if not shown:
        return  # the command explains
    kinds = [FETCHED, FROM_COLD] if any(result.memory_rows is not None for result in shown) else [FETCHED]
    size = SIDE_INCHES[0] * len(panels) + LEGEND_INCHES, SIDE_INCHES[1] * len(kinds)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(kinds), len(panels), sharey="row", squeeze=False)
    for kind, row in zip(kinds, axes, strict=True):
        for panel, (title, own) in zip(row, panels.items(), strict=True):
            counted = [result for result in own if getattr(result, kind.size) is not None]
            if counted:
                draw_panel(panel, counted, kind)
                panel.set_title(title, fontsize=10)
            else:
                panel.set_axis_off()
        row[0].set_ylabel(kind.y_label)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    save_plot(figure, path, dpi=160)


def save_plot(figure: Any, path: Path, dpi: int) -> None:
    """`figure` is matplotlib's. Raises ConfigError."""
    try:
        figure.savefig(path, dpi=dpi)
    except OSError as error:
        raise ConfigError(
            f"--plot {path}: cannot be written ({error.strerror}); choose another file or free space"
        ) from None


def draw_panel(axes: Any, results: Sequence[Simulation], kind: Curves) -> None:
    from matplotlib.ticker import PercentFormatter

    for label, style, points in curves(results, kind):
        axes.plot(*zip(*points, strict=True), label=label, **style)
    mark_sizes(axes, sorted({getattr(result, kind.size) for result in results}), kind.x_label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def mark_sizes(axes: Any, sizes: list[int], label: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xlabel(label)
    far = sizes[-1] > FAR_APART * max(1, sizes[0])
    if far:
        axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_count(value)))
    apart = all(later > 1.2 * earlier for earlier, later in pairwise(sizes))
    if len(sizes) <= MOST_TICKS and (apart or len(sizes) == 1):
        axes.set_xticks(sizes)


def curves(
    results: Sequence[Simulation], kind: Curves
) -> Iterator[tuple[str, dict[str, Any], list[tuple[int, float]]]]:
    horizons = list(dict.fromkeys(result.horizon for result in results if result.horizon is not None))
    lines: dict[tuple[str, Any], list[tuple[int, float]]] = {}
    for result in results:
        if result.policy != BOUND:
            lines.setdefault((result.policy, result.horizon), []).append(
                (getattr(result, kind.size), ratio(getattr(result, kind.rows), result))
            )
    for (policy, horizon), points in lines.items():
        style = STYLES[horizons.index(horizon) % len(STYLES)] if horizon is not None else "-"
        label = LABELS.get(policy, policy) + (f", horizon {horizon}" if horizon is not None else "")
        yield label, line_style(policy, style), sorted(points)
    bound = sorted({(getattr(result, kind.size), ratio(getattr(result, kind.bound), result)) for result in results})
    yield "whole future known", BOUND_STYLE, bound


def line_style(policy: str, style: str) -> dict[str, Any]:
    front = 4 if policy == "lookahead" else 3  # otherwise it often hides behind others
    colour, marker = LOOKS.get(policy, OTHER_LOOK)
    return {"color": colour, "marker": marker, "markersize": 5, "linestyle": style, "linewidth": 1.6, "zorder": front}


def ratio(rows: int | None, result: Simulation) -> float:
    return (rows or 0) / (result.unique_rows or 1)
