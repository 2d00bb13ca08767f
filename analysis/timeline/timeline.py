"""`rowcast timeline`: puts the recordings of a run into one file for Perfetto, and prints a summary."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer import Option

from rowcast.analysis.timeline.recording import AHEAD, Pair, StepLife, began, ended, lives, overlap, read_pairs
from rowcast.runtime.command_options import RunFolder, options_of
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import plural
from rowcast.runtime.telemetry.timeline import Event

OPEN = "open it at https://ui.perfetto.dev or chrome://tracing"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineOptions:
    out: Annotated[
        Path | None,
        Option(help="The file to write, as JSON.", metavar="FILE", show_default="timeline.json in the run directory"),
    ] = None
    steps: Annotated[str | None, Option(help="Only these, such as 100:110.", metavar="FIRST:END")] = None


def run_timeline(run_dir: Path, options: TimelineOptions) -> None:
    """Raises ConfigError and DataError as `read_pairs` does, and ConfigError for steps that the run does not have."""
    asked = None if options.steps is None else parse_steps(options.steps)
    pairs = read_pairs(run_dir)
    steps = [last_lives(pair) for pair in pairs]
    out = options.out or run_dir / "timeline.json"
    first, last = (float("-inf"), float("inf")) if asked is None else window_of([chosen(own, asked) for own in steps])
    events = [event for pair in pairs for event in inside(pair, first, last)]
    try:
        out.write_bytes(b"[\n" + b",\n".join(map(msgspec.json.encode, events)) + b"\n]\n")
    except OSError as error:
        raise ConfigError(
            f"--out {out}: cannot be written ({error.strerror}); choose another file or free space"
        ) from None
    if len({recording.clock[0] for pair in pairs for recording in pair.both}) > 1:
        typer.echo(
            "The recordings are from two hosts or boots: they are aligned by the wall clock, which is as accurate as "
            "the hosts' clocks."
        )
    typer.echo(f"{out}: {plural(len(events), 'event')}; {OPEN}")
    for rank, (pair, own) in enumerate(zip(pairs, steps, strict=True)):
        if own and len(pairs) == 1:
            typer.echo(describe(pair, own))
        elif own:
            share = waited_for_ranks(pair, own)
            typer.echo(f"rank {rank}: {describe(pair, own)}, and for other ranks during {share:.1%} of the time")


def parse_steps(text: str) -> range:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--steps {text}: give the first step and the one after the last, such as 100:110")
    return range(int(match[1]), int(match[2]))


def last_lives(pair: Pair) -> list[StepLife]:
    """Returns the steps of the last attempt, which start after its checkpoint."""
    steps = lives(pair)
    return [life for life in steps if life.attempt == steps[-1].attempt]


def chosen(steps: list[StepLife], asked: range) -> list[StepLife]:
    found = [life for life in steps if life.number in asked]
    if not found:
        has = (
            f"steps {steps[0].number} to {steps[-1].number}" if steps else "no step that both processes recorded whole"
        )
        raise ConfigError(f"--steps: the timeline has {has}; choose among them")
    return found


def window_of(steps: list[list[StepLife]]) -> tuple[float, float]:
    """Returns the time from the first step of any rank to the last."""
    return min(began(own[0].step) for own in steps), max(ended(own[-1].step) for own in steps)


def inside(pair: Pair, first: float, last: float) -> Iterator[Event]:
    """The events between two moments, and every name."""
    for recording in pair.both:
        begun = set[int | None]()  # steps, whose ends belong to the time too
        for event in recording.events:
            if event.ph == "M" or (event.step in begun if event.ph == "e" else overlaps(event, first, last)):
                yield event
            if event.ph == "b" and overlaps(event, first, last):
                begun.add(event.step)
            elif event.ph == "e":
                begun.discard(event.step)


def overlaps(event: Event, first: float, last: float) -> bool:
    return began(event) < last and ended(event) > first


def describe(pair: Pair, steps: list[StepLife]) -> str:
    found = overlap(pair, steps)
    return (
        f"{plural(len(steps), 'step')}, of which {found.num_over:,} overlapped work for later steps "
        f"({', '.join(AHEAD)}) with their "
        f"compute; the trainer waited for rows during {found.exposed_share:.1%} of that work"
    )


def waited_for_ranks(pair: Pair, steps: list[StepLife]) -> float:
    """The share of the time from the first of the steps to the last in which the trainer waited for other ranks."""
    first, last = began(steps[0].step), ended(steps[-1].step)
    waits = [wait for wait in pair.trainer.named("wait: ranks") if first <= began(wait) < last]
    return sum(wait.dur or 0.0 for wait in waits) / max(1e-3, last - first)


@options_of(TimelineOptions)
def timeline(run_dir: RunFolder, *, options: TimelineOptions) -> None:
    run_timeline(run_dir, options)
