"""Each step's way through both processes, and how much of what was done for later steps lay under the compute of earlier ones.

prefetcher   plan p+4  fetch p+4  send p+4        plan p+5  fetch p+5  send p+5
trainer      |---------- step p ----------|       |---------- step p+1 ---------|
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from prefetcher.analysis.timeline.recording import Recording, Recordings
from protocol.telemetry.timeline import Span

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
    num_over: dict[str, int]  # name in AHEAD -> steps whose compute had such work for a later step under it
    hidden_share: float  # of the seconds of such work, those that lay under the compute of an earlier step


def overlap(steps: Sequence[StepLife]) -> Overlap:
    """`steps` of one incarnation."""
    over: dict[str, set[int]] = {name: set() for name in AHEAD}
    hidden_ns = total_ns = 0
    begins = [life.step.began_ns for life in steps]
    for life in steps:
        for name, spans in life.ahead.items():
            for span in spans:
                total_ns += span.duration_ns
                for index in range(max(0, bisect_left(begins, span.began_ns) - 1), bisect_left(begins, ended_ns(span))):
                    shared_ns = min(ended_ns(span), ended_ns(steps[index].step)) - max(span.began_ns, begins[index])
                    if shared_ns > 0 and steps[index].number < life.number:
                        over[name].add(steps[index].number)
                        hidden_ns += shared_ns
    counts = {name: len(found) for name, found in over.items()}
    return Overlap(num_steps=len(steps), num_over=counts, hidden_share=hidden_ns / total_ns if total_ns else 0.0)
