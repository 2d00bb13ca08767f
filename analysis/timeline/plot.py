"""Draws a few steps: one row per thread, one colour per step, waits hatched; thin lines connect the announcement of a
step's rows with the step's start.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rowcast.analysis.timeline.recording import Recordings, TimelineRecording, ended_ns, lives
from rowcast.analysis.timeline.trace_events import Window, overlaps, track_name, tracks
from rowcast.runtime.drawing import Bar, colour, draw_rows, save_plot
from rowcast.runtime.telemetry.timeline import TimelineSpan

LEFT_OUT = ("mail",)  # tracks with spans too short to see
NESTED = ("gather", "scatter")


def plot_steps(recordings: Recordings, window: Window, path: Path) -> None:
    """Draws `window` to `path`. Raises ConfigError if it cannot be written."""
    rows = [
        (recording, name)
        for recording in recordings.both
        for name in tracks(recording)
        if name not in LEFT_OUT and any(overlaps(span, window) for span in on_track(recording, name))
    ]
    bars = [(name, map(bar_of, on_track(recording, name))) for recording, name in rows]
    figure, axes = draw_rows(bars, window, "lines: rows announced, until their step begins")
    where = {(recording.header.process, name): row for row, (recording, name) in enumerate(rows)}
    if ("prefetcher", "fetcher") in where and ("trainer", "main") in where:
        draw_ways(axes, where["prefetcher", "fetcher"], where["trainer", "main"], recordings, window)
    name_processes(axes, sum(recording.header.process == "prefetcher" for recording, _ in rows), len(rows))
    save_plot(figure, path, dpi=120)


def on_track(recording: TimelineRecording, name: str) -> Iterator[TimelineSpan]:
    return (span for span in recording.spans if span.kind != "step" and track_name(span) == name)


def bar_of(span: TimelineSpan) -> Bar:
    return Bar(span.began_ns, ended_ns(span), span.name, span.step, span.kind == "wait", span.name in NESTED)


def draw_ways(axes: Any, source: int, target: int, recordings: Recordings, window: Window) -> None:
    for life in lives(recordings):
        if life.announced_ns < window[1] and life.step.began_ns > window[0]:
            ends_ms = [(at_ns - window[0]) / 1e6 for at_ns in (life.announced_ns, life.step.began_ns)]
            rows = source + 0.37, target - 0.37
            axes.plot(ends_ms, rows, color=colour(life.step.step), linewidth=0.9, alpha=0.75, zorder=2)


def name_processes(axes: Any, num_first: int, num_rows: int) -> None:
    axes.axhline(num_first - 0.5, color="#404040", linewidth=0.8)
    place = {"rotation": 90, "ha": "center", "va": "center", "annotation_clip": False}
    for where, name in ((num_first / 2 - 0.5, "prefetcher"), ((num_first + num_rows) / 2 - 0.5, "trainer")):
        axes.annotate(name, (-0.085, where), xycoords=("axes fraction", "data"), **place)
