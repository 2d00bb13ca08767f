"""Reads how long each task of a recorded run took, step by step, and its overhead by type, to walk the run again.

Overhead is time between the events of the trace that no span of work covers:

    message   send         -> copy in         rows sent
              send back    -> write back      rows back
              copy in      -> fetch           ring room
              step         -> plan, send      step done
    wait      fill         -> copy out        rows filled: a thread of the same process wakes
              write back   -> fetch           rows home
    Python    between two spans of a thread that wait for nothing; it counts with the second one

A span contains overhead too: launches, and waits for Python's lock. These stay in the task's time.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from statistics import fmean, median

from rowcast.analysis.timeline import Pair, Recording, began, ended, lives
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.timeline import MAIN, TraceEvent

WITH_WAITS = (MAIN, "fetcher", "planning")  # threads whose waits are recorded
S = 1e6  # microseconds
TASK_OF = {  # a span's name -> the task that it is a part of; others have their own name
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


@dataclass(slots=True)
class RecordedRun:
    first_step: int
    begins: dict[str, float]  # when the threads "planning" and "main" began
    ended: list[float]  # when each step was done
    # task -> step -> seconds
    seconds: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    usual: dict[str, float] = field(default_factory=dict)  # hand-over -> its median; 0 for one that nothing waited for
    # hand-over -> step -> the mean of the step's pieces, where it is known
    of_step: dict[str, dict[int, float]] = field(default_factory=dict)

    def __call__(self, name: str, step: int) -> float:
        """Implements `pipeline.Durations`."""
        step += self.first_step
        if name in self.usual:
            return self.of_step.get(name, {}).get(step, self.usual[name])
        return self.seconds.get(name, {}).get(step, 0.0)


def recorded_run(pair: Pair) -> RecordedRun:
    """Raises ConfigError unless the recordings are of one attempt from its first step on."""
    steps = lives(pair)
    if any(len(recording.incarnations) != 1 for recording in pair.both) or not steps:
        raise ConfigError("the timeline has several attempts or no whole step; record a run that is not interrupted")
    first = min(began(span) for recording in pair.both for span in recording.spans)
    tracks = {"planning": pair.prefetcher.track("planning"), "main": pair.trainer.track(MAIN)}
    recorded = RecordedRun(
        first_step=steps[0].number,
        begins={name: (began(spans[0]) - first) / S for name, spans in tracks.items()},
        ended=[(ended(life.step) - first) / S for life in steps],
    )
    add_tasks(recorded, pair, began(tracks["main"][0]))
    add_handovers(recorded, pair, sorted(ended(life.step) for life in steps))
    fetched: dict[int, float] = {}
    for span in pair.prefetcher.named("fetch"):
        fetched.setdefault(span.step or 0, began(span))
    for life in steps:  # from the end of a step to the first fetch of the next one: what a barrier takes
        if life.number + 1 in fetched:
            barrier_s = (fetched[life.number + 1] - ended(life.step)) / S
            recorded.seconds["barrier"][life.number] = max(0.0, barrier_s - recorded.usual["step done"])
    return recorded


def add_tasks(recorded: RecordedRun, pair: Pair, connected: float) -> None:
    def add(span: TraceEvent, us: float) -> None:
        if span.step is not None:
            recorded.seconds[TASK_OF.get(span.name, span.name)][span.step] += us / S

    for span in chain(pair.prefetcher.spans, pair.trainer.spans):
        if span.cat == "work":
            add(span, span.dur or 0.0)
        elif span.name == "wait: ranks" and span.step is not None:  # the same time is work of the phase `exchange`
            recorded.seconds["exchange"][span.step] += (span.dur or 0.0) / S
            recorded.seconds["step"][span.step] -= (span.dur or 0.0) / S
    for recording, track in product(pair.both, WITH_WAITS):
        for span, us in own_work(recording.track(track), connected):
            add(span, us)


def add_handovers(recorded: RecordedRun, pair: Pair, done: Sequence[float]) -> None:
    """Each as far as the receiving thread was free. `done`: the ends of steps."""
    prefetcher, trainer = pair.both
    main = trainer.track(MAIN)
    for what, given, spans, name, before in (
        ("rows sent", prefetcher.named("send"), main, "copy in", own_work(main)),
        ("rows filled", trainer.named("fill"), trainer.track("sender"), "copy out", []),
        ("rows back", trainer.named("send back"), prefetcher.track("write-back"), "write_back", []),
    ):
        ways, queued = taken(given, spans, name, before)
        recorded.usual[what] = usual(chain.from_iterable(ways.values()))
        recorded.of_step[what] = {step: fmean(times) / S for step, times in ways.items()}
        for step, until_free, until_begun in queued if name != "copy in" else ():
            if until_free / S > recorded.usual[what]:
                recorded.seconds[TASK_OF.get(name, name)][step] += until_begun / S
    written, copied_in = (
        sorted(map(ended, spans_of)) for spans_of in (prefetcher.named("write_back"), trainer.named("copy in"))
    )
    recorded.usual["rows home"] = usual(woken_by(prefetcher, "write_back", written))
    recorded.usual["ring room"] = usual(woken_by(prefetcher, "ring", copied_in))
    recorded.usual["step done"] = usual(chain(*(woken_by(prefetcher, reason, done) for reason in ("ahead", "credit"))))


def usual(times: Iterable[float]) -> float:
    known = [*times]
    return median(known) / S if known else 0.0


def taken(
    given: Iterable[TraceEvent], spans: Sequence[TraceEvent], task: str, before: Iterable[tuple[TraceEvent, float]]
) -> tuple[dict[int, list[float]], list[tuple[int, float, float]]]:
    """How a thread with `spans` took up `task` after each task `given`, piece by piece. `before`: its `own_work`.

    In microseconds: by step, the ways of pieces that found it free; and of the others the step, until it was free, and
    from then until it began."""
    worked_us = {id(span): us for span, us in before}
    spans = [span for span in spans if span.name != "wait: rows"]  # one that waits for something else is not free
    left, begun = defaultdict[int | None, list[float]](list), defaultdict[int | None, list[float]](list)
    for span in given:
        left[span.step].append(ended(span))
    for span in spans:
        if span.name == task:
            begun[span.step].append(began(span) - worked_us.get(id(span), 0.0))
    all_ends, ways, queued = [ended(span) for span in spans], defaultdict[int, list[float]](list), []
    for step, times in left.items():
        if step is None or len(times) != len(begun[step]):
            continue  # a piece without dirty victims sends nothing back
        for sent, taken_up in zip(sorted(times), sorted(begun[step]), strict=True):
            last = bisect_right(all_ends, taken_up) - 1
            if last < 0:
                continue  # the thread had not begun
            if all_ends[last] > sent:
                queued.append((step, all_ends[last] - sent, taken_up - all_ends[last]))
            else:
                ways[step].append(max(0.0, taken_up - sent))
    return ways, queued


def woken_by(recording: Recording, reason: str, times: Sequence[float]) -> Iterator[float]:
    """Microseconds from the last of `times` (ordered) in each wait for this reason to the end of the wait."""
    for wait in recording.named(f"wait: {reason}"):
        last = bisect_left(times, ended(wait)) - 1
        if last >= 0 and times[last] > began(wait):
            yield ended(wait) - times[last]


def own_work(spans: Sequence[TraceEvent], since: float = 0.0) -> list[tuple[TraceEvent, float]]:
    """Microseconds that a thread worked before each span, on what no span covers: messages, results, polling. Only for
    threads whose waits are recorded."""
    worked, end = [], began(spans[0]) if spans else 0.0
    for span in spans:
        if span.cat == "work" and began(span) > end >= since:
            worked.append((span, began(span) - end))
        end = max(end, ended(span))
    return worked
