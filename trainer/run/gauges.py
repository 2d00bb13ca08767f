"""Reads the gauges of a running engine, and counts the idle seconds of its threads."""

from collections.abc import Callable
from dataclasses import replace

from rowcast.job.learning_rate import learning_rate
from rowcast.job.schema import Optimizer
from rowcast.trainer.step.engine import TrainerEngine
from rowcast.trainer.step.metrics import Side, TrainerGauges


def stall_clocks(engine: TrainerEngine) -> dict[str, Callable[[float], None]]:
    """Returns, for each stage with a thread, the function that counts its idle seconds; the main loop counts its idle
    time itself."""
    counters = engine.counters

    def sender(seconds: float) -> None:
        if engine.sender.waiting_for_ring:
            counters.stalled("ring", seconds)
        elif not engine.sender.queued:
            counters.blocked("rows_back", "consumer", seconds)

    return {"sender": sender}


def learning_rates(optimizer: Optimizer, train_steps: int) -> dict[Side, float]:
    return {
        "sparse": learning_rate(optimizer.sparse, train_steps),
        "dense": learning_rate(optimizer.dense, train_steps),
    }


def engine_gauges(idle: TrainerGauges, engine: TrainerEngine) -> TrainerGauges:
    return replace(
        idle,
        queue_depths={"steps": engine.cache.steps_waiting, "rows_back": engine.sender.queued},
        ring_used_bytes=engine.back_ring.used_bytes,
        ring_size_bytes=engine.back_ring.capacity,
        frames_refused=engine.conversation.frames_refused,
    )
