"""Keeps the counters of both processes; `scrape.py` reads them.

The hot path adds to plain ints and floats; it never touches prometheus_client. Only one thread writes each counter
(each key of a dict is a counter), so no lock is needed. A scrape between two additions sees a counter at most one event
late.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, get_args

from rowcast.job.tables import GroupSpec
from rowcast.protocol.batch import Kind
from rowcast.protocol.messages import Flush, PlanReady, RowsBack
from rowcast.protocol.plan_layout import ShareHeader
from rowcast.runtime.telemetry.timeline import SpanKind, Timeline

Side = Literal["producer", "consumer"]
StallReason = TypeVar("StallReason", bound=str)
Phase = TypeVar("Phase", bound=str)
Queue = TypeVar("Queue", bound=str)
NOT_SHOWN = nullcontext()
MOST_OPEN = 256  # plans, more than any depth


@dataclass(slots=True)
class GroupCounters:
    """Counts one group's rows and the bytes of their records."""

    record_bytes: int
    weight_bytes: int  # bytes of a row sent between ranks
    gradient_bytes: int
    lookups: int = 0
    unique_rows: int = 0
    hits: int = 0  # counted, not derived, so that a scrape between two additions never sees it fall
    rows_fetched: int = 0
    rows_evicted: int = 0
    rows_written_back: int = 0  # dirty victims and flushed rows
    rows_flushed: int = 0  # rows written back by barriers
    row_bytes_to_device: int = 0
    row_bytes_from_device: int = 0
    rows_sent: int = 0  # to other ranks
    rows_received: int = 0
    bytes_sent: int = 0  # rows and pooled vectors that leave, and gradients of those that came
    bytes_received: int = 0
    vector_bytes_sent: int = 0  # the part of `bytes_sent` that is pooled vectors and their gradients
    vector_bytes_received: int = 0

    def plan(self, *, num_lookups: int, num_unique: int, num_fetch: int, num_evict: int) -> None:
        """`num_unique`: of each step, summed; if ranks divide the batch, its rows that this rank owns."""
        self.lookups += num_lookups
        self.unique_rows += num_unique
        self.hits += num_unique - num_fetch
        self.rows_fetched += num_fetch
        self.rows_evicted += num_evict

    def exchange(self, share: ShareHeader, rank: int, *, trains: bool) -> None:
        """Counts what leaves this rank, without what it sends to itself."""
        sent = sum(share.send_counts) - share.send_counts[rank]
        received = sum(share.receive_counts) - share.receive_counts[rank]
        gradient_bytes = self.gradient_bytes if trains else 0
        self.rows_sent += sent
        self.rows_received += received
        self.bytes_sent += sent * self.weight_bytes + received * gradient_bytes
        self.bytes_received += received * self.weight_bytes + sent * gradient_bytes

    def pooled(self, sent: int, received: int, vector_bytes: int, *, trains: bool) -> None:
        """Counts pooled vectors that leave this rank and arrive; their gradients go the other way."""
        back = vector_bytes if trains else 0
        bytes_sent, bytes_received = sent * vector_bytes + received * back, received * vector_bytes + sent * back
        self.bytes_sent += bytes_sent
        self.bytes_received += bytes_received
        self.vector_bytes_sent += bytes_sent
        self.vector_bytes_received += bytes_received


