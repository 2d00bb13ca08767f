"""Defines the findings of `rowcast check`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from rowcast.runtime.errors import RowcastError
from rowcast.runtime.telemetry.logs import get_logger

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    level: Level  # error: a run would not start, or would fail; warning: it may fail, or not do what was intended
    subject: str = ""
    sentence: str  # with numbers; says what to change unless the level is ok


def ok(sentence: str) -> Finding:
    return Finding(level="ok", sentence=sentence)


def warning(sentence: str) -> Finding:
    return Finding(level="warning", sentence=sentence)


def error(sentence: str) -> Finding:
    return Finding(level="error", sentence=sentence)


def about(subject: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Gives a subject to the findings that have none."""
    yield from (finding if finding.subject else replace(finding, subject=subject) for finding in findings)


def findings_of(subject: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Returns the findings of a check. An exception is what a run would report: an error that ends the check."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except RowcastError as raised:
        found.append(error(str(raised)))
    except Exception as raised:  # noqa: BLE001 - a user's factory may raise anything, and the other checks still run
        get_logger().exception("unexpected error", check=subject)
        found.append(error(f"unexpected error: {type(raised).__name__}: {raised}; the log has the traceback"))
    return list(about(subject, found))
