"""What a walk did, written down as a run would record it, gives the walk's own durations back."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from rowcast.analysis.estimate.estimate import steady, walk
from rowcast.analysis.estimate.pipeline import Pipeline, PlannedStep, Task, Thread, Wiring, run, waits
from rowcast.analysis.estimate.recorded import RecordedRun, add_handovers, recorded_run
from rowcast.analysis.timeline import Pair
from rowcast.runtime.telemetry.metrics import Process
from rowcast.runtime.telemetry.timeline import MAIN, SpanKind, TraceEvent
from tests.support import made_up_timeline
from tests.support.made_up_pipeline import MIB, SECONDS, WIRING, plan
from tests.support.made_up_timeline import recording

TRACKS: Mapping[str, tuple[Process, str]] = {
    "planning": ("prefetcher", "planning"),
    "fetcher": ("prefetcher", "fetcher"),
    "write-back": ("prefetcher", "write-back"),
    "main": ("trainer", MAIN),
    "sender": ("trainer", "sender"),
}
HANDED_OVER: Mapping[str, float] = {
    "rows sent": 0.05,
    "rows filled": 0.02,
    "rows back": 0.07,
    "rows home": 0.03,
    "ring room": 0.04,
    "step done": 0.06,
}
TIGHT = [replace(own, after_step=own.step - 1 if own.step else None) for own in plan(fill_after=None)]
SMALL_RING = replace(WIRING, ring_bytes=int(1.5 * MIB))
FORCED: Mapping[str, tuple[list[PlannedStep], Wiring, Mapping[str, float], set[str]]] = {
    "large model": (plan(), WIRING, {}, {"step done"}),
    "slow decoder": (plan(), WIRING, {"decode": 6.0}, {"rows sent", "rows filled", "rows back"}),
    "slow store": (plan(), WIRING, {"fetch": 5.0}, {"rows sent", "rows filled", "rows back", "step done"}),
    "small ring": (plan(), SMALL_RING, {"fetch": 5.0}, {"ring room", "rows sent"}),
    "cache of one batch": (TIGHT, WIRING, {"write back": 2.5}, {"rows home", "rows sent", "rows back"}),
    "depth 1": (plan(fill_after=None), replace(WIRING, depth=1), {"fetch": 2.9, "write back": 2.9}, {"rows home"}),
    "narrow link": (plan(), WIRING, {"copy in": 7.0}, {"step done"}),
    "two pieces": (
        [replace(own, pieces=own.pieces * 2) for own in plan()],
        SMALL_RING,
        {"fetch": 5.0},
        {"ring room"},
    ),
    "barriers": ([replace(own, barrier=own.step % 5 == 4) for own in plan()], WIRING, {"barrier": 4.0}, set()),
}


def spans_of(thread: Thread) -> Iterator[TraceEvent]:
    track = TRACKS[thread.name][1] if thread.name in TRACKS else thread.name
    for task in thread.done:
        if task.name == "step":
            yield span("step", track, "train step", task.began_s, task.ended_s, task.step)
        if task.name == "barrier":
            yield span("wait", track, "barrier", task.began_s, task.ended_s, None)
        elif task.name != "start":
            for name, began_s, ended_s in parts_of(task):
                yield span("work", track, name, began_s, ended_s, task.step)
    if thread.name in ("planning", "fetcher", "main"):  # the others record no waits
        for reason, began_s, ended_s in waits(thread):
            yield span("wait", track, reason, began_s, ended_s, None)


def parts_of(task: Task) -> Iterator[tuple[str, float, float]]:
    """The names that a timeline has for it."""
    if task.name == "copy out":
        middle_s = (task.began_s + task.ended_s) / 2
        yield "copy out", task.began_s, middle_s
        yield "send back", middle_s, task.ended_s
    else:
        yield {"step": "forward", "write back": "write_back"}.get(task.name, task.name), task.began_s, task.ended_s


def span(kind: SpanKind, track: str, name: str, began_s: float, ended_s: float, step: int | None) -> TraceEvent:
    return made_up_timeline.span(kind, track, name, 1e3 * began_s, 1e3 * ended_s, step)


def written_down(pipeline: Pipeline) -> Pair:
    spans: dict[Process, list[TraceEvent]] = {"prefetcher": [], "trainer": []}
    for thread in pipeline.threads:
        if thread.name in TRACKS or thread.name == "decoder 0":
            spans[TRACKS[thread.name][0] if thread.name in TRACKS else "prefetcher"] += spans_of(thread)
    return Pair(recording(spans["prefetcher"]), recording(spans["trainer"]))


@pytest.mark.parametrize("name", FORCED)
def test_a_walk_that_was_recorded_and_walked_again_has_its_pace(name: str) -> None:
    steps, wiring, changed, waited_for = FORCED[name]
    seconds = {**SECONDS, **HANDED_OVER, **changed}
    pipeline = Pipeline(steps, wiring, lambda task, step: seconds[task], {"planning": 5.0, "main": 9.0})
    run(pipeline.threads)
    recorded = recorded_run(written_down(pipeline))
    again = walk(steps, wiring, recorded, recorded.begins)
    assert again.step_s == pytest.approx(steady([task.ended_s for task in pipeline.done]).step_s, rel=0.01)
    for handover in waited_for:
        assert recorded.usual[handover] == pytest.approx(HANDED_OVER[handover], rel=1e-6), handover


def test_what_a_thread_does_between_two_pieces_is_its_own_work() -> None:
    """Both pieces of step 0 have come when the first one is written; the piece of step 1 finds the thread free."""
    sent = [span("work", "sender", "send back", 0.0, at_s, step) for at_s, step in ((1.0, 0), (1.1, 0), (9.0, 1))]
    written = [
        span("work", "write-back", "write_back", began_s, ended_s, step)
        for began_s, ended_s, step in ((0.2, 0.5, 9), (1.5, 4.0, 0), (4.3, 6.0, 0), (9.4, 10.0, 1))
    ]
    main = span("work", MAIN, "copy in", 0.0, 0.1, 0)
    again = RecordedRun(first_step=0, begins={}, ended=[])
    add_handovers(again, Pair(recording(written), recording([*sent, main])), [])
    assert again.usual["rows back"] == pytest.approx(0.45)  # 0.5 and 0.4
    assert again("rows back", 0) == pytest.approx(0.5)
    assert again("rows back", 7) == pytest.approx(0.45)
    assert again.seconds["write back"] == {0: pytest.approx(0.3)}
    assert again.usual["ring room"] == 0.0  # nothing waited for it
