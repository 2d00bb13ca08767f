"""How commands write numbers for a person, and where to."""

import sys

from rich.console import Console


def stdout_console() -> Console:
    """A terminal only where stdout is one: rich alone would believe FORCE_COLOR and colour or animate a file."""
    return Console(force_terminal=None if sys.stdout.isatty() else False, highlight=False)


def human_count(number: float) -> str:
    """Three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G"):
        if abs(number) < 999.5:
            return f"{number:.3g}{prefix}"
        number /= 1000
    return f"{number:.3g}T"


def human_bytes(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1023.5:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def human_seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
