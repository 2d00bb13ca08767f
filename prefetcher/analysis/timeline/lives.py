"""Each step's way through both processes, and how much of what was done for later steps lay under work on earlier ones.

prefetcher   plan p+4  fetch p+4  send p+4        plan p+5  fetch p+5  send p+5
trainer      |---------- step p ----------|       |---------- step p+1 ---------|
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from prefetcher.analysis.timeline.recording import Recording, Recordings
from protocol.telemetry.timeline import Span

MAIN = "MainThread"
AHEAD = ("plan", "fetch", "send")  # what the prefetcher does for a step before the trainer can begin it


@dataclass(slots=True)
class StepLife:
    """A step that both processes recorded whole."""

    number: int
    ahead: dict[str, list[Span]] = field(default_factory=lambda: {name: [] for name in AHEAD})
    computed: Span | None = None  # from its issue until its result was read

    @property
    def complete(self) -> bool:
        return self.computed is not None and all(self.ahead.values())

    @property
    def step(self) -> Span:
        assert self.computed is not None, f"step {self.number} was not computed"
        return self.computed

    @property
    def planned_ns(self) -> int:
        """When its plan began."""
        return self.ahead["plan"][0].began_ns

    @property
    def announced_ns(self) -> int:
        """When the last of its rows were announced."""
        return ended_ns(self.ahead["send"][-1])


def ended_ns(span: Span) -> int:
    return span.began_ns + span.duration_ns


def lives(recordings: Recordings) -> list[StepLife]:
    """In the order of the steps; where the processes met more than once, one incarnation after the other."""
    return [life for began, ended in incarnation_times(recordings.prefetcher) for life in lives_between(recordings, began, ended)]


def incarnation_times(recording: Recording) -> Iterator[tuple[int, float]]:
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


def note(life: StepLife, span: Span) -> None:
    if span.kind == "step":
        life.computed = span
    elif span.name in life.ahead:
        life.ahead[span.name].append(span)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Over the steps given."""

    num_steps: int
    num_over: dict[str, int]  # name in AHEAD, or "any" -> steps whose compute had such work for a later step under it
    hidden_share: float  # of the seconds of such work, those in which the trainer worked, and did not wait


def overlap(recordings: Recordings, steps: Sequence[StepLife]) -> Overlap:
    """`steps` of one incarnation."""
    over: dict[str, set[int]] = {name: set() for name in AHEAD}
    begins = [life.step.began_ns for life in steps]
    for life in steps:
        for name, spans in life.ahead.items():
            under = (steps[index] for span in spans for index in met_by(span, begins))
            over[name] |= {earlier.number for earlier in under if earlier.number < life.number}
    num_over = {name: len(found) for name, found in over.items()} | {"any": len(set().union(*over.values()))}
    ahead = [span for life in steps for spans in life.ahead.values() for span in spans]
    return Overlap(num_steps=len(steps), num_over=num_over, hidden_share=hidden_share(ahead, busy_times(recordings.trainer)))


def met_by(span: Span, begins: Sequence[int]) -> range:
    """Which of the times that begin at `begins`, one after another without a gap, the span meets."""
    return range(max(0, bisect_right(begins, span.began_ns) - 1), bisect_left(begins, ended_ns(span)))


def busy_times(trainer: Recording) -> list[tuple[int, int]]:
    """From, to: when the trainer's main thread or its device worked."""
    merged: list[tuple[int, int]] = []
    for span in sorted(trainer.spans, key=lambda span: span.began_ns):
        if span.kind == "wait" or span.track != MAIN:
            continue
        if merged and span.began_ns <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], ended_ns(span))
        else:
            merged.append((span.began_ns, ended_ns(span)))
    return merged


def hidden_share(spans: Sequence[Span], busy: Sequence[tuple[int, int]]) -> float:
    begins = [began for began, _ in busy]
    hidden_ns = sum(
        max(0, min(ended_ns(span), busy[index][1]) - max(span.began_ns, busy[index][0])) for span in spans for index in met_by(span, begins)
    )
    return hidden_ns / max(1, sum(span.duration_ns for span in spans))
