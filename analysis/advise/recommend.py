"""The sections to paste, and why each value stands there."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from rowcast.analysis.advise.advice import Choice, Point
from rowcast.analysis.advise.choice import KNEE_SAVING, size_text
from rowcast.analysis.format_shares import percent
from rowcast.job.schema import Job
from rowcast.runtime.telemetry.format_numbers import human_bytes

USUAL_DEPTH, MOST_DEPTH = 4, 16
TOML_WIDTH = 78


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """Values, and what they come to in the run that was observed."""

    predicted: Point
    depth: int
    travel_ms: float  # of a step's rows, to the device and home again
    step_ms: float
    horizon: int  # batches known ahead
    known_bytes: int  # of their ids
    id_bytes: int | None  # a larger budget for them, where the job's is too small


def enough_depth(travel_s: float, step_s: float) -> int:
    """Rows of a step travel while those before it are computed; one step more for what is uneven."""
    return min(MOST_DEPTH, max(USUAL_DEPTH, ceil(travel_s / step_s) + 1))


def sections(chosen: Chosen) -> dict[str, dict[str, str | int]]:
    """As the job file has them."""
    lookahead: dict[str, str | int] = {"depth": chosen.depth, "horizon": "auto"}
    if chosen.id_bytes is not None:
        lookahead["id_bytes"] = size_text(chosen.id_bytes)
    return {
        "cache": {"capacity": size_text(chosen.predicted.capacity_bytes), "policy": "lookahead"},
        "lookahead": lookahead,
    }


def reasons(job: Job, chosen: Chosen, choice: Choice) -> dict[str, str]:
    """A sentence for each value."""
    ahead, lru = chosen.predicted.lookahead, chosen.predicted.lru
    found = {
        "cache.capacity": capacity_reason(chosen, choice),
        "cache.policy": f"fetches {ahead.rows_fetched_per_step:,.0f} rows a step, where LRU would fetch {lru.rows_fetched_per_step:,.0f}",
        "lookahead.depth": (
            f"a step's rows travel for {chosen.travel_ms:.2g} ms, to the device and home again; {chosen.depth} steps of "
            f"{chosen.step_ms:g} ms in flight cover that and even out busy ones"
        ),
        "lookahead.horizon": (
            f"grows until no plan has to guess, here to {chosen.horizon} batches, whose ids take {human_bytes(chosen.known_bytes)} of the "
            f"host's memory"
        ),
    }
    if chosen.id_bytes is not None:
        found["lookahead.id_bytes"] = (
            f"the ids known ahead would fetch more rows if they had to stay below {job.lookahead.id_bytes}"
        )
    return found


def capacity_reason(chosen: Chosen, choice: Choice) -> str:
    fetched = f"{chosen.predicted.lookahead.rows_fetched_per_step:,.0f} rows fetched a step"
    if choice.no_stall_bytes is not None and choice.no_stall_bytes > choice.knee_bytes:
        return (
            f"{fetched}; the smallest that keeps a step of {chosen.step_ms:g} ms from waiting for rows that did not fit"
        )
    saves = percent(max(0.0, chosen.predicted.doubling_saves))
    return f"{fetched}; twice as much would save {saves} % of them, and every doubling up to here saves {percent(KNEE_SAVING)} % or more"


def toml(values: Mapping[str, Mapping[str, str | int]], why: Mapping[str, str]) -> str:
    lines: list[str] = []
    for section, keys in values.items():
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for key, value in keys.items():
            lines += textwrap.wrap(why[f"{section}.{key}"], TOML_WIDTH, initial_indent="# ", subsequent_indent="# ")
            lines.append(f"{key} = {value}" if isinstance(value, int) else f'{key} = "{value}"')
    return "\n".join([*lines, ""])
