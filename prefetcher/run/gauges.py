"""Reports on a running engine: gauges for a scrape, and counters for the idle seconds of its threads."""

from collections.abc import Callable
from dataclasses import replace

from rowcast.job.schema import CheckpointInterval, Job
from rowcast.prefetcher.pipeline.engine import PrefetcherEngine
from rowcast.prefetcher.pipeline.metrics import PrefetcherGauges, SlotStates
from rowcast.prefetcher.readers.worker import WorkerSource
from rowcast.protocol.transport.ring_file import shared_memory


def stall_clocks(engine: PrefetcherEngine) -> dict[str, Callable[[float], None]]:
    counters = engine.counters

    def planning(seconds: float) -> None:
        if engine.planning.waits_for_batches:
            counters.stalled("batches", seconds)
            counters.blocked("batches", "consumer", seconds)
        elif engine.planning.waits_for_credit:
            counters.blocked("plans", "producer", seconds)
            counters.show("wait", "ahead", seconds)

    def fetcher(seconds: float) -> None:
        reason = engine.fetcher.stalled_by
        if reason is None or engine.hello is None:
            return
        if engine.writeback.waits_for_checkpoint:
            reason = "checkpoint"  # the fetcher's wait is due to rows that cannot be written
        counters.stalled(reason, seconds)
        if reason == "plans":
            counters.blocked("plans", "consumer", seconds)
        elif reason in ("credit", "ring"):
            counters.blocked("pieces", "producer", seconds)

    def write_back(seconds: float) -> None:
        if not engine.rows_home_queued:
            counters.blocked("rows_back", "consumer", seconds)

    return {"planning": planning, "fetcher": fetcher, "write-back": write_back}


def idle_gauges(job: Job, num_groups: int) -> PrefetcherGauges:
    size_bytes, free_bytes = shared_memory()
    return PrefetcherGauges(
        depth=job.lookahead.depth,
        checkpoint_every=train_steps_of(job.checkpoint.interval),
        slots=[SlotStates(0, 0, 0)] * num_groups,
        shared_memory_size_bytes=size_bytes,
        shared_memory_free_bytes=free_bytes,
    )


def engine_gauges(idle: PrefetcherGauges, engine: PrefetcherEngine, source: WorkerSource) -> PrefetcherGauges:
    return replace(
        idle,
        checkpoint_every=train_steps_of(engine.planner.checkpoint_every),
        queue_depths={
            "batches": source.counters.queue_depth,
            "plans": len(engine.plans),
            "pieces": engine.fetcher.reading,
            "rows_back": engine.rows_home_queued,
        },
        ring_used_bytes=engine.fetch_ring.used_bytes,
        ring_size_bytes=engine.welcome.fetch_ring.nbytes,
        frames_refused=engine.conversation.frames_refused,
        in_flight_steps=steps_between(engine.fetcher.done_through, engine.fetcher.sent_through),
        horizon=engine.planner.horizon,
        known_batches=engine.planner.num_known,
        slots=[
            SlotStates(free=g.num_free, clean=g.num_resident - g.num_dirty, dirty=g.num_dirty)
            for g in engine.planner.occupancy
        ],
        write_back_lag_steps=steps_between(engine.writeback.applied_through, engine.fetcher.done_through),
    )


def train_steps_of(interval: CheckpointInterval) -> int:
    """Returns the train steps between checkpoints; 0 if a different rule applies."""
    return interval if isinstance(interval, int) else 0


def steps_between(older: int | None, newer: int | None) -> int:
    """Returns the steps after `older` up to `newer`; None: before step 0."""
    return max(0, (-1 if newer is None else newer) - (-1 if older is None else older))
