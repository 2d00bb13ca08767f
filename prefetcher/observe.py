"""What an engine shows while it runs: gauges for a scrape, and where idle seconds are counted."""

from collections.abc import Callable

from prefetcher.engine import PrefetcherEngine
from prefetcher.metrics import PrefetcherGauges, Queue, SlotStates
from prefetcher.readers.worker import BatchSource


def stall_clocks(engine: PrefetcherEngine) -> dict[str, Callable[[float], None]]:
    """Where the idle seconds of each stage's thread are counted."""
    counters = engine.counters

    def planning(seconds: float) -> None:
        if engine.planning.waits_for_batches:
            counters.stalled("batches", seconds)
            counters.blocked("batches", "consumer", seconds)
        elif engine.planning.waits_for_credit:
            counters.blocked("plans", "producer", seconds)

    def fetcher(seconds: float) -> None:
        reason = engine.fetcher.stalled_by
        if reason is None or engine.hello is None:
            return
        counters.stalled(reason, seconds)
        if reason == "plans":
            counters.blocked("plans", "consumer", seconds)
        elif reason in ("credit", "ring"):
            counters.blocked("pieces", "producer", seconds)

    def write_back(seconds: float) -> None:
        if not engine.writeback.queued:
            counters.blocked("rows_back", "consumer", seconds)

    return {"planning": planning, "fetcher": fetcher, "write-back": write_back}


def gauges(engine: PrefetcherEngine, source: BatchSource) -> PrefetcherGauges:
    depths: dict[Queue, Callable[[], int]] = {
        "batches": lambda: source.counters.queue_depth,
        "plans": lambda: engine.fetcher.queued,
        "pieces": lambda: engine.fetcher.reading,
        "rows_back": lambda: engine.writeback.queued,
    }
    return PrefetcherGauges(
        queue_depth=lambda queue: depths[queue](),
        ring_used_bytes=lambda: engine.fetch_ring.used_bytes,
        ring_size_bytes=engine.welcome.fetch_ring.nbytes,
        frames_refused=lambda: engine.conversation.frames_refused,
        depth=engine.welcome.depth,
        in_flight_steps=lambda: steps_between(engine.fetcher.done_through, engine.fetcher.sent_through),
        horizon=lambda: engine.planner.horizon,
        known_batches=lambda: engine.planner.num_known,
        slots=lambda: [
            SlotStates(free=g.num_free, clean=g.num_resident - g.num_dirty, dirty=g.num_dirty) for g in engine.planner.occupancy
        ],
        write_back_lag_steps=lambda: steps_between(engine.writeback.applied_through, engine.fetcher.done_through),
    )


def steps_between(older: int | None, newer: int | None) -> int:
    """Steps after `older` up to `newer`; steps count from 0."""
    return max(0, (-1 if newer is None else newer) - (-1 if older is None else older))
