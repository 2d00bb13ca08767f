"""Exports what the prefetcher counts to Prometheus."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rowcast.prefetcher.pipeline.engine import PrefetcherEngine
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters, Queue
from rowcast.prefetcher.stores.store import StoreCounts
from rowcast.protocol.scrape import CountersCollector, Gauges
from rowcast.runtime.telemetry.metrics import Sample, samples_of


class SlotStates(NamedTuple):
    free: int
    clean: int
    dirty: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetcherGauges(Gauges[Queue]):
    depth_plans: int
    checkpoint_every_steps: int  # train steps
    checkpoint_every_seconds: float
    slots: Sequence[SlotStates]  # one per group
    in_flight_plans: int = 0
    horizon_batches: int = 0
    known_batches: int = 0
    write_back_lag_plans: int = 0
    shared_memory_size_bytes: int = 0
    shared_memory_free_bytes: int = 0
    data_waiting_files: int | None = None  # with data.follow
    data_delay_seconds: float | None = None
    stores: Sequence[StoreCounts | None] = ()  # one per group; None: its store has no tiers


def gauges_of(engine: PrefetcherEngine, idle: PrefetcherGauges, queued: int) -> PrefetcherGauges:
    """Returns the values for a scrape. `queued`: decoded batches."""
    return replace(
        idle,
        queue_depths={
            "batches": queued,
            "plans": len(engine.plans),
            "pieces": engine.fetcher.reading,
            "rows_back": engine.rows_home_queued,
        },
        ring_used_bytes=engine.fetch_ring.used_bytes,
        ring_size_bytes=engine.welcome.fetch_ring.nbytes,
        frames_refused=engine.conversation.frames_refused,
        in_flight_plans=plans_between(engine.fetcher.done_through, engine.fetcher.sent_through),
        horizon_batches=engine.planner.known.num_ahead,
        known_batches=engine.planner.num_known,
        slots=[
            SlotStates(free=g.num_free, clean=g.num_resident - g.num_dirty, dirty=g.num_dirty)
            for g in engine.planner.occupancy
        ],
        write_back_lag_plans=plans_between(engine.writeback.applied_through, engine.fetcher.done_through),
    )


def plans_between(older: int | None, newer: int | None) -> int:
    """Returns the plans after `older` up to `newer`; None stands before plan 0."""
    return max(0, (-1 if newer is None else newer) - (-1 if older is None else older))


class PrefetcherCollector(CountersCollector[PrefetcherCounters, PrefetcherGauges]):
    process, ring_direction = "prefetcher", "to_device"

    def own_samples(self, counters: PrefetcherCounters, gauges: PrefetcherGauges) -> Iterator[Sample]:
        for name, slots in zip(counters.groups, gauges.slots, strict=False):
            yield from samples_of(slots, name, prefix="slots_")
        for name, counts in zip(counters.groups, gauges.stores, strict=False):
            if counts is not None:
                yield "rowcast_tier_rows", (name, "memory"), counts.memory_rows
                yield "rowcast_tier_rows", (name, "cold"), counts.cold_rows
                yield "rowcast_tier_reads_total", (name, "memory"), counts.memory_reads
                yield "rowcast_tier_reads_total", (name, "cold"), counts.cold_reads
                yield "rowcast_tier_reads_total", (name, "untouched"), counts.untouched_reads
                yield "rowcast_tier_moved_rows_total", (name, "cold", "memory"), counts.loaded
                yield "rowcast_tier_moved_rows_total", (name, "untouched", "memory"), counts.untouched_loaded
                yield "rowcast_tier_moved_rows_total", (name, "memory", "cold"), counts.spilled
                yield "rowcast_tier_moved_rows_total", (name, "memory", "none"), counts.dropped
                yield "rowcast_tier_late_rows_total", (name,), counts.late
                yield "rowcast_tier_bytes_total", (name, "read"), counts.bytes_read
                yield "rowcast_tier_bytes_total", (name, "written"), counts.bytes_written
                yield "rowcast_tier_read_seconds_total", (name,), counts.read_seconds
                yield from samples_of(counts, name, prefix="store_")
