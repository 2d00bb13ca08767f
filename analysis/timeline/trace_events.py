"""Writes a run in the Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

    M   names and order of processes and threads
    X   a span; category work or wait, and the step under `args`
    b e a span that may overlap others of its kind: a step on the device, and its life since its plan began
    s f an arrow: rows from their announcement to the step that looks them up, victims from the sender to the write-back
    C   a level: bytes in a ring, steps in flight
    i   the processes have met

Times are in microseconds after the first of the recordings began. With several ranks, their pairs are listed below each
other.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rowcast.analysis.timeline.recording import MAIN, Recordings, StepLife, TimelineRecording, ended_ns, lives
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.timeline import TimelineSpan

Event = dict[str, Any]
Window = tuple[int, float]  # ns of the records' clock: from, to

ARROWS_OF_A_PROCESS = 2**24  # more than a recording can hold
FIRST_THREAD = 101  # a thread whose number equals its process's would be shown first
TRACKS = (
    "planning",
    "staging",
    "fetcher",
    "write-back",
    "checkpoint",
    "main",
    "sender",
    "mail",
)  # decoders are above them
ARROWS = (("rows", "send", ("lookup", "evaluate")), ("victims", "send back", ("write_back",)))  # name, from, to


def track_name(span: TimelineSpan) -> str:
    return "main" if span.track == MAIN else span.track


def track_order(name: str) -> tuple[int, str]:
    return (TRACKS.index(name) if name in TRACKS else -1, name)


def tracks(recording: TimelineRecording) -> list[str]:
    """Returns the tracks in the order of a step. Spans of whole steps are on no track."""
    return sorted({track_name(span) for span in recording.spans if span.kind != "step"}, key=track_order)


class Writer:
    """Makes the events of one pair. Processes are numbered, because in containers several may have the same id."""

    def __init__(self, recordings: Recordings, rank: str, window: Window, began_ns: int, first_place: int) -> None:
        """`rank`: a label for its processes, "" for a single rank. `first_place`: its first process."""
        self._recordings = recordings
        self._rank = rank
        self._window = window
        self._began_ns = began_ns
        self._first_place = first_place
        self._num_arrows = first_place * ARROWS_OF_A_PROCESS  # each has a number that no other pair's has
        self._threads = {
            place: {name: number for number, name in enumerate(tracks(recording), start=FIRST_THREAD)}
            for place, recording in self._places()
        }

    def _places(self) -> Iterator[tuple[int, TimelineRecording]]:
        return enumerate(self._recordings.both, start=self._first_place)

    def events(self) -> Iterator[Event]:
        for place, recording in self._places():
            yield from self._names(place, recording)
            yield from self._spans(place, recording)
            yield from self._levels(place, recording)
        steps = [life for life in lives(self._recordings) if overlaps(life.step, self._window)]
        yield from self._lives(steps)
        yield from self._in_flight(steps)
        for arrow in ARROWS:
            yield from self._arrows(*arrow)

    def _names(self, place: int, recording: TimelineRecording) -> Iterator[Event]:
        process = {"pid": place + 1, "tid": 0, "ph": "M"}
        yield {
            **process,
            "name": "process_name",
            "args": {"name": f"{recording.header.process}{self._rank} (process {recording.header.pid})"},
        }
        yield {**process, "name": "process_sort_index", "args": {"sort_index": place}}
        for name, number in self._threads[place].items():
            thread = {"pid": place + 1, "tid": number, "ph": "M"}
            yield {**thread, "name": "thread_name", "args": {"name": name}}
            yield {**thread, "name": "thread_sort_index", "args": {"sort_index": number}}

    def _spans(self, place: int, recording: TimelineRecording) -> Iterator[Event]:
        for span in recording.spans:
            if not overlaps(span, self._window):
                continue
            if span.kind == "step":
                yield from self._long(place, f"{span.name} step", span.began_ns, ended_ns(span), span.step or 0)
            else:
                yield self._span(place, span)

    def _span(self, place: int, span: TimelineSpan) -> Event:
        waits = span.kind == "wait"
        return {
            "ph": "X",
            "name": f"wait: {span.name}" if waits else span.name,
            "cat": span.kind,
            "pid": place + 1,
            "tid": self._threads[place][track_name(span)],
            "ts": self._us(span.began_ns),
            "dur": span.duration_ns / 1000,
            **({"cname": "grey"} if waits else {}),
            **({} if span.step is None else {"args": {"step": span.step}}),
        }

    def _long(self, place: int, name: str, began_ns: int, end_ns: int, step: int) -> Iterator[Event]:
        both = {"cat": name, "name": name, "id2": {"local": f"0x{step:x}"}, "pid": place + 1, "tid": 0}
        yield {**both, "ph": "b", "ts": self._us(began_ns), "args": {"step": step}}
        yield {**both, "ph": "e", "ts": self._us(end_ns)}

    def _levels(self, place: int, recording: TimelineRecording) -> Iterator[Event]:
        for level in recording.levels:
            if inside(level.at_ns, self._window):
                yield self._count(place, level.name, level.unit, level.at_ns, level.value)
        for met in recording.incarnations:
            if inside(met.at_ns, self._window):
                yield {
                    "ph": "i",
                    "s": "p",
                    "name": f"incarnation {met.number}",
                    "pid": place + 1,
                    "tid": 0,
                    "ts": self._us(met.at_ns),
                }

    def _count(self, place: int, name: str, unit: str, at_ns: int, value: int) -> Event:
        return {"ph": "C", "name": name, "pid": place + 1, "tid": 0, "ts": self._us(at_ns), "args": {unit: value}}

    def _lives(self, steps: list[StepLife]) -> Iterator[Event]:
        for life in steps:
            yield from self._long(
                self._first_place, "from plan to done", life.planned_ns, ended_ns(life.step), life.number
            )

    def _in_flight(self, steps: list[StepLife]) -> Iterator[Event]:
        changes = Counter(life.announced_ns for life in steps)
        changes.subtract(ended_ns(life.step) for life in steps)
        in_flight = 0
        for at_ns in sorted(changes):
            in_flight += changes[at_ns]
            yield self._count(self._first_place, "steps", "in flight", at_ns, in_flight)

    def _arrows(self, name: str, source: str, targets: tuple[str, ...]) -> Iterator[Event]:
        newest: dict[int | None, tuple[int, TimelineSpan]] = {}
        for place, span in sorted(self._named({source, *targets}), key=lambda end: end[1].began_ns):
            if span.name == source:
                newest[span.step] = place, span
            elif span.step in newest:
                self._num_arrows += 1
                arrow = {"cat": "way", "name": name, "id": self._num_arrows}
                yield {**arrow, "ph": "s", **self._at(*newest.pop(span.step))}
                yield {**arrow, "ph": "f", "bp": "e", **self._at(place, span)}

    def _named(self, names: set[str]) -> Iterator[tuple[int, TimelineSpan]]:
        for place, recording in self._places():
            for span in recording.spans:
                if span.name in names and span.step is not None and overlaps(span, self._window):
                    yield place, span

    def _at(self, place: int, span: TimelineSpan) -> Event:
        return {"pid": place + 1, "tid": self._threads[place][track_name(span)], "ts": self._us(span.began_ns)}

    def _us(self, at_ns: int) -> float:
        return (at_ns - self._began_ns) / 1000


def overlaps(span: TimelineSpan, window: Window) -> bool:
    return span.began_ns < window[1] and ended_ns(span) > window[0]


def inside(at_ns: int, window: Window) -> bool:
    return window[0] <= at_ns < window[1]


def events_of(pairs: Sequence[Recordings], window: Window) -> Iterator[Event]:
    began_ns = min(pair.began_ns for pair in pairs)
    for number, pair in enumerate(pairs):
        rank = f" {number}" if len(pairs) > 1 else ""
        yield from Writer(pair, rank, window, began_ns, number * len(pair.both)).events()


def write_events(pairs: Sequence[Recordings], window: Window, path: Path) -> int:
    """Writes the events to `path` and returns their number. Raises ConfigError if it cannot be written."""
    about: dict[str, object] = {
        "clock": "monotonic"
        if all(pair.one_clock for pair in pairs)
        else "each process's own, aligned by the wall clock",
        "processes": [msgspec.to_builtins(recording.header) for pair in pairs for recording in pair.both],
    }
    try:
        with path.open("wb") as file:
            file.write(b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(about) + b',"traceEvents":[\n')
            number = write_lines(file.write, events_of(pairs, window))
            file.write(b"\n]}\n")
    except OSError as error:
        raise ConfigError(
            f"--out {path}: cannot be written ({error.strerror}); choose another file or free space"
        ) from None
    return number


def write_lines(write: Callable[[bytes], object], events: Iterable[Event]) -> int:
    encoder, number = msgspec.json.Encoder(), 0
    for event in events:
        write((b",\n" if number else b"") + encoder.encode(event))
        number += 1
    return number
