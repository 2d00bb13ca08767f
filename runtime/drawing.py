"""Draws pictures and the charts of the run report. Only this file imports matplotlib, and only when something is drawn.

A caller makes a figure, marks its axes, and has it written to a file or given as SVG for a page.
"""

import logging
import os
import re
import tempfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rowcast.runtime.errors import ConfigError

SUFFIXES = (".png", ".svg")
HAIR = "#e4e4e4"
# distinguishable with red-green colour blindness (Okabe and Ito)
BLUE, ORANGE, GREEN, PINK, SKY, RED = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
PERCENT = "{x:.0%}"
NOT_NEEDED = re.compile(
    r'<\?xml.*?(?=<svg)|<defs>\s*<style.*?</defs>|<!--.*?-->| xmlns(?::xlink)?="[^"]*"'
    r"| font-family: [^;]*;",
    re.DOTALL,
)


def check_plot(path: Path) -> None:
    """Raises ConfigError, before any work, if no picture can be drawn to `path`."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: name a file that ends in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.absolute().parent} does not exist; make it")


def find_cache(folder: Path) -> None:
    """Before anything is drawn: gives matplotlib a cache in `folder` if no temporary folder can be written. Without a
    home it would use that, and without both it cannot be imported."""
    try:
        tempfile.gettempdir()
    except OSError:
        os.environ["MPLCONFIGDIR"] = str(folder / "matplotlib")


def new_figure(inches: tuple[float, float], layout: Any = "constrained") -> Any:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its font cache
    from matplotlib.figure import Figure

    return Figure(figsize=inches, layout=layout)


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
        figure.savefig(
            text, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    svg = re.sub(r'<g id="[^"]*"', "<g", NOT_NEEDED.sub("", text.getvalue()))
    svg = re.sub(r"\d+\.\d\d+(?=[^<>]*>)", lambda number: f"{float(number[0]):.1f}", svg)
    return re.sub(r"\s*\n\s*", "\n", svg)
