"""Records the work and waits of a process's stages as Chrome trace events, for Perfetto and `rowcast timeline`.

    a stage's thread --- add: one event ---> queue --- every FLUSH_S, on its own thread ---> timeline.<process>.json

The file is a JSON array with an event a line. A killed process loses at most its last FLUSH_S seconds. Its file
then has no closing bracket, which the format does not need.

    M   names and order of processes and threads
    X   a span; its category is work or wait
    b e a span that may overlap others of its kind: a step, from its issue until its result is read
    C   a level: bytes in a ring
    i   the processes have met

Times are microseconds of `time.perf_counter`, on Linux CLOCK_MONOTONIC: one clock for all processes of a host until it
reboots.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from rowcast.runtime.disk import FileWrite
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.machine import boot_id
from rowcast.runtime.stages import Stage
from rowcast.runtime.telemetry.logs import get_logger
from rowcast.runtime.telemetry.metrics import BOTH, Process

MAX_EVENTS = 1_000_000  # in a file: about 130 MB, and 40,000 steps
FLUSH_S = 0.5
WATCH_S = 0.01  # between readings of the levels
MAIN = "MainThread"
TRACKS = ("planning", "staging", "fetcher", "write-back", "checkpoint", MAIN, "sender", "mail")  # below the decoders
FIRST_THREAD = 101  # a thread whose number equals its process's would be shown first

SpanKind = Literal["work", "wait", "step"]


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a file. The category of a span is its kind."""

    ph: Literal["M", "X", "b", "e", "C", "i"]
    name: str
    pid: int  # in the order of the page: processes of two containers may have the same id
    tid: int = 0
    cat: str | None = None
    ts: float | None = None
    dur: float | None = None
    id2: dict[str, str] | None = None
    s: str | None = None
    args: dict[str, Any] = {}

    @property
    def step(self) -> int | None:
        """None outside steps, or if the step is unknown."""
        return self.args.get("step")


def timeline_path(run_dir: Path, process: Process) -> Path:
    return run_dir / f"timeline.{process}.json"


