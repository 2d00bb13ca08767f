"""What is known of the future: the batches from the next plan's to the horizon, and where each distinct row occurs in them.

Each group's occurrences stand in a ring, batch after batch, by ascending key within a batch. A place is counted over the whole run, its
cell is the place modulo the ring's size; `head` is the first place of the next batch to be planned, `tail` the first free one:

    ... planned | batch p: 3 7 9 | batch p+1: 3 8 | batch p+2: 7 8 | free ...
                           head                                      tail
    next use             p+1 p+2 ?           ? p+2             ? ?

A batch that enters writes its queue into the previous occurrence of each of its rows, or, where a row is resident and had no further
use, moves the row to that queue. So planning reads next uses and never looks anything up.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prefetcher.compiled import compiled
from prefetcher.planner.directory import NONE, Directory, track
from prefetcher.planner.eviction import Queues, queue_in_order, queue_of, unlink
from prefetcher.planner.grouping import F32, I32, I64
from protocol.batch import ScheduledBatch

INITIAL_PLACES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class EnteredLookups:
    """One group's part of a batch in the horizon."""

    place: int  # of its first distinct row
    num_unique: int
    inverse: I32  # [N] look-up -> distinct row
    segment_offsets: I32  # [U + 1]
    offsets: I32 | None  # [F * B + 1]
    weights: F32 | None  # [N]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownBatch:
    scheduled: ScheduledBatch
    groups: tuple[EnteredLookups, ...]


class Horizon:
    """The known batches, in step order without gaps. Step p may be planned when p to p + `num_batches` are known or the data has ended."""

    def __init__(self, num_batches: int) -> None:
        assert num_batches >= 0, f"a horizon of {num_batches} batches"
        self._num_batches = num_batches
        self._known: deque[KnownBatch] = deque()
        self._following: int | None = None
        self._ended = False

    def check_next(self, step: int) -> None:
        """The step that may enter now: the following one, and no further ahead than the next plan may know."""
        assert not self._ended, f"step {step} was added after the end of the data"
        assert self._following in (None, step), f"step {step} was added where step {self._following} follows"
        assert self.wants > 0, f"step {step} was added where {len(self._known)} batches are known and {self._num_batches + 1} are enough"

    def append(self, batch: KnownBatch) -> None:
        self.check_next(batch.scheduled.step)
        self._known.append(batch)
        self._following = batch.scheduled.step + 1

    def end(self) -> None:
        self._ended = True

    @property
    def wants(self) -> int:
        """Batches still missing before the next plan may be made."""
        return 0 if self._ended else self._num_batches + 1 - len(self._known)

    @property
    def ready(self) -> bool:
        return self.wants == 0 and len(self._known) > 0

    @property
    def next(self) -> KnownBatch:
        assert self.ready, f"{len(self._known)} batches are known of the {self._num_batches + 1} that a plan needs"
        return self._known[0]

    @property
    def last_step(self) -> int:
        return self._known[-1].scheduled.step

    @property
    def batches(self) -> tuple[KnownBatch, ...]:
        return tuple(self._known)

    def advance(self) -> None:
        self._known.popleft()


class Occurrences(NamedTuple):
    """The ring; a power of two of places."""

    entries: I32  # entry of the row
    queues: I32  # the queue it joins once this batch is planned: that of its next occurrence's step, or of unknown uses


def new_occurrences(num_places: int = INITIAL_PLACES) -> Occurrences:
    return Occurrences(np.full(num_places, NONE, np.int32), np.full(num_places, NONE, np.int32))


def with_places(ring: Occurrences, head: int, tail: int, num_new: int) -> Occurrences:
    """The same ring, or a larger one with the same occurrences, in which `num_new` more have places."""
    size = len(ring.entries)
    while size < tail - head + num_new:
        size *= 2
    if size == len(ring.entries):
        return ring
    grown = new_occurrences(size)
    places = np.arange(head, tail)
    grown.entries[places % size] = ring.entries[places % len(ring.entries)]
    grown.queues[places % size] = ring.queues[places % len(ring.entries)]
    return grown


@compiled
def enter(step: int, keys: I64, directory: Directory, ring: Occurrences, head: int, tail: int, queues: Queues) -> None:
    """Tracks the batch of `step`, whose distinct rows have these ascending keys. Room was made in directory and ring."""
    entries, last = directory.entries, len(ring.entries) - 1
    queue, unknown = queue_of(queues, step), queue_of(queues, NONE)
    moved = np.empty(len(keys), np.int32)
    num_moved = 0
    for u in range(len(keys)):
        entry = track(directory, keys[u])
        previous = entries[entry]["occurrence"]
        if previous >= head:
            ring.queues[previous & last] = queue
        elif entries[entry]["slot"] != NONE:
            unlink(queues, unknown, entries, entry)
            moved[num_moved] = entry
            num_moved += 1
        entries[entry]["occurrence"] = tail + u
        ring.entries[(tail + u) & last] = entry
        ring.queues[(tail + u) & last] = unknown
    queue_in_order(queues, queue, entries, moved[:num_moved])
