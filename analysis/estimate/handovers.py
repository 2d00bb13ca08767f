"""Measures recorded hand-over latency between threads, which no task includes.

rows sent     send         -> copy in      message
rows filled   fill         -> copy out
rows back     send back    -> write back   message
rows home     write back   -> fetch
ring room     copy in      -> fetch        message
step done     step         -> plan, send   message
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, median

from rowcast.analysis.estimate.pipeline import Handover
from rowcast.analysis.timeline.recording import MAIN, Recordings, TimelineRecording, ended_ns, lives
from rowcast.runtime.telemetry.timeline import TimelineSpan

WITH_WAITS = (MAIN, "fetcher", "planning")  # threads whose waits are recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Handovers:
    """Seconds, as far as the receiving thread was free."""

    usual: dict[Handover, float]  # medians; 0 for one that nothing waited for
    of_step: dict[Handover, dict[int, float]]  # the mean of a step's pieces, where it is known
    between: dict[
        str, dict[int, float]
    ]  # task -> step -> the thread's own work before it, where waits are not recorded

    def __call__(self, name: Handover, step: int) -> float:
        return self.of_step.get(name, {}).get(step, self.usual[name])


@dataclass(slots=True)
class Taken:
    """How a thread took the pieces of a task."""

    ways_ns: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # pieces that found it free
    queued_ns: list[tuple[int, int, int]] = field(default_factory=list)  # step, until it was free, until it began

    @property
    def usual_ns(self) -> float:
        ways = [*chain.from_iterable(self.ways_ns.values())]
        return median(ways) if ways else 0.0


def handovers(recordings: Recordings) -> Handovers:
    prefetcher, trainer = recordings.both
    done = sorted(ended_ns(life.step) for life in lives(recordings))
    pieces: dict[Handover, Taken] = {
        "rows sent": taken(prefetcher, "send", trainer, MAIN, "copy in"),
        "rows filled": taken(trainer, "fill", trainer, "sender", "copy out"),
        "rows back": taken(trainer, "send back", prefetcher, "write-back", "write_back"),
    }
    waits: dict[Handover, list[int]] = {
        "rows home": [*woken(prefetcher, "write_back", all_ends(prefetcher, "write_back"))],
        "ring room": [*woken(prefetcher, "ring", all_ends(trainer, "copy in"))],
        "step done": [*woken(prefetcher, "ahead", done), *woken(prefetcher, "credit", done)],
    }
    usual_ns = {name: found.usual_ns for name, found in pieces.items()}
    usual_ns |= {name: median(times) if times else 0.0 for name, times in waits.items()}
    return Handovers(
        usual={name: ns / 1e9 for name, ns in usual_ns.items()},
        of_step={
            name: {step: fmean(ways) / 1e9 for step, ways in found.ways_ns.items()} for name, found in pieces.items()
        },
        between={"copy out": between(pieces["rows filled"]), "write back": between(pieces["rows back"])},
    )


def taken(giver: TimelineRecording, given: str, taker: TimelineRecording, track: str, task: str) -> Taken:
    """How `track` took up `task` after each task `given`, piece by piece."""
    own_ns = {id(span): own for span, own in own_work(taker, track)} if track in WITH_WAITS else {}
    # one that waits for something else is not free
    spans = sorted(
        (span for span in taker.spans if span.track == track and span.kind != "step" and span.name != "rows"),
        key=lambda span: span.began_ns,
    )
    began, ends = defaultdict(list), [ended_ns(span) for span in spans]
    for span in spans:
        if (span.kind, span.name) == ("work", task):
            began[span.step].append(span.began_ns - own_ns.get(id(span), 0))
    found = Taken()
    for step, left in ends_of(giver, given).items():
        if len(left) != len(began[step]):
            continue  # a piece without dirty victims sends nothing back
        for left_ns, began_ns in zip(sorted(left), sorted(began[step]), strict=True):
            before = bisect_right(ends, began_ns) - 1
            if before < 0:
                continue  # the thread had not begun
            if ends[before] > left_ns:
                found.queued_ns.append((step, ends[before] - left_ns, began_ns - ends[before]))
            else:
                found.ways_ns[step].append(max(0, began_ns - left_ns))
    return found


def between(found: Taken) -> dict[int, float]:
    """Returns, per step, the seconds from the end of a task to the start of the next one, if its piece had already
    arrived."""
    seconds: dict[int, float] = defaultdict(float)
    for step, until_free_ns, until_begun_ns in found.queued_ns:
        if until_free_ns > found.usual_ns:
            seconds[step] += until_begun_ns / 1e9
    return seconds


def woken(recording: TimelineRecording, reason: str, ends: Sequence[int]) -> Iterator[int]:
    """Nanoseconds from the last of `ends` (ordered) in each wait for this reason to the end of the wait."""
    for span in recording.spans:
        if (span.kind, span.name) == ("wait", reason):
            last = bisect_left(ends, ended_ns(span)) - 1
            if last >= 0 and ends[last] > span.began_ns:
                yield ended_ns(span) - ends[last]


def own_work(recording: TimelineRecording, track: str, since_ns: int = 0) -> list[tuple[TimelineSpan, int]]:
    """Nanoseconds that a thread worked before each span, on what no span covers: messages, results, polling. Only for
    threads whose waits are recorded."""
    spans = sorted(
        (span for span in recording.spans if span.track == track and span.kind != "step"),
        key=lambda span: span.began_ns,
    )
    found, end_ns = [], spans[0].began_ns if spans else 0
    for span in spans:
        if span.kind == "work" and span.began_ns > end_ns >= since_ns:
            found.append((span, span.began_ns - end_ns))
        end_ns = max(end_ns, ended_ns(span))
    return found


def ends_of(recording: TimelineRecording, task: str) -> Mapping[int, list[int]]:
    found = defaultdict(list)
    for span in recording.spans:
        if (span.kind, span.name) == ("work", task) and span.step is not None:
            found[span.step].append(ended_ns(span))
    return found


def all_ends(recording: TimelineRecording, task: str) -> list[int]:
    return sorted(chain.from_iterable(ends_of(recording, task).values()))
