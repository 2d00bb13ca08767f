"""How long each task of a recorded run took, step by step, so that the run can be walked again."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from statistics import median

from rowcast.analysis.timeline.recording import MAIN, Recordings, TimelineRecording, ended_ns, lives, shared_ns
from rowcast.analysis.timeline.trace_events import track_name
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.timeline import TimelineSpan

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
    message_s: float  # from one process to the other
    begins: dict[str, float]  # when the threads "planning" and "main" began
    ended: list[float]  # when each step was done

    def __call__(self, name: str, step: int, pieces: int = 1) -> float:
        """Implements `pipeline.Durations`."""
        if name == "deliver":
            return self.message_s
        return self.seconds[name].get(step + self.first_step, 0.0) / pieces


def recorded_run(recordings: Recordings) -> RecordedRun:
    """Raises ConfigError unless the recordings are of one attempt from its first step on."""
    steps = [life.step for life in lives(recordings)]
    if len(recordings.prefetcher.incarnations) != 1 or len(recordings.trainer.incarnations) != 1 or not steps:
        raise ConfigError("the timeline has several attempts or no whole step; record a run that is not interrupted")
    numbers = [life.number for life in lives(recordings)]
    seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in chain(recordings.prefetcher.spans, recordings.trainer.spans):
        if span.step is None:
            continue
        if span.kind == "work":
            seconds[TASKS.get(span.name, span.name)][span.step] += span.duration_ns / 1e9
        elif span.name == "ranks":  # the same time is work of the phase `exchange`
            seconds["exchange"][span.step] += span.duration_ns / 1e9
            seconds["step"][span.step] -= span.duration_ns / 1e9
    for span, own_ns in own_work(recordings.trainer):
        if span.step is not None:
            seconds[TASKS.get(span.name, span.name)][span.step] += own_ns / 1e9
    began_ns = first_recorded_ns(recordings)
    message_s = message_seconds(recordings)
    for step, barrier_ns in between_steps(recordings, dict(zip(numbers, map(ended_ns, steps), strict=True))):
        seconds["barrier"][step] = max(0.0, barrier_ns / 1e9 - message_s)
    return RecordedRun(
        first_step=numbers[0],
        seconds=seconds,
        message_s=message_s,
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


def own_work(trainer: TimelineRecording) -> list[tuple[TimelineSpan, int]]:
    """Nanoseconds that the main loop worked before each span, on what no span covers: messages, results, polling."""
    spans = sorted(
        (span for span in trainer.spans if span.track == MAIN and span.kind != "step"), key=lambda span: span.began_ns
    )
    found, end_ns = [], spans[0].began_ns if spans else 0
    for span in spans:
        if span.kind == "work" and span.began_ns > end_ns:
            found.append((span, span.began_ns - end_ns))
        end_ns = max(end_ns, ended_ns(span))
    return found


def between_steps(recordings: Recordings, ended: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Nanoseconds from the end of each step to the first fetch of the next one: what a barrier takes."""
    fetched: dict[int, int] = {}
    for span in recordings.prefetcher.spans:
        if (span.kind, span.name) == ("work", "fetch") and span.step is not None:
            fetched.setdefault(span.step, span.began_ns)
    for step, end_ns in ended.items():
        if step + 1 in fetched:
            yield step, fetched[step + 1] - end_ns


def message_seconds(recordings: Recordings) -> float:
    """The median from the end of a `send` to the `copy in` of its piece, without what the main thread did meanwhile."""
    sent, taken = defaultdict(list), defaultdict(list)
    for span in recordings.prefetcher.spans:
        if (span.kind, span.name) == ("work", "send"):
            sent[span.step].append(ended_ns(span))
    busy = []
    for span in recordings.trainer.spans:
        if span.name == "copy in":
            taken[span.step].append(span.began_ns)
        if (span.kind, span.track) == ("work", MAIN):
            busy.append((span.began_ns, ended_ns(span)))
    busy.sort()
    ways = [
        TimelineSpan("wait", MAIN, "rows", left, max(0, arrived - left), step)
        for step, leaving in sent.items()
        for left, arrived in zip(sorted(leaving), sorted(taken[step]), strict=False)
    ]
    return median(way.duration_ns - sum(shared for _, shared in shared_ns(way, busy)) for way in ways) / 1e9


def first_recorded_ns(recordings: Recordings) -> int:
    return min(span.began_ns for recording in recordings.both for span in recording.spans)


def first_ns(recording: TimelineRecording, track: str) -> int:
    return min(span.began_ns for span in recording.spans if span.track == track and span.kind != "step")
