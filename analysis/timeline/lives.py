"""Each step's way through both processes, and how much of what was done for later steps lay under work on earlier ones.

prefetcher   plan p+4  fetch p+4  send p+4        plan p+5  fetch p+5  send p+5
trainer      |---------- step p ----------|       |---------- step p+1 ---------|
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

from rowcast.analysis.timeline.recording import Recording, Recordings
from rowcast.runtime.telemetry.timeline import Span

Times = Sequence[tuple[int, int]]  # ns: from, to
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
    return [
        life
        for began, ended in incarnation_times(recordings.prefetcher)
        for life in lives_between(recordings, began, ended)
    ]


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
    # of the seconds of such work since the first step began, those in which the trainer waited for rows
    exposed_share: float


def overlap(recordings: Recordings, steps: Sequence[StepLife]) -> Overlap:
    """`steps`, at least one, are of one incarnation."""
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


def shared_ns(span: Span, times: Times) -> Iterator[tuple[int, int]]:
    """Which of `times`, in order and with increasing ends, the span meets, and for how long."""
    first = bisect_right(times, span.began_ns, key=itemgetter(1))
    for index in range(first, bisect_left(times, ended_ns(span), key=itemgetter(0))):
        yield index, min(ended_ns(span), times[index][1]) - max(span.began_ns, times[index][0])


def waits_for_rows(trainer: Recording) -> Times:
    return [(span.began_ns, ended_ns(span)) for span in trainer.spans if (span.kind, span.name) == ("wait", "rows")]


def shared_share(spans: Sequence[Span], times: Times) -> float:
    shared = sum(shared for span in spans for _, shared in shared_ns(span, times))
    return shared / max(1, sum(span.duration_ns for span in spans))
