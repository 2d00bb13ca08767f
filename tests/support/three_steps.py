"""A small job's groups, and counters that have seen a few steps of it."""

from dataclasses import fields
from typing import Any

import numpy as np
from msgspec.structs import replace

from rowcast.job.optimizers import SparseOptimizer
from rowcast.job.tables import GroupSpec, record_parts
from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.pipeline.metrics import new_counters as new_prefetcher_counters
from rowcast.prefetcher.run.scrape import PrefetcherCollector, PrefetcherGauges, SlotStates
from rowcast.prefetcher.stores.store import StoreCounts
from rowcast.protocol.messages import DataDelay, Flush, PlanReady, RingRef, RowsBack, TierTotals
from rowcast.protocol.plan import GroupPlan, PlannedSteps, StepPlan, group_headers
from rowcast.protocol.plan_layout import ArraySpan, RowSpan, StepHeader
from rowcast.runtime.telemetry.metrics import Health, build_info, versions
from rowcast.trainer.kernels.choose import lookup_arrays
from rowcast.trainer.models.evaluate import Evaluation, TaskEvaluation
from rowcast.trainer.step.engine import TrainerCollector, TrainerGauges
from rowcast.trainer.step.metrics import TrainerCounters
from rowcast.trainer.step.metrics import new_counters as new_trainer_counters
from tests.support import sample_messages

SGD = SparseOptimizer(kind="sgd", lr=0.1)
RECORD_BYTES = (64, 128)
PAYLOAD = RingRef(position=0, nbytes=4096, end=8192)


