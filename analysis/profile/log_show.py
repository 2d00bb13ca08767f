"""Shows what a log looks up: sentences and a table on the terminal, a picture in a file."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rowcast.analysis.profile.log_facts import HOTTEST, LogFacts, Point, TableFacts
from rowcast.analysis.simulate.plot import LABELS, line_style
from rowcast.analysis.simulate.results import Simulation
from rowcast.runtime.drawing import BLUE, PERCENT, dress, new_figure, save_plot
from rowcast.runtime.telemetry.format_numbers import human_bytes, percent

INCHES = (11.0, 8.0)
MOST_TABLES = 20  # with a bar each
COLUMNS = (
    "table", "rows", "rows\ntouched", "look-ups\nper step", "distinct\nrows", "KiB\nper step",
    f"hottest\n{100 * HOTTEST:g} %", "hottest to\nmedian",
)  # fmt: skip


def print_log(facts: LogFacts, console: Console) -> None:
    for line in summary(facts):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "table" else "right", no_wrap=True)
    for own in facts.tables:
        table.add_row(
            own.table,
            f"{own.num_rows:,}",
            f"{own.rows_touched:,}",
            f"{own.lookups / facts.steps:,.0f}",
            f"{own.unique_rows / facts.steps:,.0f}",
            f"{own.unique_rows * own.record_bytes / facts.steps / 2**10:,.1f}",
            percent(own.hottest_share),
            f"{skew(own):,.0f}",
        )
    console.print(table)


def summary(facts: LogFacts) -> Iterator[str]:
    touched = sum(table.rows_touched for table in facts.tables)
    step_bytes = sum(table.unique_rows * table.record_bytes for table in facts.tables) / facts.steps
    yield (
        f"{facts.steps:,} steps of {facts.batch_size:,} samples look up {touched:,} rows of "
        f"{sum(table.num_rows for table in facts.tables):,}. A step makes {facts.lookups / facts.steps:,.0f} look-ups "
        f"of {facts.unique_rows / facts.steps:,.0f} distinct rows, {human_bytes(step_bytes)}."
    )
    most = max(facts.tables, key=skew)
    yield (
        f"The hottest row of table {most.table} is looked up {most.most_lookups:,} times, {skew(most):,.0f} times as "
        f"often as its median row. The hottest {100 * HOTTEST:g} % of all rows touched get "
        f"{percent(share_at(facts.hottest, HOTTEST))} of the look-ups."
    )
    yield f"All rows with their optimizer state are {human_bytes(facts.total_bytes)}."
    own = [result for result in facts.caches if result.policy == "lookahead"]
    if own:
        hits = ", ".join(f"{human_bytes(float(result.capacity))}: {percent(result.hit_ratio or 0)}" for result in own)
        yield f"Share of a step's distinct rows that a cache already holds, with look-ahead: {hits}."


def skew(table: TableFacts) -> float:
    return table.most_lookups / max(1.0, table.median_lookups)


def share_at(points: Sequence[Point], x: float) -> float:
    """The share of the last point up to `x`."""
    return max((point.share for point in points if point.x <= x), default=points[0].share)


def plot_log(facts: LogFacts, path: Path) -> None:
    """Raises ConfigError if the picture cannot be written."""
    figure = new_figure(INCHES)
    ((bytes_panel, hottest_panel), (reuse_panel, cache_panel)) = figure.subplots(2, 2)
    figure.suptitle("\n".join(summary(facts)), fontsize=8, ha="left", x=0.01)
    draw_bytes(bytes_panel, facts)
    hottest_panel.plot([point.x for point in facts.hottest], [point.share for point in facts.hottest], color=BLUE)
    hottest_panel.set_xscale("log")
    hottest_panel.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    label(hottest_panel, "few rows get most look-ups", "hottest rows, of all rows touched", "share of look-ups")
    reuse_panel.plot([point.x for point in facts.reuse], [point.share for point in facts.reuse], "o-", color=BLUE)
    reuse_panel.set_xscale("log", base=2)
    label(reuse_panel, "rows come back soon", "steps since the row was used", "share of a step's distinct rows")
    draw_caches(cache_panel, facts.caches)
    for panel in (hottest_panel, reuse_panel, cache_panel):
        panel.yaxis.set_major_formatter(PERCENT)
        panel.set_ylim(0, 1.02)
    for panel in (reuse_panel, cache_panel):
        panel.xaxis.set_major_formatter("{x:g}")
    save_plot(figure, path, dpi=160)


def label(panel: Any, title: str, x: str, y: str) -> None:
    panel.set_title(title, fontsize=10)
    panel.set(xlabel=x, ylabel=y)
    dress(panel)


def draw_bytes(panel: Any, facts: LogFacts) -> None:
    """The largest at the top; beyond MOST_TABLES the others share a bar."""
    nbytes = sorted(
        ((table.unique_rows * table.record_bytes / facts.steps, table.table) for table in facts.tables), reverse=True
    )
    shown, others = nbytes[:MOST_TABLES], nbytes[MOST_TABLES:]
    if others:
        shown.append((sum(size for size, _ in others), f"{len(others)} others"))
    names = [name for _, name in shown]
    panel.barh(names, [size / 2**10 for size, _ in shown], color=BLUE)
    panel.invert_yaxis()
    panel.tick_params(axis="y", labelsize=7)
    label(panel, "bytes that a step touches", "KiB of distinct rows per step", "table")


def draw_caches(panel: Any, caches: Sequence[Simulation]) -> None:
    by_policy = sorted(caches, key=lambda result: result.policy)
    for policy, own in groupby(by_policy, key=lambda result: result.policy):
        points = sorted((float(result.capacity) / 2**20, result.hit_ratio or 0.0) for result in own)
        panel.plot(*zip(*points, strict=True), label=LABELS.get(policy, policy), **line_style(policy, "-"))
    if caches:
        panel.set_xscale("log", base=2)
        panel.legend(frameon=False, fontsize=9)
    label(panel, "what a cache holds", "MiB of cache", "distinct rows of a step already on the device")
