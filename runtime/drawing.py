"""Draws pictures and the charts of the run report. Only this file imports matplotlib, and only when something is drawn.

A caller makes a figure, marks its axes, and has it written to a file or given as SVG for a page. Rows of bars show what
threads did over time, in a recorded run or an estimated one.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from rowcast.runtime.errors import ConfigError

SUFFIXES = (".png", ".svg")
HAIR = "#e4e4e4"
# distinguishable with red-green colour blindness (Okabe and Ito)
BLUE, ORANGE, GREEN, PINK, SKY, RED = COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
PERCENT = "{x:.0%}"
PIXELS = 96  # per inch, as in a browser
NOT_NEEDED = re.compile(r'<\?xml.*?(?=<svg)|<defs>\s*<style.*?</defs>|<!--.*?-->| xmlns(?::xlink)?="[^"]*"', re.DOTALL)

Window = tuple[int, float]  # ns of one clock: from, to
OF_NO_STEP = "#8c8c8c"
WAIT = {"facecolor": "#f6f6f6", "edgecolor": "#cfcfcf", "hatch": "////", "linewidth": 0.0}
ROW_INCHES = 0.46
WIDTH_INCHES = 12.0
LETTER = 0.0058  # share of the width
THINNEST = 0.0012  # likewise: the least width of a bar
BREATH = 0.004  # likewise: two waits for the same thing with a smaller gap are drawn as one


def check_plot(path: Path) -> None:
    """Raises ConfigError, before any work, if no picture can be drawn to `path`."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: name a file that ends in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.absolute().parent} does not exist; make it")


def new_figure(inches: tuple[float, float], layout: Any = "constrained") -> Any:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its font cache
    from matplotlib.figure import Figure

    return Figure(figsize=inches, dpi=PIXELS, layout=layout)


def dress(axes: Any, grid: str = "both", hidden: Sequence[str] = ("top", "right"), hair: str = HAIR) -> None:
    axes.grid(axis=grid, color=hair, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[list(hidden)].set_visible(False)


def save_plot(figure: Any, path: Path, dpi: int) -> None:
    """Raises ConfigError if the picture cannot be written."""
    try:
        figure.savefig(path, dpi=dpi)
    except OSError as error:
        raise ConfigError(
            f"--plot {path}: cannot be written ({error.strerror}); choose another file or free space"
        ) from None


def svg_text(figure: Any, name: str) -> str:
    """An <svg> element for a page. It takes the page's font; its ids begin with `name`, which is the page's only."""
    import matplotlib

    text = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = re.sub(r'<g id="[^"]*"', "<g", NOT_NEEDED.sub("", text.getvalue()))
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"\d+\.\d\d+", lambda number: f"{float(number[0]):.1f}", svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


# rows of bars


class Bar(NamedTuple):
    began_ns: int
    ended_ns: int
    name: str
    step: int | None
    waits: bool = False
    nested: bool = False  # within another bar of its row


def draw_rows(rows: Sequence[tuple[str, Iterable[Bar]]], window: Window, legend: str) -> tuple[Any, Any]:
    """Returns the figure and its axes: x in milliseconds after the window began, y the number of the row."""
    figure = new_figure((WIDTH_INCHES, ROW_INCHES * len(rows) + 0.8))
    axes = figure.subplots()
    for row, (_, bars) in enumerate(rows):
        for bar in joined(bars, window):
            draw_bar(axes, row, bar, window)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, (window[1] - window[0]) / 1e6)
    axes.set_xlabel(f"milliseconds          a colour: a step     hatched: waiting     {legend}", fontsize=9)
    dress(axes, "x", ("top", "right", "left"))
    return figure, axes


def joined(bars: Iterable[Bar], window: Window) -> Iterator[Bar]:
    """The bars in the window, outer ones before nested ones; a wait continues across wake-ups that found no work."""
    breath_ns = BREATH * (window[1] - window[0])
    seen = [bar for bar in bars if bar.began_ns < window[1] and bar.ended_ns > window[0]]
    before: Bar | None = None
    for bar in sorted(seen, key=lambda bar: (bar.began_ns, -bar.ended_ns)):
        same = before is not None and before.waits and bar.waits and before.name == bar.name
        if before is not None and same and bar.began_ns - before.ended_ns < breath_ns:
            before = before._replace(ended_ns=bar.ended_ns)
        else:
            yield from [] if before is None else [before]
            before = bar
    yield from [] if before is None else [before]


def draw_bar(axes: Any, row: int, bar: Bar, window: Window) -> None:
    whole_ms = (window[1] - window[0]) / 1e6
    began_ms, ended_ms = (
        (max(bar.began_ns, window[0]) - window[0]) / 1e6,
        (min(bar.ended_ns, window[1]) - window[0]) / 1e6,
    )
    width_ms = max(ended_ms - began_ms, THINNEST * whole_ms)
    height = 0.34 if bar.nested else 0.74
    edge = 0.5 if width_ms > 4 * THINNEST * whole_ms else 0.0
    look = WAIT if bar.waits else {"facecolor": colour(bar.step), "edgecolor": "white", "linewidth": edge}
    axes.broken_barh(
        [(began_ms, width_ms)], (row - height / 2, height), zorder=1 if bar.waits else 4 if bar.nested else 3, **look
    )
    texts = [bar.name] if bar.step is None or bar.waits else [f"{bar.name} {bar.step}", f"{bar.step}"]
    text = next((text for text in texts if len(text) * LETTER + 0.004 < width_ms / whole_ms), "")
    if text and not bar.nested:
        white = {"facecolor": "#f6f6f6", "edgecolor": "none", "pad": 1.0} if bar.waits else None
        place = {"ha": "center", "va": "center", "fontsize": 7.5, "zorder": 5, "clip_on": True}
        axes.text((began_ms + ended_ms) / 2, row, text, color="#707070" if bar.waits else "white", bbox=white, **place)


def colour(step: int | None) -> str:
    return OF_NO_STEP if step is None else COLOURS[step % len(COLOURS)]
