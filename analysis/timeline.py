"""`rowcast timeline`: puts the recordings of a run into one file for Perfetto.

Reads the recordings of each pair of processes of a run, puts them on one clock, and follows each step through both.

    prefetcher   plan p+4  fetch p+4  send p+4        plan p+5  fetch p+5  send p+5
    trainer      |---------- step p ----------|       |---------- step p+1 ---------|

Within one boot of one host all clocks are the same. Recordings of two boots or hosts are aligned by the wall clock,
which is as accurate as the hosts' clocks. All times are in microseconds.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer import Option

from rowcast.job.section import LAST_COMMIT
from rowcast.runtime.command_options import RunFolder, options_of
from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.telemetry.format_numbers import plural
from rowcast.runtime.telemetry.metrics import BOTH, Process
from rowcast.runtime.telemetry.timeline import TraceEvent, timeline_path

AHEAD = ("plan", "fetch", "send")  # the prefetcher's work for a step before the trainer can begin it
OLD_SUFFIX = ".jsonl"  # older versions recorded lines that are not trace events


@dataclass(frozen=True, slots=True)
class Recording:
    """One process's events; spans of a track in the order of their ends."""

    events: list[TraceEvent]
    threads: dict[int, str]  # names of tracks
    clock: tuple[str, float, float]  # boot id; the events' clock at a moment, and Unix time then

    @property
    def spans(self) -> list[TraceEvent]:
        """Work and waits."""
        return [event for event in self.events if event.ph == "X"]

    def named(self, name: str) -> list[TraceEvent]:
        return [event for event in self.events if event.ph == "X" and event.name == name]

    def track(self, name: str) -> list[TraceEvent]:
        """Its spans in the order of their beginnings."""
        spans = (event for event in self.events if event.ph == "X" and self.threads[event.tid] == name)
        return sorted(spans, key=began)

    @property
    def incarnations(self) -> dict[int, float]:
        """When each attempt began; its steps may start over."""
        return {event.args["incarnation"]: began(event) for event in self.events if event.ph == "i"}

    @property
    def wall_offset(self) -> float:
        """To add to the recording's clock to get Unix time."""
        return self.clock[2] - self.clock[1]

    def on_clock_of(self, other: "Recording") -> "Recording":
        if self.clock[0] == other.clock[0]:
            return self
        by = self.wall_offset - other.wall_offset
        moved = [
            event if event.ts is None else msgspec.structs.replace(event, ts=event.ts + by) for event in self.events
        ]
        return Recording(moved, self.threads, (self.clock[0], self.clock[1] + by, self.clock[2]))


@dataclass(frozen=True, slots=True)
class Pair:
    """Both recordings of a rank, on one clock."""

    prefetcher: Recording
    trainer: Recording

    @property
    def both(self) -> tuple[Recording, Recording]:
        return self.prefetcher, self.trainer

    def on_clock_of(self, other: Recording) -> "Pair":
        return Pair(*(recording.on_clock_of(other) for recording in self.both))

    @property
    def unix_times(self) -> tuple[float, float]:
        """When its recordings began and ended."""
        by = self.prefetcher.wall_offset
        first = min(recording.clock[1] for recording in self.both)
        return first + by, max([first, *(ended(event) for recording in self.both for event in recording.spans)]) + by


def began(event: TraceEvent) -> float:
    return event.ts or 0.0


def ended(event: TraceEvent) -> float:
    return began(event) + (event.dur or 0.0)


def read_pairs(run_dir: Path) -> list[Pair]:
    """By rank, on the clock of the first prefetcher. Raises ConfigError if a recording is missing or two of a pair are
    of different runs, DataError if one is damaged.

    Reads only recordings of the same time as the newest: an earlier run of the folder may have had another number of
    ranks."""
    folders = [run_dir, *sorted(run_dir.glob("rank-*"))]
    recorded = [folder for folder in folders if timeline_path(folder, "prefetcher").exists()]
    pairs = [read_pair(folder) for folder in recorded or [run_dir]]
    newest_began, newest_ended = max((pair.unix_times for pair in pairs), key=lambda times: times[0])
    together = [pair for pair in pairs if pair.unix_times[0] <= newest_ended and newest_began <= pair.unix_times[1]]
    return [pair.on_clock_of(together[0].prefetcher) for pair in together]