class Timeline:
    """Records one process. Use it as a context manager; any thread may call its other methods, and no method waits.

    After `max_events` it stops recording and logs this once, so that the file has no gaps."""

    def __init__(self, run_dir: Path, process: Process, rank: int = 0, max_events: int = MAX_EVENTS) -> None:
        self._path = timeline_path(run_dir, process)
        self._name, self._pid = f"{process} {rank}", 1 + BOTH.index(process) + len(BOTH) * rank
        self._max_events = max_events
        self._waiting: deque[TraceEvent] = deque()
        self._num_taken = 0  # events removed from the queue
        self._full = False
        self._threads: dict[str, int] = {}  # by track
        self._new_thread = threading.Lock()
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
        tid = self._threads.get(track) or self._thread_of(track)
        began, took = microseconds(ended_s - seconds), microseconds(seconds)
        args = {} if step is None else {"step": step}
        if kind != "step":
            name = f"wait: {name}" if kind == "wait" else name
            self._put(TraceEvent(ph="X", cat=kind, name=name, pid=self._pid, tid=tid, ts=began, dur=took, args=args))
            return
        both = {"local": f"0x{step or 0:x}"}
        life = TraceEvent(ph="b", cat=kind, name=f"{name} step", pid=self._pid, ts=began, dur=took, id2=both, args=args)
        self._put(life)
        self._put(TraceEvent(ph="e", cat=kind, name=life.name, pid=self._pid, ts=began + took, id2=both, args=args))

    @contextmanager
    def work(self, name: str, step: int | None = None) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            ended_s = time.perf_counter()
            self.add("work", name, ended_s - began_s, step, ended_s=ended_s)

    def incarnation(self, number: int) -> None:
        """The start of an attempt; steps may start over."""
        name, now = f"incarnation {number}", microseconds(time.perf_counter())
        self._put(TraceEvent(ph="i", s="p", name=name, pid=self._pid, ts=now, args={"incarnation": number}))

    def watch(self, name: str, unit: str, read: Callable[[], int]) -> None:
        """Records the value of `read` when it has changed. A different thread calls `read`, which must return at
        once."""
        self._levels = {**self._levels, (name, unit): read}

    def _thread_of(self, track: str) -> int:
        """Names a track that is new; those of a step are in its order, below the decoders."""
        with self._new_thread:
            if track not in self._threads:
                others = sum(name not in TRACKS for name in self._threads)
                tid = FIRST_THREAD + (1000 + TRACKS.index(track) if track in TRACKS else others)
                for name, key, value in (("thread_name", "name", track), ("thread_sort_index", "sort_index", tid)):
                    self._put(TraceEvent(ph="M", name=name, pid=self._pid, tid=tid, args={key: value}))
                self._threads[track] = tid
        return self._threads[track]

    def _put(self, event: TraceEvent) -> None:
        if self._full:
            return
        if len(self._waiting) + self._num_taken >= self._max_events:
            self._full = True
        else:
            self._waiting.append(event)

    def _run(self) -> None:
        flush_s = 0.0
        while not self._closed.wait(WATCH_S):
            for (name, unit), read in self._levels.items():
                value = read()
                if self._last_levels.get((name, unit)) != value:
                    self._last_levels[name, unit] = value
                    now = microseconds(time.perf_counter())
                    self._put(TraceEvent(ph="C", name=name, pid=self._pid, ts=now, args={unit: value}))
            if time.monotonic() >= flush_s:
                self._flush()
                flush_s = time.monotonic() + FLUSH_S
        self._flush()

    def _flush(self) -> None:
        if self._file is None:
            return
        number = len(self._waiting)
        self._num_taken += number  # before they are removed, so that `_put` cannot add one event too many in between
        encode = msgspec.json.Encoder().encode
        try:
            self._file.write(b"".join(b",\n" + encode(self._waiting.popleft()) for _ in range(number)))
        except OSError as error:
            self._give_up(f"the timeline cannot be written ({error.strerror}); nothing more is recorded")
        else:
            if self._full:
                self._give_up("the timeline is full; nothing more is recorded")

    def _give_up(self, why: str) -> None:
        self._full = True
        get_logger().warning(why, file=str(self._path), events=self._num_taken)
        if self._file is not None:
            self._file.close()
        self._file = None

    def __enter__(self) -> Self:
        """Replaces the file of an earlier run. Raises ConfigError if it cannot be written."""
        clock = {"boot_id": boot_id(), "clock": microseconds(time.perf_counter()), "unix": microseconds(time.time())}
        name = {"name": f"{self._name} (process {os.getpid()})"}
        first = TraceEvent(ph="M", name="process_name", pid=self._pid, args=name | clock)
        order = TraceEvent(ph="M", name="process_sort_index", pid=self._pid, args={"sort_index": self._pid})
        try:
            self._file = FileWrite(self._path)
            self._file.write(b"[\n" + b",\n".join(map(msgspec.json.encode, (first, order))))
        except OSError as error:
            raise ConfigError(
                f"--timeline: {self._path} cannot be written ({error.strerror}); free space or omit --timeline"
            ) from None
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()
        if self._file is not None:
            with suppress(OSError):  # the bracket is optional
                self._file.write(b"\n]\n")
            self._file.close()


def recorded(stage: Stage, name: str, timeline: Timeline) -> Stage:
    """Adds a span for every call that did something, for stages that do not measure their time."""

    def advance() -> bool:
        began_s = time.perf_counter()
        progress = stage()
        if progress:
            ended_s = time.perf_counter()
            timeline.add("work", name, ended_s - began_s, ended_s=ended_s)
        return progress

    return advance


def recorded_stages(timeline: Timeline | None, stages: Mapping[str, Stage], **names: str) -> dict[str, Stage]:
    """`stages`, with those in `names` recorded on the timeline, if there is one, under the given names."""
    if timeline is None:
        return dict(stages)
    return {name: recorded(stage, names[name], timeline) if name in names else stage for name, stage in stages.items()}


def microseconds(seconds: float) -> float:
    return round(1e9 * seconds) / 1e3
