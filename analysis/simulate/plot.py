"""Miss-ratio curves: the share of the steps' distinct rows that must be fetched, over the capacity, one line per
policy.
"""

from collections.abc import Iterator, Sequence
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


def check_plot(path: Path) -> None:
    """Raises ConfigError, before any work, if no picture can be drawn to `path`."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: name a file that ends in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.absolute().parent} does not exist; make it")
    if find_spec("matplotlib") is None:
        raise ConfigError('--plot needs matplotlib, which is not installed; `pip install "rowcast[plot]"` adds it')


def plot_results(results: Sequence[Simulation], path: Path) -> None:
    """Draws to `path`, one panel per batch size and order. Raises ConfigError if it cannot be written."""
    from matplotlib.figure import Figure

    shown = [result for result in results if result.rows_fetched is not None and result.unique_rows]
    panels: dict[str, list[Simulation]] = {}
    for result in shown:
        panels.setdefault(f"batches of {batches_of(result)}", []).append(result)
    if not shown:
        return  # the command explains
    figure = Figure(figsize=(SIDE_INCHES[0] * len(panels) + LEGEND_INCHES, SIDE_INCHES[1]), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, (title, own) in zip(axes, panels.items(), strict=True):
        draw_panel(panel, own)
        panel.set_title(title, fontsize=10)
    axes[0].set_ylabel("distinct rows of a step that are fetched")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise ConfigError(
            f"--plot {path}: cannot be written ({error.strerror}); choose another file or free space"
        ) from None


def draw_panel(axes: Any, results: Sequence[Simulation]) -> None:
    from matplotlib.ticker import PercentFormatter

    for label, style, points in curves(results):
        axes.plot(*zip(*points, strict=True), label=label, **style)
    mark_capacities(axes, sorted({result.capacity_rows or 0 for result in results}))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def mark_capacities(axes: Any, capacities: list[int]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xlabel("capacity in rows")
    far = capacities[-1] > FAR_APART * max(1, capacities[0])
    if far:
        axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_count(value)))
    apart = all(later > 1.2 * earlier for earlier, later in pairwise(capacities))
    if len(capacities) <= MOST_TICKS and (apart or len(capacities) == 1):
        axes.set_xticks(capacities)


def curves(results: Sequence[Simulation]) -> Iterator[tuple[str, dict[str, Any], list[tuple[int, float]]]]:
    horizons = list(dict.fromkeys(result.horizon for result in results if result.horizon is not None))
    lines: dict[tuple[str, Any], list[tuple[int, float]]] = {}
    for result in results:
        if result.policy != BOUND:
            lines.setdefault((result.policy, result.horizon), []).append(
                (result.capacity_rows or 0, ratio(result.rows_fetched, result))
            )
    for (policy, horizon), points in lines.items():
        style = STYLES[horizons.index(horizon) % len(STYLES)] if horizon is not None else "-"
        label = LABELS.get(policy, policy) + (f", horizon {horizon}" if horizon is not None else "")
        yield label, line_style(policy, style), sorted(points)
    bound = sorted({(result.capacity_rows or 0, ratio(result.bound_rows_fetched, result)) for result in results})
    yield "whole future known", BOUND_STYLE, bound


def line_style(policy: str, style: str) -> dict[str, Any]:
    front = 4 if policy == "lookahead" else 3  # otherwise it often hides behind others
    colour, marker = LOOKS.get(policy, OTHER_LOOK)
    return {"color": colour, "marker": marker, "markersize": 5, "linestyle": style, "linewidth": 1.6, "zorder": front}


def ratio(rows: int | None, result: Simulation) -> float:
    return (rows or 0) / (result.unique_rows or 1)
