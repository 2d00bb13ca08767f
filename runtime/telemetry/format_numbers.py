"""Formats numbers for the output of commands, opens the console that shows them, and keeps a stream that cannot be
written from ending a run."""

import math
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, TextIO, cast

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rowcast.runtime.errors import printable

MOST_DIGITS, UNDEFINED = 6, "undefined"  # of a metric
UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
# ValueError: the file was closed, or cannot encode the text; AttributeError: it was closed before this process began
UNWRITABLE = (OSError, ValueError, AttributeError)


@dataclass(slots=True)
class Lost:
    lines: int = 0


LOST = Lost()  # of this process


class LastingStream:
    """A text stream that takes every write, and flushes each line."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            self._file.write(text)
            if "\n" in text:
                self._file.flush()
        except UNWRITABLE:
            LOST.lines += text.count("\n")
        return len(text)

    def flush(self) -> None:
        with suppress(*UNWRITABLE):
            self._file.flush()


class PrintableConsole(Console):
    """Escapes control characters in what it shows, such as those of a column's name."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else "\n".join(map(printable, text.split("\n"))), style, control)


def stdout_console() -> Console:
    """Returns a console that is a terminal only if stdout is: with FORCE_COLOR, rich would colour and animate a
    file."""
    if sys.stdout is None or not sys.stdout.isatty():
        return PrintableConsole(force_terminal=False, highlight=False)
    return PrintableConsole(file=cast(TextIO, LastingStream(sys.stdout)), highlight=False)  # it may be closed meanwhile


def print_json(value: object) -> None:
    """On one line of stdout. Flushes, so that a closed pipe is noticed here."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def human_count(number: float) -> str:
    """Formats three digits and a decimal prefix: `1.23k`."""
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


def size_text(nbytes: int) -> str:
    """Formats `"12MiB"`, as in a job file."""
    for unit, name in UNITS:
        if nbytes >= unit and nbytes % (unit // 2) == 0:
            return f"{nbytes / unit:g}{name}"
    return f"{nbytes}B"


def metric_text(value: float | None, num_samples: int) -> str:
    """Formats a metric with the digits that so many samples carry and one more: 0.887 of 452. 0: not known how many."""
    if value is None or not math.isfinite(value):
        return UNDEFINED if value is None else str(value)
    digits = math.ceil(math.log10(20 * math.sqrt(num_samples))) if num_samples else MOST_DIGITS
    shift = math.trunc(math.log10(abs(value))) if value else 0  # smaller ones have more decimals, larger ones fewer
    return f"{value:,.{max(0, min(digits, MOST_DIGITS) - shift)}f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def percent_number(share: float) -> str:
    """Formats a percentage without the sign: one decimal, or more if it would wrongly look like 0 or 100 %."""
    distance = 100 * abs(min(share, 1 - share))
    decimals = 1 if distance == 0 else min(4, max(1, math.ceil(-math.log10(distance))))
    return f"{100 * share:.{decimals}f}"
