"""Draws a few walked steps: a row per thread, a colour per step, waits hatched, the critical path framed and joined."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rowcast.analysis.estimate.schedule import Task, Thread, critical_path, waits
from rowcast.runtime.drawing import Bar, Window, draw_rows, save_plot

PATH = {"color": "black", "linewidth": 1.4, "zorder": 6}


def plot_tasks(threads: Sequence[Thread], steps: Sequence[Task], path: Path) -> None:
    """`steps`: the tasks that end the steps to draw, and the one before them. Raises ConfigError if the picture cannot
    be written."""
    window = (ns(steps[0].ended_s), ns(steps[-1].ended_s))
    bars = {thread.name: [*bars_of(thread)] for thread in threads}
    rows = {name: own for name, own in bars.items() if any(is_work(bar, window) for bar in own)}
    figure, axes = draw_rows([*rows.items()], window, "black: the critical path")
    draw_path(axes, [*rows], steps[-1], window)
    save_plot(figure, path, dpi=120)


def bars_of(thread: Thread) -> Iterator[Bar]:
    for task in thread.done:
        yield Bar(ns(task.began_s), ns(task.ended_s), task.name, task.step)
    for reason, began_s, ended_s in waits(thread):
        yield Bar(ns(began_s), ns(ended_s), reason, None, waits=True)


def is_work(bar: Bar, window: Window) -> bool:
    return not bar.waits and bar.began_ns < window[1] and bar.ended_ns > window[0]


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
