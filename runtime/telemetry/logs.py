"""Sets up the log of a process: structured events on stderr. A command's progress and results go to stdout.

Output never ends a run: lines that stdout, stderr or a log cannot take are dropped and counted. A disk is full, a quota
or a file's largest size is reached, a terminal or a pipe is closed, or there never was a descriptor. Each line is
tried, so a log goes on once there is space again.
"""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from rowcast.runtime.disk import not_a_link
from rowcast.runtime.errors import ConfigError, printable
from rowcast.runtime.telemetry.format_numbers import LastingStream

LEVELS = ("debug", "info", "warning", "error")


def open_missing_descriptors() -> None:
    """Opens /dev/null in place of missing standard descriptors, so that no file of ours gets their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number, which is this


def make_lasting(name: Literal["stdout", "stderr"]) -> None:
    """Makes this process's `sys.stdout` or `sys.stderr` a LastingStream."""
    open_missing_descriptors()
    stream = getattr(sys, name) or open(("stdout", "stderr").index(name) + 1, "w", closefd=False)  # noqa: SIM115 - stays open
    setattr(sys, name, cast(TextIO, LastingStream(stream)))


def open_log(path: Path, mode: Literal["ab", "wb"]) -> BinaryIO:
    """Opens /dev/null instead, and says so on stderr, if `path` cannot be opened."""
    try:
        return cast(BinaryIO, open(path, mode, opener=not_a_link))
    except OSError as error:
        print_line(f"the log {path} cannot be written ({error.strerror}); its lines are lost")
        return Path(os.devnull).open(mode)


def print_line(sentence: str, who: str = "rowcast") -> None:
    """Writes to stderr: stdout belongs to results, and to the user of a training script."""
    LastingStream(sys.stderr).write(f"{who}: {printable(sentence)}\n")


def say(process: str, sentence: str) -> None:
    print_line(" ".join(sentence.splitlines()), f"rowcast {process}")


def setup_logging(process: str, level: str = "info", json: bool | None = None, rank: int | None = None) -> None:
    """Sends this process's events to stderr, each with the process's name and the time in UTC.

    `rank`: added to events if there are several processes of one name; None: it is the only one.
    `json`: True for JSON lines, False for key=value lines, None for coloured columns on a terminal and key=value lines
    elsewhere. May be called again. Raises ConfigError for an unknown level."""
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    names = {"process": process} if rank is None else {"process": process, "rank": rank}
    structlog.configure(
        processors=[
            lambda logger, method, event: {**event, **names},
            with_printable_values,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            *renderers(json, terminal=sys.stderr is not None and sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # the current `sys.stderr`, which a live progress line replaces while it is shown
        logger_factory=lambda *_: structlog.WriteLogger(cast(TextIO, LastingStream(sys.stderr))),
        cache_logger_on_first_use=False,  # a later call must also apply to existing loggers
    )


def get_logger(**context: object) -> FilteringBoundLogger:
    """Returns a logger whose events carry `context`. It may be made at import time: it reads the set-up when it
    logs."""
    return cast(FilteringBoundLogger, structlog.get_logger(**context))


@contextmanager
def said_if_slow(after_s: float, event: str) -> Iterator[None]:
    """Logs `event` once, while the block runs, if it takes longer than `after_s`."""
    timer = threading.Timer(after_s, lambda: get_logger().info(event))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def with_printable_values(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def renderers(json: bool | None, *, terminal: bool) -> list[Processor]:
    if json:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    if json is None and terminal:
        plain_traceback = structlog.dev.plain_traceback
        colors = "NO_COLOR" not in os.environ
        return [structlog.dev.ConsoleRenderer(colors=colors, timestamp_key="time", exception_formatter=plain_traceback)]
    return [structlog.processors.format_exc_info, key_value_line]


def key_value_line(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """time=... level=... process=... rank=... event="..." key=value; a traceback follows, to stay readable."""
    trace = event.pop("exception", None)
    order = ["time", "level", "process", "rank", "event"]
    line = str(structlog.processors.LogfmtRenderer(key_order=order, drop_missing=True)(logger, method, event))
    return line if trace is None else f"{line}\n{trace}"
