"""Recordings made by hand, in milliseconds."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rowcast.analysis.timeline import Recording, StepLife, began, ended
from rowcast.runtime.telemetry.metrics import BOTH, Process
from rowcast.runtime.telemetry.timeline import SpanKind, TraceEvent, timeline_path

THREADS = {
    name: 101 + number
    for number, name in enumerate(("decoder 0", "planning", "fetcher", "write-back", "MainThread", "sender"))
}


def span(
    kind: SpanKind, track: str, name: str, began_ms: float, ended_ms: float, step: int | None = None, pid: int = 1
) -> TraceEvent:
    at, took, args = 1000 * began_ms, 1000 * (ended_ms - began_ms), {} if step is None else {"step": step}
    if kind == "step":
        return TraceEvent(
            ph="b", cat="step", name=name, pid=pid, ts=at, dur=took, id2={"local": f"0x{step:x}"}, args=args
        )
    name = f"wait: {name}" if kind == "wait" else name
    return TraceEvent(ph="X", cat=kind, name=name, pid=pid, tid=THREADS[track], ts=at, dur=took, args=args)


def incarnation(number: int, at_ms: float = 0.0, pid: int = 1) -> TraceEvent:
    args = {"incarnation": number}
    return TraceEvent(ph="i", s="p", name=f"incarnation {number}", pid=pid, ts=1000 * at_ms, args=args)


def later(spans: Sequence[TraceEvent], ms: float) -> list[TraceEvent]:
    return [msgspec.structs.replace(own, ts=(own.ts or 0.0) + 1000 * ms) for own in spans]


def recording(spans: Sequence[TraceEvent]) -> Recording:
    """Of one attempt, its spans in the order of their ends."""
    ordered = sorted(spans, key=lambda own: (own.ts or 0.0) + (own.dur or 0.0))
    return Recording([incarnation(1), *ordered], {tid: name for name, tid in THREADS.items()}, ("a", 0.0, 0.0))


def leave(
    run_dir: Path,
    process: Process,
    spans: Sequence[TraceEvent],
    *,
    boot_id: str = "a",
    numbers: Sequence[int] = (5,),
    clock_ms: float = 0.0,
    rank: int = 0,
) -> None:
    """A file whose clock showed `clock_ms` at Unix time 1,000 s, of a process that met each of `numbers` then."""
    pid = 1 + BOTH.index(process) + 2 * rank
    clock = {"boot_id": boot_id, "clock": 1000 * clock_ms, "unix": 1e9}
    ends = [
        msgspec.structs.replace(own, ph="e", ts=(own.ts or 0) + (own.dur or 0), dur=None) for own in spans if own.id2
    ]
    events = [
        TraceEvent(ph="M", name="process_name", pid=pid, args={"name": f"{process} {rank} (process 42)", **clock}),
        *(
            TraceEvent(ph="M", name=name, pid=pid, tid=tid, args={key: value})
            for track, tid in THREADS.items()
            if any(own.tid == tid for own in spans)
            for name, key, value in (("thread_name", "name", track), ("thread_sort_index", "sort_index", tid))
        ),
        *(msgspec.structs.replace(own, pid=pid) for own in (*spans, *ends)),
        *(incarnation(number, clock_ms, pid) for number in numbers),
        TraceEvent(ph="C", name=f"{process} ring", pid=pid, ts=3000, args={"bytes": 4096}),
    ]
    timeline_path(run_dir, process).write_bytes(b"[\n" + b",\n".join(map(msgspec.json.encode, events)))


def planned_at(life: StepLife) -> float:
    return began(life.ahead["plan"][0])


def announced_at(life: StepLife) -> float:
    return ended(life.ahead["send"][-1])