def read_pair(run_dir: Path) -> Pair:
    prefetcher, trainer = (read_recording(run_dir, process) for process in BOTH)
    if not prefetcher.incarnations.keys() & trainer.incarnations.keys():
        raise ConfigError(
            f"{timeline_path(run_dir, 'prefetcher').name} and {timeline_path(run_dir, 'trainer').name} in {run_dir} "
            "are from two runs that never met; start both commands with --timeline"
        )
    return Pair(prefetcher, trainer.on_clock_of(prefetcher))


def read_recording(run_dir: Path, process: Process) -> Recording:
    path = timeline_path(run_dir, process)
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        if (old := path.with_suffix(OLD_SUFFIX)).exists():
            raise ConfigError(f"{old} is no trace; record the run again, or use commit {LAST_COMMIT}") from None
        raise ConfigError(f"{run_dir} has no {path.name}; start `{process} run` with --timeline") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
    decoder = msgspec.json.Decoder(TraceEvent)
    events: list[TraceEvent] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            events += [decoder.decode(line.rstrip(b","))] if line not in (b"]", b"") else []
        except msgspec.DecodeError as error:
            if number < len(lines):  # the last one was cut off when the process was killed
                raise DataError(f"{path}, line {number}: no event ({error}); record the run again") from None
    first = events[0].args if events else {}
    if lines[0] != b"[" or not {"boot_id", "clock", "unix"} <= first.keys():
        raise DataError(f"{path} is no timeline of rowcast; record the run again")
    threads = {event.tid: event.args["name"] for event in events if event.name == "thread_name"}
    return Recording(events, threads, (first["boot_id"], first["clock"], first["unix"]))


@dataclass(slots=True)
class StepLife:
    attempt: int
    number: int
    ahead: dict[str, list[TraceEvent]] = field(default_factory=lambda: {name: [] for name in AHEAD})
    computed: TraceEvent | None = None  # from its issue until its result was read

    @property
    def step(self) -> TraceEvent:
        assert self.computed is not None, f"step {self.number} was not computed"
        return self.computed


def lives(pair: Pair) -> list[StepLife]:
    """Returns the steps of each attempt, in order, as far as both processes recorded them whole."""
    attempts = sorted(pair.prefetcher.incarnations.values())
    by_step: dict[tuple[int, int], StepLife] = {}
    for event in chain(pair.prefetcher.events, pair.trainer.events):
        attempt = bisect_right(attempts, began(event))
        if event.step is None or not attempt:
            continue
        life = by_step.setdefault((attempt, event.step), StepLife(attempt, event.step))
        if event.ph == "b":
            life.computed = event
        elif event.name in life.ahead:
            life.ahead[event.name].append(event)
    return [
        by_step[key]
        for key in sorted(by_step)
        if by_step[key].computed is not None and all(by_step[key].ahead.values())
    ]


OPEN = "open it at https://ui.perfetto.dev or chrome://tracing"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineOptions:
    out: Annotated[
        Path | None,
        Option(help="The file to write, as JSON.", metavar="FILE", show_default="timeline.json in the run directory"),
    ] = None


def run_timeline(run_dir: Path, options: TimelineOptions) -> None:
    """Raises ConfigError and DataError as `read_pairs` does."""
    pairs, out = read_pairs(run_dir), options.out or run_dir / "timeline.json"
    events = [event for pair in pairs for recording in pair.both for event in recording.events]
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


@options_of(TimelineOptions)
def timeline(run_dir: RunFolder, *, options: TimelineOptions) -> None:
    run_timeline(run_dir, options)
