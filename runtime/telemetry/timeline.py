"""Records the work and waits of a process's stages; `prefetcher timeline` combines the records.

    a stage's thread --- add: one record ---> queue --- every FLUSH_S, on its own thread ---> timeline.<process>.jsonl

Times are `time.perf_counter`, on Linux CLOCK_MONOTONIC: one clock for all processes of a host until it reboots. The
file's first line is a `TimelineHeader`, each other line one record. A killed process loses at most its last FLUSH_S
seconds of records.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

import msgspec

from rowcast.runtime.disk import FileWrite
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.other_process import boot_id
from rowcast.runtime.stages import Stage
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.metrics import Process

VERSION = 1
MAX_RECORDS = 1_000_000  # records in a file: about 65 MB, and 40,000 steps
FLUSH_S = 0.5
WATCH_S = 0.01  # between readings of the levels

SpanKind = Literal["work", "wait", "step"]
# work: a stage works     wait: a stage waits for `name`
# step: from the start of a step until its result is read; on a device the next step starts before that


class TimelineHeader(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    process: Process
    pid: int
    boot_id: str  # the clocks of two files agree if their boot ids do
    clock_ns: int  # the records' clock at
    unix_ns: int  # this Unix time


class TimelineSpan(msgspec.Struct, frozen=True, array_like=True, tag="span"):
    kind: SpanKind
    track: str  # the thread or child process
    name: str
    began_ns: int
    duration_ns: int
    step: int | None  # None outside steps, or if the step is unknown


class Level(msgspec.Struct, frozen=True, array_like=True, tag="level"):
    """The value of a gauge from `at_ns` on."""

    name: str
    unit: str
    at_ns: int
    value: int


class Incarnation(msgspec.Struct, frozen=True, array_like=True, tag="incarnation"):
    """The start of an attempt; steps may start over."""

    number: int
    at_ns: int


Record = TimelineSpan | Level | Incarnation


def timeline_path(run_dir: Path, process: Process) -> Path:
    return run_dir / f"timeline.{process}.jsonl"


class Timeline:
    """Records one process. Use it as a context manager; any thread may call its other methods, and no method waits.

    After `max_records` it stops recording and logs this once, so that the file has no gaps."""

    def __init__(self, run_dir: Path, process: Process, max_records: int = MAX_RECORDS) -> None:
        self._path = timeline_path(run_dir, process)
        self._process: Process = process
        self._max_records = max_records
        self._waiting: deque[Record] = deque()
        self._num_taken = 0  # records removed from the queue
        self._full = False
        self._levels: dict[tuple[str, str], Callable[[], int]] = {}  # by name and unit
        self._last_levels: dict[tuple[str, str], int] = {}
        self._file: FileWrite | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)

    def add(
        self,
        kind: SpanKind,
        name: str,
        seconds: float,
        step: int | None = None,
        *,
        ended_s: float | None = None,
        track: str | None = None,
    ) -> None:
        """Adds a span of `seconds` that ended at `ended_s` (None: now) on `track` (None: the calling thread)."""
        ended_s = time.perf_counter() if ended_s is None else ended_s
        track = threading.current_thread().name if track is None else track
        self._put(TimelineSpan(kind, track, name, nanoseconds(ended_s - seconds), nanoseconds(seconds), step))

    @contextmanager
    def work(self, name: str, step: int | None = None) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            ended_s = time.perf_counter()
            self.add("work", name, ended_s - began_s, step, ended_s=ended_s)

    def incarnation(self, number: int) -> None:
        self._put(Incarnation(number, time.perf_counter_ns()))

    def watch(self, name: str, unit: str, read: Callable[[], int]) -> None:
        """Records the value of `read` when it has changed. A different thread calls `read`, which must return at
        once."""
        self._levels = {**self._levels, (name, unit): read}

    def _put(self, record: Record) -> None:
        if self._full:
            return
        if len(self._waiting) + self._num_taken >= self._max_records:
            self._full = True
        else:
            self._waiting.append(record)

    def _run(self) -> None:
        flush_s = 0.0
        while not self._closed.wait(WATCH_S):
            self._read_levels()
            if time.monotonic() >= flush_s:
                self._flush()
                flush_s = time.monotonic() + FLUSH_S
        self._flush()

    def _read_levels(self) -> None:
        for key, read in self._levels.items():
            value = read()
            if self._last_levels.get(key) != value:
                self._last_levels[key] = value
                self._put(Level(*key, time.perf_counter_ns(), value))

    def _flush(self) -> None:
        if self._file is None:
            return
        number = len(self._waiting)
        self._num_taken += number  # before they are removed, so that `_put` cannot add one record too many in between
        lines = msgspec.json.Encoder().encode_lines([self._waiting.popleft() for _ in range(number)])
        try:
            self._file.write(lines)
        except OSError as error:
            self._give_up(f"the timeline cannot be written ({error.strerror}); nothing more is recorded")
        else:
            if self._full:
                self._give_up("the timeline is full; nothing more is recorded")

    def _give_up(self, why: str) -> None:
        self._full = True
        get_logger().warning(why, file=str(self._path), records=self._num_taken)
        if self._file is not None:
            self._file.close()
        self._file = None

    def __enter__(self) -> Self:
        """Replaces the file of an earlier run. Raises ConfigError if it cannot be written."""
        try:
            self._file = FileWrite(self._path)
            self._file.write(msgspec.json.encode(self._header()) + b"\n")
        except OSError as error:
            raise ConfigError(
                f"--timeline: {self._path} cannot be written ({error.strerror}); free space or omit --timeline"
            ) from None
        self._thread.start()
        return self

    def _header(self) -> TimelineHeader:
        return TimelineHeader(
            version=VERSION,
            process=self._process,
            pid=os.getpid(),
            boot_id=boot_id(),
            clock_ns=time.perf_counter_ns(),
            unix_ns=time.time_ns(),
        )

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()
        if self._file is not None:
            self._file.close()


class RecordedStage:
    """Adds a span for every `advance` that did something, for stages that do not measure their time."""

    def __init__(self, stage: Stage, name: str, timeline: Timeline) -> None:
        self._stage = stage
        self._name = name
        self._timeline = timeline

    def advance(self) -> bool:
        began_s = time.perf_counter()
        progress = self._stage.advance()
        if progress:
            ended_s = time.perf_counter()
            self._timeline.add("work", self._name, ended_s - began_s, ended_s=ended_s)
        return progress


def recorded_stages(timeline: Timeline | None, stages: Mapping[str, Stage], **names: str) -> dict[str, Stage]:
    """`stages`, with those in `names` recorded on the timeline, if there is one, under the given names."""
    if timeline is None:
        return dict(stages)
    return {
        name: RecordedStage(stage, names[name], timeline) if name in names else stage for name, stage in stages.items()
    }


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