@dataclass(slots=True, kw_only=True)
class Counters(Generic[StallReason, Phase, Queue]):
    """Base of `PrefetcherCounters` and `TrainerCounters`; `groups` has the order of `group_specs`."""

    stalls: dict[StallReason, float]  # reason -> seconds
    phases: dict[Phase, float]  # phase -> seconds
    # seconds for which a queue blocked each side: the producer while it was full, the consumer while it was empty
    queues: dict[Queue, dict[Side, float]]
    rank: int = 0  # whose counters they are
    train_steps: int = 0
    eval_steps: int = 0
    samples: int = 0  # of train steps; if ranks divide the batch, of this rank's parts
    eval_samples: int = 0
    plan_bytes_to_device: int = 0
    # Unix time of the last completed step, or of the start
    last_progress_timestamp_seconds: float = field(default_factory=time.time)
    timeline: Timeline | None = None  # also records the seconds counted here, with their times
    literals: ClassVar[tuple[Any, Any, Any]]  # StallReason, Phase, Queue

    groups: dict[str, GroupCounters] = field(default_factory=dict)
    _first_steps: dict[int, int] = field(init=False, default_factory=dict, repr=False)  # of the newest plans
    _by_index: tuple[GroupCounters, ...] = field(init=False, default=(), repr=False)  # messages name groups by number

    @classmethod
    def new(cls, groups: Sequence[GroupSpec], rank: int = 0) -> Self:
        """`groups` comes from `group_specs`."""
        reasons, phases, queues = map(get_args, cls.literals)
        counters = cls(
            rank=rank,
            stalls=dict.fromkeys(reasons, 0.0),
            phases=dict.fromkeys(phases, 0.0),
            queues={name: {"producer": 0.0, "consumer": 0.0} for name in queues},
        )
        counters.place(groups)
        return counters

    def place(self, groups: Sequence[GroupSpec]) -> None:
        """Counts these groups from now on: tables may be cut once the first batches are read."""
        if [group.name for group in groups] != list(self.groups):
            self.groups = {
                group.name: GroupCounters(group.record_bytes, group.parts[0].nbytes, group.gradient_bytes)
                for group in groups
            }
            self._by_index = tuple(self.groups.values())

    def step(self, kind: Kind, batch_size: int) -> None:
        if kind == "train":
            self.train_steps += 1
            self.samples += batch_size
        else:
            self.eval_steps += 1
            self.eval_samples += batch_size

    def exchanged(self, kind: Kind, shares: Iterable[ShareHeader]) -> None:
        """Counts a step whose batch ranks divide; one share per group."""
        for group, share in zip(self._by_index, shares, strict=True):
            group.exchange(share, self.rank, trains=kind == "train")

    def stalled(
        self, reason: StallReason, seconds: float, step: int | None = None, ended_s: float | None = None
    ) -> None:
        """`step` and `ended_s` (by the performance counter) are for the timeline."""
        self.stalls[reason] += seconds
        self.show("wait", reason, seconds, step, ended_s)

    def spent(self, phase: Phase, seconds: float, step: int | None = None, ended_s: float | None = None) -> None:
        """`step` and `ended_s` (by the performance counter) are for the timeline."""
        self.phases[phase] += seconds
        self.show("work", phase, seconds, step, ended_s)

    def blocked(self, queue: Queue, side: Side, seconds: float) -> None:
        self.queues[queue][side] += seconds

    def show(
        self, kind: SpanKind, name: str, seconds: float, step: int | None = None, ended_s: float | None = None
    ) -> None:
        """Adds a span to the timeline, if there is one; it ended at `ended_s` by the performance counter, or now."""
        if self.timeline is not None:
            self.timeline.add(kind, name, seconds, step, ended_s=ended_s)

    def shown(self, name: str, step: int | None = None) -> AbstractContextManager[None]:
        """Adds the block to the timeline, if there is one, without counting it."""
        return NOT_SHOWN if self.timeline is None else self.timeline.work(name, step)

    def progressed(self) -> None:
        """Notes that a step is complete on the device."""
        self.last_progress_timestamp_seconds = time.time()

    def plan_ready(self, message: PlanReady) -> None:
        """Counts a piece of a plan, sent (prefetcher) or received (trainer)."""
        if message.steps:
            self._first_steps[message.plan] = message.steps[0].step
            self._first_steps.pop(message.plan - MOST_OPEN, None)
        if message.arrays is not None:
            self.plan_bytes_to_device += message.arrays.nbytes
        for span in message.rows:
            group = self._by_index[span.group]
            group.row_bytes_to_device += span.count * group.record_bytes

    def step_of(self, plan: int | None) -> int | None:
        """Returns the first step of one of the newest plans: the timeline shows work for a plan there."""
        return None if plan is None else self._first_steps.get(plan)

    def flush(self, message: Flush) -> None:
        """Counts a piece of a barrier, sent (prefetcher) or received (trainer)."""
        if message.span is not None:
            self.plan_bytes_to_device += message.span.nbytes

    def rows_back(self, message: RowsBack) -> None:
        """Counts rows sent home (trainer) or written to the store (prefetcher)."""
        for span in message.rows:
            group = self._by_index[span.group]
            group.rows_written_back += span.count
            group.rows_flushed += span.count if message.barrier is not None else 0
            group.row_bytes_from_device += span.count * group.record_bytes

    def total(self, name: str) -> int:
        return sum(int(getattr(group, name)) for group in self._by_index)
