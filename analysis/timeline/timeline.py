"""`prefetcher timeline`: chooses the steps and prints a summary."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from rowcast.analysis.timeline.pairs import last_lives, read_pairs, waited_for_ranks
from rowcast.analysis.timeline.plot import plot_steps
from rowcast.analysis.timeline.recording import AHEAD, Recordings, StepLife, ended_ns, overlap
from rowcast.analysis.timeline.trace_events import Window, write_events
from rowcast.runtime.command_options import RunFolder, options_of
from rowcast.runtime.drawing import check_plot
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import plural

NUM_DRAWN = 8  # steps, without --steps
OPEN = "open it at https://ui.perfetto.dev or chrome://tracing"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineOptions:
    out: Annotated[
        Path | None,
        Option(help="The file to write, as JSON.", metavar="FILE", show_default="timeline.json in the run directory"),
    ] = None
    steps: Annotated[str | None, Option(help="Only these, such as 100:110.", metavar="FIRST:END")] = None
    plot: Annotated[Path | None, Option(help="Draw --steps too, or eight in the middle.", metavar="PNG|SVG")] = None


def run_timeline(run_dir: Path, options: TimelineOptions) -> None:
    """Raises ConfigError and DataError as `read_run` does, and ConfigError for steps that the run does not have."""
    if options.plot is not None:
        check_plot(options.plot)
    asked = None if options.steps is None else parse_steps(options.steps)
    pairs = read_pairs(run_dir)
    steps = [last_lives(pair) for pair in pairs]
    out = options.out or run_dir / "timeline.json"
    began_ns = min(pair.began_ns for pair in pairs)
    window = (began_ns, float("inf")) if asked is None else window_of([chosen(own, asked) for own in steps])
    number = write_events(pairs, window, out)
    if not all(pair.one_clock for pair in pairs):
        typer.echo(
            "The recordings are from two hosts or boots: they are aligned by the wall clock, which is as accurate as "
            "the hosts' clocks."
        )
    typer.echo(f"{out}: {plural(number, 'event')}; {OPEN}")
    for rank, (pair, own) in enumerate(zip(pairs, steps, strict=True)):
        if own:
            typer.echo(describe(pair, own) if len(pairs) == 1 else f"rank {rank}: {describe_rank(pair, own)}")
    if options.plot is not None:
        drawn = chosen(steps[0], asked or middle(steps[0]))
        plot_steps(pairs[0], window_of([drawn]), options.plot)


def parse_steps(text: str) -> range:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--steps {text}: give the first step and the one after the last, such as 100:110")
    return range(int(match[1]), int(match[2]))


def middle(steps: list[StepLife]) -> range:
    if not steps:
        return range(0)
    first = steps[0].number + max(0, len(steps) - NUM_DRAWN) // 2
    return range(first, first + NUM_DRAWN)


def chosen(steps: list[StepLife], asked: range) -> list[StepLife]:
    found = [life for life in steps if life.number in asked]
    if not found:
        has = (
            f"steps {steps[0].number} to {steps[-1].number}" if steps else "no step that both processes recorded whole"
        )
        raise ConfigError(f"--steps: the timeline has {has}; choose among them")
    return found


def window_of(steps: list[list[StepLife]]) -> Window:
    """Returns the time from the first step of any rank to the last."""
    return min(own[0].step.began_ns for own in steps), max(ended_ns(own[-1].step) for own in steps)


def describe(recordings: Recordings, steps: list[StepLife]) -> str:
    found = overlap(recordings, steps)
    return (
        f"{plural(found.num_steps, 'step')}, of which {found.num_over['any']:,} overlapped work for later steps "
        f"({', '.join(AHEAD)}) with their "
        f"compute; the trainer waited for rows during {found.exposed_share:.1%} of that work"
    )


def describe_rank(pair: Recordings, steps: list[StepLife]) -> str:
    return f"{describe(pair, steps)}, and for other ranks during {waited_for_ranks(pair, steps):.1%} of the time"


@options_of(TimelineOptions)
def timeline(run_dir: RunFolder, *, options: TimelineOptions) -> None:
    run_timeline(run_dir, options)
