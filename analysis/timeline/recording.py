"""Reads the recordings of a pair of processes, puts them on one clock, and follows each step through both.

    prefetcher   plan p+4  fetch p+4  send p+4        plan p+5  fetch p+5  send p+5
    trainer      |---------- step p ----------|       |---------- step p+1 ---------|

Within one boot of one host both clocks are the same. Recordings of two boots or hosts are aligned by the wall clock,
which is as accurate as the hosts' clocks.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

import msgspec

from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.telemetry.metrics import Process
from rowcast.runtime.telemetry.timeline import (
    VERSION,
    Incarnation,
    Level,
    Record,
    TimelineHeader,
    TimelineSpan,
    timeline_path,
)

Times = Sequence[tuple[int, int]]  # ns: from, to
MAIN = "MainThread"
AHEAD = ("plan", "fetch", "send")  # the prefetcher's work for a step before the trainer can begin it


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineRecording:
    """One process's recording; spans of a track in the order of their ends."""

    header: TimelineHeader
    spans: list[TimelineSpan]
    levels: list[Level]
    incarnations: list[Incarnation]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recordings:
    """Both recordings, on the prefetcher's clock."""

    prefetcher: TimelineRecording
    trainer: TimelineRecording
    one_clock: bool  # False: aligned by the wall clock

    @property
    def both(self) -> tuple[TimelineRecording, TimelineRecording]:
        return self.prefetcher, self.trainer

    @property
    def began_ns(self) -> int:
        return min(recording.header.clock_ns for recording in self.both)


def read_run(run_dir: Path) -> Recordings:
    """Raises ConfigError if a recording is missing or the two are of different runs, DataError if one is damaged."""
    prefetcher, trainer = (read_recording(run_dir, process) for process in ("prefetcher", "trainer"))
    if not numbers(prefetcher) & numbers(trainer):
        raise ConfigError(
            f"{timeline_path(run_dir, 'prefetcher').name} and {timeline_path(run_dir, 'trainer').name} in {run_dir} "
            "are from two runs that never met; start both commands with --timeline"
        )
    one_clock = prefetcher.header.boot_id == trainer.header.boot_id
    return Recordings(
        prefetcher=prefetcher,
        trainer=trainer
        if one_clock
        else shifted(trainer, wall_offset(trainer.header) - wall_offset(prefetcher.header)),
        one_clock=one_clock,
    )


def numbers(recording: TimelineRecording) -> set[int]:
    return {incarnation.number for incarnation in recording.incarnations}


def read_recording(run_dir: Path, process: Process) -> TimelineRecording:
    path = timeline_path(run_dir, process)
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise ConfigError(f"{run_dir} has no {path.name}; start `{process} run` with --timeline") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
    lines.pop()  # empty, or cut off when the process was killed
    header = read_header(path, lines)
    spans: list[TimelineSpan] = []
    levels: list[Level] = []
    incarnations: list[Incarnation] = []
    for record in records(path, lines):
        if isinstance(record, TimelineSpan):
            spans.append(record)
        elif isinstance(record, Level):
            levels.append(record)
        else:
            incarnations.append(record)
    return TimelineRecording(header=header, spans=spans, levels=levels, incarnations=incarnations)


def read_header(path: Path, lines: list[bytes]) -> TimelineHeader:
    try:
        header = msgspec.json.decode(lines[0] if lines else b"", type=TimelineHeader)
    except msgspec.DecodeError as error:
        raise DataError(f"{path}, line 1: not a timeline of rowcast ({error})") from None
    if header.version != VERSION:
        raise DataError(f"{path} is of version {header.version}, and this program reads {VERSION}; record it again")
    return header


def records(path: Path, lines: list[bytes]) -> Iterator[Record]:
    decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(TimelineSpan | Level | Incarnation)
    for number, line in enumerate(lines[1:], start=2):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise DataError(f"{path}, line {number}: not a record ({error}); record the run again") from None


def wall_offset(header: TimelineHeader) -> int:
    """Nanoseconds to add to the recording's clock to get Unix time."""
    return header.unix_ns - header.clock_ns


