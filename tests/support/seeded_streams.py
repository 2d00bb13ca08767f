"""Streams on the CPU for tests: queue closures and run them in any order that the recorded events allow, each copy in
halves. Can omit one named wait, to show that the wait is needed.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rowcast.trainer.device.streams import Closure, Event, Move, Stream, Streams, Wait, Work, copy, gather, scatter


class SeededEvent:
    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened


class Started:
    """An event that happens once a collective that the stream started is complete."""

    def __init__(self, start: Callable[[], Work]) -> None:
        self._start = start
        self._work: Work | None = None

    def start(self) -> None:
        self._work = self._start()

    @property
    def happened(self) -> bool:
        return self._work is not None and self._work.is_completed()


class SeededStream(Stream):
    """A queue of closures and waits; `Streams.advance` chooses which stream runs next."""

    def __init__(self, without: Wait | None) -> None:
        self._without = without
        self._queue: deque[Closure | SeededEvent | Started] = deque()

    def run(self, closure: Closure) -> None:
        self._queue.append(closure)

    def wait(self, event: Event, why: Wait) -> None:
        if why != self._without:
            assert isinstance(event, SeededEvent), "the event belongs to another kind of stream"
            self._queue.append(event)

    def record(self) -> Event:
        event = SeededEvent()
        self._queue.append(lambda: setattr(event, "happened", True))
        return event

    def communicate(self, start: Callable[[], Work]) -> None:
        started = Started(start)
        self._queue.append(started.start)
        if self._without != "exchanged":
            self._queue.append(started)

    def copy(self, source: Tensor, out: Tensor) -> None:
        half = len(source) // 2
        self.run(lambda: copy(source[:half], out[:half]))
        self.run(lambda: copy(source[half:], out[half:]))

    def gather(self, moves: Sequence[Move]) -> None:
        for half in halves(moves):
            self.run(lambda half=half: gather(half))  # type: ignore[misc]

    def scatter(self, moves: Sequence[Move]) -> None:
        for half in halves(moves):
            self.run(lambda half=half: scatter(half))  # type: ignore[misc]

    @property
    def runnable(self) -> bool:
        return bool(self._queue) and (callable(head := self._queue[0]) or head.happened)

    def step(self) -> None:
        head = self._queue.popleft()
        if callable(head):
            head()


def halves(moves: Sequence[Move]) -> list[tuple[Move, ...]]:
    return list(zip(*map(halves_of, moves), strict=True))


def halves_of(move: Move) -> tuple[Move, Move]:
    half = move.size // 2
    begin = move.begin + half * move.rows.shape[1]
    return move._replace(size=half), move._replace(first=move.first + half, size=move.size - half, begin=begin)


class SeededStreams(Streams):
    def __init__(self, seed: int, without: Wait | None = None) -> None:
        self.device = torch.device("cpu")
        self._chance = random.Random(seed)
        self._without = without
        self._streams = [SeededStream(without) for _ in range(5)]
        # some streams are much slower than others
        self._speed = {stream: self._chance.choice((0.05, 0.3, 1.0)) for stream in self._streams[:4]}
        self.copy_in, self.fill, self.compute, self.evict, self.exchange = self._streams
        self._speed[self.exchange] = 0.3

    def done(self, event: Event, why: Wait) -> bool:
        return why == self._without or event.query()

    def advance(self) -> bool:
        runnable = [stream for stream in self._streams if stream.runnable]
        if not runnable:
            return False
        self._chance.choices(runnable, [self._speed[stream] for stream in runnable])[0].step()
        return True
