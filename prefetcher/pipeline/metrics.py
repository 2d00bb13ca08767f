"""Counts what the prefetcher does and exports it to Prometheus."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rowcast.job.schema import CheckpointInterval
from rowcast.prefetcher.stores.store_counts import StoreCounts
from rowcast.protocol.counters import Counters, CountersCollector, Gauges
from rowcast.protocol.plan import StepPlan
from rowcast.runtime.telemetry.metrics import Sample, samples_of

StallReason = Literal["batches", "plans", "credit", "write_back", "ring", "store", "barrier", "checkpoint"]
Phase = Literal["read", "plan", "fetch", "send", "write_back"]
Queue = Literal["batches", "plans", "pieces", "rows_back"]
# batches: the planner waits for the reader         plans: the fetcher waits for the planner
# credit: StepReady waits for a StepDone            write_back: rows wait until a RowsBack is applied
# ring: no space in the fetch ring                  store: a ticket is not finished
# barrier: later plans wait for the flush
# checkpoint: a barrier waits until the previous one is durable, or rows that came home for room beside a checkpoint's
#
# read: a batch enters the horizon                  plan: a plan is made
# fetch: a plan is cut, its rows read into the ring send: a piece is announced
# write_back: returned rows go to the store
#
# given: the store returns what was written last    filled: a slot holds the row that the store returned
# returned: a dirty row came home unchanged         dropped: a clean victim equals what was filled
# kept: at a barrier the store has the rows written to it
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

    def planned(self, plan: StepPlan, batch_size: int) -> None:
        self.step(plan.kind, batch_size)
        for counters, group in zip(self.groups.values(), plan.groups, strict=True):
            counters.step(
                num_lookups=group.num_lookups,
                num_unique=len(group.unique_slots) if group.share is None else group.share.header.num_own,
                num_fetch=len(group.fetch_keys),
                num_evict=len(group.evict_keys),
            )
        shares = [group.share.header for group in plan.groups if group.share is not None]
        if shares:
            self.exchanged(plan.kind, shares)


class SlotStates(NamedTuple):
    free: int
    clean: int
    dirty: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetcherGauges(Gauges[Queue]):
    depth_steps: int
    checkpoint_every_steps: int  # train steps
    slots: Sequence[SlotStates]  # one per group
    in_flight_steps: int = 0
    horizon_batches: int = 0
    known_batches: int = 0
    write_back_lag_steps: int = 0
    shared_memory_size_bytes: int = 0
    shared_memory_free_bytes: int = 0
    stores: Sequence[StoreCounts | None] = ()  # one per group; None: its store has no tiers


def train_steps_of(interval: CheckpointInterval) -> int:
    """Returns the train steps between checkpoints; 0 if a different rule applies."""
    return interval if isinstance(interval, int) else 0


new_counters = PrefetcherCounters.new


class PrefetcherCollector(CountersCollector[PrefetcherCounters, PrefetcherGauges]):
    process, ring_direction = "prefetcher", "to_device"

    def own_samples(self, counters: PrefetcherCounters, gauges: PrefetcherGauges) -> Iterator[Sample]:
        for name, slots in zip(counters.groups, gauges.slots, strict=True):
            yield from samples_of(slots, name, prefix="slots_")
        for name, counts in zip(counters.groups, gauges.stores, strict=False):
            if counts is not None:
                yield from tier_samples(name, counts)


def tier_samples(group: str, counts: StoreCounts) -> Iterator[Sample]:
    yield "rowcast_tier_rows", (group, "memory"), counts.memory_rows
    yield "rowcast_tier_rows", (group, "cold"), counts.cold_rows
    yield "rowcast_tier_reads_total", (group, "memory"), counts.memory_reads
    yield "rowcast_tier_reads_total", (group, "cold"), counts.cold_reads
    yield "rowcast_tier_reads_total", (group, "untouched"), counts.untouched_reads
    yield "rowcast_tier_moved_rows_total", (group, "cold", "memory"), counts.loaded
    yield "rowcast_tier_moved_rows_total", (group, "untouched", "memory"), counts.untouched_loaded
    yield "rowcast_tier_moved_rows_total", (group, "memory", "cold"), counts.spilled
    yield "rowcast_tier_moved_rows_total", (group, "memory", "none"), counts.dropped
    yield "rowcast_tier_late_rows_total", (group,), counts.late
    yield "rowcast_tier_bytes_total", (group, "read"), counts.bytes_read
    yield "rowcast_tier_bytes_total", (group, "written"), counts.bytes_written
    yield "rowcast_tier_read_seconds_total", (group,), counts.read_seconds
    yield from samples_of(counts, group, prefix="store_")
