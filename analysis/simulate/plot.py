"""Draws miss-ratio curves: the share of the steps' distinct rows that must be fetched, over the capacity, with a line
per policy.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rowcast.analysis.simulate.grid import BOUND
from rowcast.analysis.simulate.simulate import Simulation, batches_of
from rowcast.runtime.drawing import BLUE, GREEN, ORANGE, PERCENT, PINK, RED, SKY, dress, new_figure, save_plot
from rowcast.runtime.telemetry.format_numbers import human_count

LOOKS = {
    "lookahead": (BLUE, "o"),
    "lru": (RED, "s"),
    "lfu": (PINK, "D"),
    "static": (ORANGE, "v"),
    "window": (SKY, "^"),
    "ttl": (GREEN, "P"),
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


def plot_results(results: Sequence[Simulation], path: Path) -> None:
    """Draws to `path`, one panel per batch size and order. Raises ConfigError if it cannot be written."""
    shown = [result for result in results if result.rows_fetched is not None and result.unique_rows]
    panels: dict[str, list[Simulation]] = {}
    for result in shown:
        panels.setdefault(f"batches of {batches_of(result)}", []).append(result)
    if not shown:
        return  # the command explains
    figure = new_figure((SIDE_INCHES[0] * len(panels) + LEGEND_INCHES, SIDE_INCHES[1]))
    [axes] = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for panel, (title, own) in zip(axes, panels.items(), strict=True):
        draw_panel(panel, own)
        panel.set_title(title, fontsize=10)
    axes[0].set_ylabel("distinct rows of a step that are fetched")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    save_plot(figure, path, dpi=160)


def draw_panel(axes: Any, results: Sequence[Simulation]) -> None:
    for label, style, points in curves(results):
        axes.plot(*zip(*points, strict=True), label=label, **style)
    mark_sizes(axes, sorted({result.capacity_rows or 0 for result in results}))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PERCENT)
    dress(axes)


def mark_sizes(axes: Any, sizes: list[int]) -> None:
    axes.set_xlabel("capacity in rows")
    far = sizes[-1] > FAR_APART * max(1, sizes[0])
    if far:
        axes.set_xscale("log")
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: human_count(value))
    apart = all(later > 1.2 * earlier for earlier, later in pairwise(sizes))
    if len(sizes) <= MOST_TICKS and (apart or len(sizes) == 1):
        axes.set_xticks(sizes)


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
