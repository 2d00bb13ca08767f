"""Draws a few walked steps: a row per thread, a colour per step, waits hatched, the critical path framed and joined."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rowcast.analysis.estimate.schedule import Task, Thread, critical_path, waits
from rowcast.analysis.simulate.plot import save_plot
from rowcast.analysis.timeline.plot import ROW_INCHES, WIDTH_INCHES, draw, joined
from rowcast.analysis.timeline.trace_events import Window, overlaps
from rowcast.runtime.telemetry.timeline import TimelineSpan

PATH = {"color": "black", "linewidth": 1.4, "zorder": 6}


def plot_tasks(threads: Sequence[Thread], steps: Sequence[Task], path: Path) -> None:
    """`steps`: the tasks that end the steps to draw, and the one before them. Raises ConfigError if the picture cannot
    be written."""
    from matplotlib.figure import Figure

    window: Window = (ns(steps[0].ended_s), ns(steps[-1].ended_s))
    spans = {thread.name: [span for span in spans_of(thread) if overlaps(span, window)] for thread in threads}
    names = [name for name, own in spans.items() if any(span.kind == "work" for span in own)]
    figure = Figure(figsize=(WIDTH_INCHES, ROW_INCHES * len(names) + 0.8), layout="constrained")
    axes: Any = figure.subplots()
    for row, name in enumerate(names):
        for span in joined(spans[name], window):
            draw(axes, row, span, window)
    draw_path(axes, names, steps[-1], window)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlim(0, (window[1] - window[0]) / 1e6)
    axes.set_xlabel(
        "milliseconds          a colour: a step     hatched: waiting     black: the critical path", fontsize=9
    )
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    save_plot(figure, path, dpi=120)


def spans_of(thread: Thread) -> Iterator[TimelineSpan]:
    for task in thread.done:
        yield TimelineSpan("work", thread.name, task.name, ns(task.began_s), ns(task.ended_s - task.began_s), task.step)
    for reason, began_s, ended_s in waits(thread):
        yield TimelineSpan("wait", thread.name, reason, ns(began_s), ns(ended_s - began_s), None)


def draw_path(axes: Any, names: Sequence[str], last: Task, window: Window) -> None:
    """A frame around each task on the path, a line from each to the next one on another thread."""
    before: tuple[int, float] | None = None  # row and end of the last one drawn
    for task, _ in critical_path(last):
        if ns(task.ended_s) <= window[0] or task.thread.name not in names:
            continue
        row = names.index(task.thread.name)
        began_ms, ended_ms = (max(0.0, (ns(moment_s) - window[0]) / 1e6) for moment_s in (task.began_s, task.ended_s))
        if before is not None and before[0] != row:
            axes.plot((before[1], began_ms), (before[0], row), **PATH)
        axes.broken_barh(
            [(began_ms, ended_ms - began_ms)], (row - 0.37, 0.74), facecolor="none", edgecolor="black", zorder=6,
            linewidth=PATH["linewidth"],
        )  # fmt: skip
        before = row, ended_ms


def ns(seconds: float) -> int:
    return round(1e9 * seconds)
