"""The recordings of a run's two processes, read back and put on one clock.

Within one boot of one host the clocks are the same. Recordings of two boots or hosts are shifted to each other by the wall clock, which
is as right as the hosts' clocks agree.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rowcast.runtime.errors import ConfigError, DataError
from rowcast.runtime.telemetry.metrics import Process
from rowcast.runtime.telemetry.timeline import VERSION, Header, Incarnation, Level, Record, Span, timeline_path


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Of one process; spans in the order in which they ended, on each track."""

    header: Header
    spans: list[Span]
    levels: list[Level]
    incarnations: list[Incarnation]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recordings:
    """Of both processes, on the prefetcher's clock."""

    prefetcher: Recording
    trainer: Recording
    one_clock: bool  # False: put together by the wall clock

    @property
    def both(self) -> tuple[Recording, Recording]:
        return self.prefetcher, self.trainer

    @property
    def began_ns(self) -> int:
        return min(recording.header.clock_ns for recording in self.both)


def read_run(run_dir: Path) -> Recordings:
    """Raises ConfigError where a recording is missing or the two are not of one run, DataError where one is damaged."""
    prefetcher, trainer = (read_recording(run_dir, process) for process in ("prefetcher", "trainer"))
    if not numbers(prefetcher) & numbers(trainer):
        raise ConfigError(
            f"{timeline_path(run_dir, 'prefetcher').name} and {timeline_path(run_dir, 'trainer').name} in {run_dir} are of two runs that "
            f"never met; start both commands with --timeline"
        )
    one_clock = prefetcher.header.boot_id == trainer.header.boot_id
    return Recordings(
        prefetcher=prefetcher,
        trainer=trainer
        if one_clock
        else shifted(trainer, wall_offset(trainer.header) - wall_offset(prefetcher.header)),
        one_clock=one_clock,
    )


def numbers(recording: Recording) -> set[int]:
    return {incarnation.number for incarnation in recording.incarnations}


def read_recording(run_dir: Path, process: Process) -> Recording:
    path = timeline_path(run_dir, process)
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise ConfigError(f"{run_dir} has no {path.name}; start `{process} run` with --timeline") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
    lines.pop()  # empty, or cut when the process was killed
    header = read_header(path, lines)
    spans: list[Span] = []
    levels: list[Level] = []
    incarnations: list[Incarnation] = []
    for record in records(path, lines):
        if isinstance(record, Span):
            spans.append(record)
        elif isinstance(record, Level):
            levels.append(record)
        else:
            incarnations.append(record)
    return Recording(header=header, spans=spans, levels=levels, incarnations=incarnations)


def read_header(path: Path, lines: list[bytes]) -> Header:
    try:
        header = msgspec.json.decode(lines[0] if lines else b"", type=Header)
    except msgspec.DecodeError as error:
        raise DataError(f"{path}, line 1: this is no timeline of rowcast ({error})") from None
    if header.version != VERSION:
        raise DataError(f"{path} is of version {header.version}, and this program reads {VERSION}; record it again")
    return header


def records(path: Path, lines: list[bytes]) -> Iterator[Record]:
    decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Span | Level | Incarnation)
    for number, line in enumerate(lines[1:], start=2):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise DataError(f"{path}, line {number}: this is no record ({error}); record the run again") from None


def wall_offset(header: Header) -> int:
    """Nanoseconds to add to the recording's clock for the Unix time."""
    return header.unix_ns - header.clock_ns


def shifted(recording: Recording, by_ns: int) -> Recording:
    replace = msgspec.structs.replace
    return Recording(
        header=replace(recording.header, clock_ns=recording.header.clock_ns + by_ns),
        spans=[replace(span, began_ns=span.began_ns + by_ns) for span in recording.spans],
        levels=[replace(level, at_ns=level.at_ns + by_ns) for level in recording.levels],
        incarnations=[replace(each, at_ns=each.at_ns + by_ns) for each in recording.incarnations],
    )
