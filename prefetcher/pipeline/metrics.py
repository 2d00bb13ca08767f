"""Counts what the prefetcher does; `run/scrape.py` exports it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from rowcast.protocol.counters import Counters
from rowcast.protocol.plan import PlannedSteps

StallReason = Literal["data", "batches", "plans", "credit", "write_back", "ring", "store", "barrier", "checkpoint"]
Phase = Literal["read", "plan", "fetch", "send", "write_back"]
Queue = Literal["batches", "plans", "pieces", "rows_back"]
# data: all files that have arrived are read
# batches: the planner waits for the reader         plans: the fetcher waits for the planner
# credit: PlanReady waits for a PlanDone            write_back: rows wait until a RowsBack is applied
# ring: no space in the fetch ring                  store: a ticket is not finished
# barrier: later plans wait for the flush
# checkpoint: a barrier waits until the previous one is durable, or rows that came home for room beside a checkpoint's
#
# read: a batch enters the horizon                  plan: a plan is made
# fetch: a plan is cut, its rows read into the ring send: a piece is announced
# write_back: returned rows go to the store
#
# reader -batches-> planner -plans-> fetcher -pieces-> link -rows_back-> write-back


@dataclass(slots=True, kw_only=True)
class PrefetcherCounters(Counters[StallReason, Phase, Queue]):
    """Created by `new_counters`. Every counter has one writer: the thread of its stage."""

    literals = StallReason, Phase, Queue

    # written under a lock
    checkpoints: int = 0
    checkpoint_seconds: float = 0.0  # sum of the times from barrier to durable
    checkpoint_bytes: int = 0
    # Unix time of the newest one, or of the start
    checkpoint_last_timestamp_seconds: float = field(default_factory=time.time)

    @contextmanager
    def timed(self, phase: Phase, step: int | None = None) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            ended_s = time.perf_counter()
            self.spent(phase, ended_s - began_s, step, ended_s)

    def checkpointed(self, seconds: float, nbytes: int) -> None:
        self.checkpoints += 1
        self.checkpoint_seconds += seconds
        self.checkpoint_bytes += nbytes
        self.checkpoint_last_timestamp_seconds = time.time()

    def planned(self, plan: PlannedSteps, batch_sizes: Sequence[int]) -> None:
        for step, batch_size in zip(plan.steps, batch_sizes, strict=True):
            self.step(step.kind, batch_size)
            shares = [group.share.header for group in step.groups if group.share is not None]
            if shares:
                self.exchanged(step.kind, shares)
        for counters, of_steps in zip(
            self.groups.values(), zip(*[own.groups for own in plan.steps], strict=True), strict=True
        ):
            counters.plan(
                num_lookups=sum([own.num_lookups for own in of_steps]),
                num_unique=sum(
                    [len(own.unique_slots) if own.share is None else own.share.header.num_own for own in of_steps]
                ),
                num_fetch=len(of_steps[0].fetch_keys),
                num_evict=len(of_steps[0].evict_keys),
            )


new_counters = PrefetcherCounters.new