def shifted(recording: TimelineRecording, by_ns: int) -> TimelineRecording:
    replace = msgspec.structs.replace
    return TimelineRecording(
        header=replace(recording.header, clock_ns=recording.header.clock_ns + by_ns),
        spans=[replace(span, began_ns=span.began_ns + by_ns) for span in recording.spans],
        levels=[replace(level, at_ns=level.at_ns + by_ns) for level in recording.levels],
        incarnations=[replace(each, at_ns=each.at_ns + by_ns) for each in recording.incarnations],
    )


@dataclass(slots=True)
class StepLife:
    number: int
    ahead: dict[str, list[TimelineSpan]] = field(default_factory=lambda: {name: [] for name in AHEAD})
    computed: TimelineSpan | None = None  # from its issue until its result was read

    @property
    def complete(self) -> bool:
        return self.computed is not None and all(self.ahead.values())

    @property
    def step(self) -> TimelineSpan:
        assert self.computed is not None, f"step {self.number} was not computed"
        return self.computed

    @property
    def planned_ns(self) -> int:
        return self.ahead["plan"][0].began_ns

    @property
    def announced_ns(self) -> int:
        return ended_ns(self.ahead["send"][-1])


def ended_ns(span: TimelineSpan) -> int:
    return span.began_ns + span.duration_ns


def lives(recordings: Recordings) -> list[StepLife]:
    """Returns the steps of each incarnation, in order."""
    return [
        life
        for began, ended in incarnation_times(recordings.prefetcher)
        for life in lives_between(recordings, began, ended)
    ]


def incarnation_times(recording: TimelineRecording) -> Iterator[tuple[int, float]]:
    times: list[float] = [incarnation.at_ns for incarnation in recording.incarnations]
    for began, ended in pairwise([*times, float("inf")]):
        yield int(began), ended


def lives_between(recordings: Recordings, began_ns: int, end_ns: float) -> list[StepLife]:
    found: dict[int, StepLife] = {}
    for recording in recordings.both:
        for span in recording.spans:
            if span.step is not None and began_ns <= span.began_ns < end_ns:
                note(found.setdefault(span.step, StepLife(span.step)), span)
    return [found[step] for step in sorted(found) if found[step].complete]


def note(life: StepLife, span: TimelineSpan) -> None:
    if span.kind == "step":
        life.computed = span
    elif span.name in life.ahead:
        life.ahead[span.name].append(span)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    num_steps: int
    # name in AHEAD, or "any" -> steps during whose compute such work was done for a later step
    num_over: dict[str, int]
    # share of the time of such work, since the first step began, in which the trainer waited for rows
    exposed_share: float


def overlap(recordings: Recordings, steps: Sequence[StepLife]) -> Overlap:
    """`steps` is not empty and of one incarnation."""
    over: dict[str, set[int]] = {name: set() for name in AHEAD}
    computed = [(life.step.began_ns, ended_ns(life.step)) for life in steps]
    for life in steps:
        for name, spans in life.ahead.items():
            under = (steps[index] for span in spans for index, _ in shared_ns(span, computed))
            over[name] |= {earlier.number for earlier in under if earlier.number < life.number}
    num_over = {name: len(found) for name, found in over.items()} | {"any": len(set().union(*over.values()))}
    ahead = [
        span for life in steps for spans in life.ahead.values() for span in spans if span.began_ns >= computed[0][0]
    ]
    return Overlap(
        num_steps=len(steps), num_over=num_over, exposed_share=shared_share(ahead, waits_for_rows(recordings.trainer))
    )


def shared_ns(span: TimelineSpan, times: Times) -> Iterator[tuple[int, int]]:
    """Returns which of `times` (ordered, with increasing ends) overlap the span, and for how long."""
    first = bisect_right(times, span.began_ns, key=itemgetter(1))
    for index in range(first, bisect_left(times, ended_ns(span), key=itemgetter(0))):
        yield index, min(ended_ns(span), times[index][1]) - max(span.began_ns, times[index][0])


def waits_for_rows(trainer: TimelineRecording) -> Times:
    return [(span.began_ns, ended_ns(span)) for span in trainer.spans if (span.kind, span.name) == ("wait", "rows")]


def shared_share(spans: Sequence[TimelineSpan], times: Times) -> float:
    shared = sum(shared for span in spans for _, shared in shared_ns(span, times))
    return shared / max(1, sum(span.duration_ns for span in spans))
