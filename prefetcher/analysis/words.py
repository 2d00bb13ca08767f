"""How analysis commands write numbers for a person."""

import math
import sys

from rich.console import Console

from prefetcher.analysis.profile.interval import Share


def stdout_console() -> Console:
    """A terminal only where stdout is one: rich alone would believe FORCE_COLOR and colour a file."""
    return Console(force_terminal=None if sys.stdout.isatty() else False, highlight=False)


def human_bytes(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1023.5:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def percent(share: float) -> str:
    """Without the sign. One decimal, and more where a share would look like nothing or like everything and is not."""
    distance = 100 * min(share, 1 - share)
    decimals = 1 if distance == 0 else min(4, max(1, math.ceil(-math.log10(distance))))
    return f"{100 * share:.{decimals}f}"


def percent_interval(share: Share | None) -> str:
    """`62.1 (60.0 to 64.2)`."""
    if share is None:
        return "none"
    if share.low == share.high:
        return percent(share.estimate)
    return f"{percent(share.estimate)} ({percent(share.low)} to {percent(share.high)})"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