def groups() -> tuple[GroupSpec, ...]:
    return tuple(
        GroupSpec(
            index=index,
            name=f"fp32_d{nbytes // 4}_sgd",
            tables=(),
            embedding_dim=nbytes // 4,
            optimizer=SGD,
            parts=record_parts(SGD, "fp32", nbytes // 4)[0],
            record_bytes=nbytes,
            feature_positions=(index,),
        )
        for index, nbytes in enumerate(RECORD_BYTES)
    )


def step_plan(
    kind: str = "train", num_lookups: int = 20, num_unique: int = 10, num_fetch: int = 4, num_evict: int = 3
) -> StepPlan:
    slots = np.arange(num_lookups, dtype=np.int32) % num_unique
    group = GroupPlan(
        **lookup_arrays(slots, slots).named(),
        fetch_slots=np.zeros(num_fetch, np.int32),
        fetch_keys=np.zeros(num_fetch, np.int64),
        evict_keys=np.zeros(num_evict, np.int64),
        num_dirty=2,
        fill_after=None,
        load_keys=np.zeros(0, np.int64),
        spill_keys=np.zeros(0, np.int64),
    )
    return StepPlan(
        step=0,
        kind="train" if kind == "train" else "eval",
        train_step=0,
        epoch=0,
        batch_size=1,
        groups=(group, group),
    )


def header(plan: StepPlan, batch_size: int) -> StepHeader:
    """The same plan as the trainer sees it."""
    return StepHeader(
        step=0,
        kind=plan.kind,
        train_step=0,
        epoch=0,
        batch_size=batch_size,
        groups=group_headers(plan),
        arrays=(),
        arrays_bytes=0,
    )


def spans(rows: tuple[int, int]) -> tuple[RowSpan, ...]:
    return tuple(RowSpan(group=group, start=0, count=count, offset=0) for group, count in enumerate(rows))


def plan_ready(rows: tuple[int, int], arrays_bytes: int) -> PlanReady:
    """A piece with these rows of each group; its payload is larger than they are, as padding makes it."""
    arrays = ArraySpan(offset=0, nbytes=arrays_bytes)
    return replace(sample_messages.plan_ready(0), steps=(), payload=PAYLOAD, arrays=arrays, rows=spans(rows))


def rows_back(rows: tuple[int, int], barrier: int | None = None) -> RowsBack:
    return replace(sample_messages.rows_back(0), barrier=barrier, payload=PAYLOAD, rows=spans(rows))


def flush(nbytes: int) -> Flush:
    whole = sample_messages.flush(0, 1, num_dirty=(1, 2))
    return replace(whole, arrays_bytes=nbytes, payload=PAYLOAD, span=ArraySpan(offset=0, nbytes=nbytes))


def trained(counters: TrainerCounters, kind: str, batch_size: int, loss: float | None) -> None:
    """Counts a plan of one step."""
    seen = header(step_plan(kind), batch_size)
    counters.step_done(seen, loss)
    counters.plan_done(seen, [seen])


def run_of_three_steps() -> tuple[PrefetcherCounters, TrainerCounters]:
    """Two training steps of 32 samples and an evaluation step of 16, then a barrier, counted by both processes."""
    prefetcher, trainer = new_prefetcher_counters(groups()), new_trainer_counters(groups())
    for kind, batch_size, loss in (("train", 32, 0.7), ("train", 32, 0.5), ("eval", 16, None)):
        prefetcher.planned(PlannedSteps(plan=0, after_plan=None, steps=(step_plan(kind),)), [batch_size])
        trained(trainer, kind, batch_size, loss)
    for counters in (prefetcher, trainer):
        counters.plan_ready(plan_ready((4, 4), arrays_bytes=1000))
        counters.rows_back(rows_back((2, 1)))
        counters.flush(flush(24))
        counters.rows_back(rows_back((1, 2), barrier=0))
    return prefetcher, trainer


def prefetcher_gauges() -> PrefetcherGauges:
    return PrefetcherGauges(
        queue_depths={"batches": 5, "plans": 2, "pieces": 1, "rows_back": 0},
        ring_used_bytes=4096,
        ring_size_bytes=2**20,
        depth_plans=4,
        checkpoint_every_steps=100,
        checkpoint_every_seconds=60.0,
        in_flight_plans=3,
        horizon_batches=64,
        known_batches=61,
        slots=[SlotStates(1, 2, 3), SlotStates(4, 5, 6)],
        write_back_lag_plans=2,
        shared_memory_size_bytes=2**30,
        shared_memory_free_bytes=2**29,
        data_waiting_files=2,
        data_delay_seconds=1.5,
        stores=[store_counts(), None],
    )


def store_counts() -> StoreCounts:
    """Every number differs."""
    return StoreCounts(**{field.name: number for number, field in enumerate(fields(StoreCounts), start=1)})


def prefetcher_collector(counters: PrefetcherCounters, health: Health | None = None) -> PrefetcherCollector:
    return PrefetcherCollector(counters, prefetcher_gauges, build_info("prefetcher", "retail"), health or Health())


def trainer_gauges() -> TrainerGauges:
    return TrainerGauges(
        train_step=102,
        learning_rates={"sparse": 0.05, "dense": 0.01},
        expected_train_steps=200,
        evaluation=Evaluation(
            train_step=102,
            auc=0.75,
            logloss=0.5,
            accuracy=0.875,
            normalized_entropy=0.75,
            ranking={"ndcg@10": 0.25},
            means={"calibration": 1.25, "nobody": None},
            tasks=(TaskEvaluation(label="buy", num_labels=7, auc=0.625, logloss=0.25),),
        ),
        queue_depths={"steps": 2, "rows_back": 1},
        ring_used_bytes=2048,
        ring_size_bytes=2**20,
    )


def trainer_collector(counters: TrainerCounters) -> TrainerCollector:
    return TrainerCollector(counters, trainer_gauges, build_info("trainer", "retail"), Health())


def facts(
    *,
    evaluation: Evaluation | None = None,
    finished: bool = True,
    stopped_by: str | None = None,
    train_steps: int = 2,
    tier: TierTotals | None = None,
    data_delay: DataDelay | None = None,
) -> dict[str, Any]:
    return {
        "train_steps": train_steps,
        "skipped_steps": 0,
        "wall_s": 4.0,
        "startup_s": 0.5,
        "table_bytes": 2**34,
        "cache_bytes": 2**19,
        "loss": 0.6,
        "first_loss": 0.7,
        "evaluations": () if evaluation is None else (evaluation,),
        "staging_bytes": 2**20,
        "plans_bytes": 2**19,
        "device_bytes": 3 * 2**20,
        "host_bytes": 5 * 2**30,
        "prefetcher_waits_s": {"credit": 1.5, "store": 0.25},
        "tier": tier,
        "row_copies": sample_messages.row_copies(),
        "data_delay": data_delay,
        "threads": 2,
        "pinned": False,
        "device": "cpu",
        "versions": versions("torch", "numpy"),
        "pids": {"prefetcher": 11, "trainer": 12},
        "finished": finished,
        "stopped_by": stopped_by,
        "ended_early": "",
    }
