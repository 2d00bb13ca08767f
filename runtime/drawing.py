"""Draws the charts of the run report as SVG. Only this file imports matplotlib, and only when something is drawn."""

import logging
import os
import re
import tempfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

NOT_NEEDED = re.compile(
    r'<\?xml.*?(?=<svg)|<defs>\s*<style.*?</defs>|<!--.*?-->| xmlns(?::xlink)?="[^"]*"'
    r"| font-family: [^;]*;",
    re.DOTALL,
)


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


def dress(axes: Any, grid: str, hidden: Sequence[str], hair: str) -> None:
    axes.grid(axis=grid, color=hair, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[list(hidden)].set_visible(False)


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
