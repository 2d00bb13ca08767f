"""What `prefetcher check` has to say, and how a check becomes findings."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rowcast.runtime.errors import RowcastError
from rowcast.runtime.telemetry.logs import get_logger

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    level: Level  # error: a run would not start, or would fail; warning: it may fail, or not be what was meant
    subject: str
    sentence: str  # with numbers; says what to change unless the level is ok


def ok(subject: str, sentence: str) -> Finding:
    return Finding(level="ok", subject=subject, sentence=sentence)


def warning(subject: str, sentence: str) -> Finding:
    return Finding(level="warning", subject=subject, sentence=sentence)


def error(subject: str, sentence: str) -> Finding:
    return Finding(level="error", subject=subject, sentence=sentence)


def findings_of(subject: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What a check finds. What it raises is what a run would say at that place: an error, and its end."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except RowcastError as raised:
        found.append(error(subject, str(raised)))
    except Exception as raised:  # noqa: BLE001 - a factory of the user's own may raise anything, and the other checks go on
        get_logger().exception("unexpected error", check=subject)
        found.append(
            error(subject, f"unexpected error: {type(raised).__name__}: {raised}; the log has where it comes from")
        )
    return found
