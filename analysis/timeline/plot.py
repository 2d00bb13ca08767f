"""Draws a few steps: one row per thread, one colour per step, waits hatched; thin lines connect the announcement of a
step's rows with the step's start.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rowcast.analysis.simulate.plot import save_plot
from rowcast.analysis.timeline.recording import Recordings, TimelineRecording, ended_ns, lives
from rowcast.analysis.timeline.trace_events import Window, overlaps, track_name, tracks
from rowcast.runtime.telemetry.timeline import TimelineSpan

# distinguishable with red-green colour blindness
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
OF_NO_STEP = "#8c8c8c"
WAIT = {"facecolor": "#f6f6f6", "edgecolor": "#cfcfcf", "hatch": "////", "linewidth": 0.0}
LEFT_OUT = ("mail",)  # tracks with spans too short to see
NESTED = ("gather", "scatter")
ROW_INCHES = 0.46
WIDTH_INCHES = 12.0
LETTER = 0.0058  # share of the width
THINNEST = 0.0012  # likewise: the least width of a span
BREATH = 0.004  # likewise: two waits for the same thing with a smaller gap are drawn as one


def plot_steps(recordings: Recordings, window: Window, path: Path) -> None:
    """Draws `window` to `path`. Raises ConfigError if it cannot be written."""
    from matplotlib.figure import Figure

    rows = [
        (recording, name)
        for recording in recordings.both
        for name in tracks(recording)
        if is_drawn(recording, name, window)
    ]
    figure = Figure(figsize=(WIDTH_INCHES, ROW_INCHES * len(rows) + 0.8), layout="constrained")
    axes: Any = figure.subplots()
    for row, (recording, name) in enumerate(rows):
        for span in joined(on_track(recording, name), window):
            draw(axes, row, span, window)
    where = {(recording.header.process, name): row for row, (recording, name) in enumerate(rows)}
    if ("prefetcher", "fetcher") in where and ("trainer", "main") in where:
        draw_ways(axes, where["prefetcher", "fetcher"], where["trainer", "main"], recordings, window)
    dress(axes, rows, window)
    save_plot(figure, path, dpi=120)


def on_track(recording: TimelineRecording, name: str) -> Iterator[TimelineSpan]:
    return (span for span in recording.spans if span.kind != "step" and track_name(span) == name)


def is_drawn(recording: TimelineRecording, name: str, window: Window) -> bool:
    return name not in LEFT_OUT and any(overlaps(span, window) for span in on_track(recording, name))


def joined(spans: Iterable[TimelineSpan], window: Window) -> Iterator[TimelineSpan]:
    """The spans in the window, outer ones before nested ones; a wait continues across wake-ups that found no work."""
    breath_ns = BREATH * (window[1] - window[0])
    before: TimelineSpan | None = None
    for span in sorted(
        (span for span in spans if overlaps(span, window)), key=lambda span: (span.began_ns, -span.duration_ns)
    ):
        if before is not None and is_same_wait(before, span) and span.began_ns - ended_ns(before) < breath_ns:
            before = msgspec.structs.replace(before, duration_ns=ended_ns(span) - before.began_ns)
        else:
            yield from [] if before is None else [before]
            before = span
    yield from [] if before is None else [before]


def is_same_wait(one: TimelineSpan, other: TimelineSpan) -> bool:
    return one.kind == other.kind == "wait" and one.name == other.name


def draw(axes: Any, row: int, span: TimelineSpan, window: Window) -> None:
    whole_ms = (window[1] - window[0]) / 1e6
    began_ms, ended_ms = (
        (max(span.began_ns, int(window[0])) - window[0]) / 1e6,
        (min(ended_ns(span), window[1]) - window[0]) / 1e6,
    )
    width_ms = max(ended_ms - began_ms, THINNEST * whole_ms)
    waits, nested = span.kind == "wait", span.name in NESTED
    height = 0.34 if nested else 0.74
    wide = width_ms > 4 * THINNEST * whole_ms
    look = WAIT if waits else {"facecolor": colour(span), "edgecolor": "white", "linewidth": 0.5 if wide else 0.0}
    axes.broken_barh(
        [(began_ms, width_ms)], (row - height / 2, height), zorder=1 if waits else 4 if nested else 3, **look
    )
    words = "" if nested else word(span, width_ms / whole_ms)
    if words:
        white = {"facecolor": "#f6f6f6", "edgecolor": "none", "pad": 1.0} if waits else None
        place = {"ha": "center", "va": "center", "fontsize": 7.5, "zorder": 5, "clip_on": True}
        axes.text((began_ms + ended_ms) / 2, row, words, color="#707070" if waits else "white", bbox=white, **place)


def colour(span: TimelineSpan) -> str:
    return OF_NO_STEP if span.step is None else COLOURS[span.step % len(COLOURS)]


def word(span: TimelineSpan, share: float) -> str:
    texts = [span.name] if span.step is None or span.kind == "wait" else [f"{span.name} {span.step}", f"{span.step}"]
    return next((text for text in texts if len(text) * LETTER + 0.004 < share), "")


def draw_ways(axes: Any, source: int, target: int, recordings: Recordings, window: Window) -> None:
    for life in lives(recordings):
        if life.announced_ns < window[1] and life.step.began_ns > window[0]:
            ends_ms = [(at_ns - window[0]) / 1e6 for at_ns in (life.announced_ns, life.step.began_ns)]
            axes.plot(
                ends_ms, (source + 0.37, target - 0.37), color=colour(life.step), linewidth=0.9, alpha=0.75, zorder=2
            )


def dress(axes: Any, rows: list[tuple[TimelineRecording, str]], window: Window) -> None:
    axes.set_yticks(range(len(rows)), [name for _, name in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, (window[1] - window[0]) / 1e6)
    axes.set_xlabel(
        "milliseconds          a colour: a step     hatched: waiting     lines: rows announced, until their step "
        "begins",
        fontsize=9,
    )
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    num_first = sum(recording.header.process == "prefetcher" for recording, _ in rows)
    axes.axhline(num_first - 0.5, color="#404040", linewidth=0.8)
    for where, name in ((num_first / 2 - 0.5, "prefetcher"), ((num_first + len(rows)) / 2 - 0.5, "trainer")):
        place = {
            "xycoords": ("axes fraction", "data"),
            "rotation": 90,
            "ha": "center",
            "va": "center",
            "annotation_clip": False,
        }
        axes.annotate(name, (-0.085, where), **place)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
