"""Reads how long each task of a recorded run took, step by step, to walk the run again."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product

from rowcast.analysis.estimate.handovers import WITH_WAITS, Handovers, handovers, own_work
from rowcast.analysis.timeline.recording import MAIN, Recordings, TimelineRecording, ended_ns, lives
from rowcast.analysis.timeline.trace_events import track_name
from rowcast.runtime.errors import ConfigError

TASKS = {  # a span's name -> the task that it is a part of; others have their own name
    "gather": "fill",
    "lookup": "step",
    "forward": "step",
    "backward": "step",
    "update": "step",
    "evaluate": "step",
    "exchange": "step",
    "send back": "copy out",
    "write_back": "write back",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    first_step: int
    seconds: dict[str, dict[int, float]]  # task -> step -> seconds
    handovers: Handovers
    begins: dict[str, float]  # when the threads "planning" and "main" began
    ended: list[float]  # when each step was done

    def __call__(self, name: str, step: int, pieces: int = 1) -> float:
        """Implements `pipeline.Durations`."""
        if name in self.handovers.usual:
            return self.handovers(name, step + self.first_step)
        return self.seconds[name].get(step + self.first_step, 0.0) / pieces


def recorded_run(recordings: Recordings) -> RecordedRun:
    """Raises ConfigError unless the recordings are of one attempt from its first step on."""
    whole = lives(recordings)
    steps, numbers = [life.step for life in whole], [life.number for life in whole]
    if len(recordings.prefetcher.incarnations) != 1 or len(recordings.trainer.incarnations) != 1 or not steps:
        raise ConfigError("the timeline has several attempts or no whole step; record a run that is not interrupted")
    seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in chain(recordings.prefetcher.spans, recordings.trainer.spans):
        if span.step is None:
            continue
        if span.kind == "work":
            seconds[TASKS.get(span.name, span.name)][span.step] += span.duration_ns / 1e9
        elif span.name == "ranks":  # the same time is work of the phase `exchange`
            seconds["exchange"][span.step] += span.duration_ns / 1e9
            seconds["step"][span.step] -= span.duration_ns / 1e9
    connected_ns = first_ns(recordings.trainer, MAIN)
    for recording, track in product(recordings.both, WITH_WAITS):
        for span, own_ns in own_work(recording, track, connected_ns):
            if span.step is not None:
                seconds[TASKS.get(span.name, span.name)][span.step] += own_ns / 1e9
    began_ns = first_recorded_ns(recordings)
    given = handovers(recordings)
    for task, own in given.between.items():
        for step, own_s in own.items():
            seconds[task][step] += own_s
    for step, barrier_ns in between_steps(recordings, dict(zip(numbers, map(ended_ns, steps), strict=True))):
        seconds["barrier"][step] = max(0.0, barrier_ns / 1e9 - given.usual["step done"])
    return RecordedRun(
        first_step=numbers[0],
        seconds=seconds,
        handovers=given,
        begins={
            "planning": (first_ns(recordings.prefetcher, "planning") - began_ns) / 1e9,
            "main": (first_ns(recordings.trainer, MAIN) - began_ns) / 1e9,
        },
        ended=[(ended_ns(span) - began_ns) / 1e9 for span in steps],
    )


def waited(recordings: Recordings) -> Iterator[tuple[str, float, float]]:
    """What the threads waited for, as recorded: track and reason ("main: rows"), from, to; seconds as in `ended`."""
    began_ns = first_recorded_ns(recordings)
    for recording in recordings.both:
        for span in recording.spans:
            if span.kind == "wait":
                yield (
                    f"{track_name(span)}: {span.name}",
                    (span.began_ns - began_ns) / 1e9,
                    (ended_ns(span) - began_ns) / 1e9,
                )


def between_steps(recordings: Recordings, ended: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Nanoseconds from the end of each step to the first fetch of the next one: what a barrier takes."""
    fetched: dict[int, int] = {}
    for span in recordings.prefetcher.spans:
        if (span.kind, span.name) == ("work", "fetch") and span.step is not None:
            fetched.setdefault(span.step, span.began_ns)
    for step, end_ns in ended.items():
        if step + 1 in fetched:
            yield step, fetched[step + 1] - end_ns


def first_recorded_ns(recordings: Recordings) -> int:
    return min(span.began_ns for recording in recordings.both for span in recording.spans)


def first_ns(recording: TimelineRecording, track: str) -> int:
    return min(span.began_ns for span in recording.spans if span.track == track and span.kind != "step")
