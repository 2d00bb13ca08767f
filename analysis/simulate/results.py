"""Defines the result of each simulated setting. Names are those of report.json."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rowcast.analysis.scan.steps import Scan
from rowcast.analysis.simulate.grid import Setting
from rowcast.analysis.simulate.moves import Moves, TierMoves
from rowcast.job.schema import Horizon, Job
from rowcast.job.stores import StoreWithTier
from rowcast.prefetcher.planner.planner import Slots
from rowcast.runtime.arrays import I64


class StepArrays(msgspec.Struct, frozen=True, kw_only=True):
    step: list[int]
    kind: list[str]  # train | eval
    rows_fetched: list[int]
    rows_evicted: list[int]
    rows_written_back: list[int]  # dirty victims
    # what the memory tier does; None if the store has no tier
    rows_entered: list[int] | None = None
    rows_from_cold: list[int] | None = None
    rows_left: list[int] | None = None


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one setting. `skipped`: why it cannot run; all counts are then None."""

    policy: str
    capacity: str | int  # as requested
    capacity_rows: int | None = None  # slots of all groups
    horizon: Horizon | None  # None: the policy looks at no future, or at all of it
    batch_size: int
    shuffle: str
    skipped: str | None = None
    steps: int | None = None  # training steps
    eval_steps: int | None = None
    lookups: int | None = None
    unique_rows: int | None = None
    rows_fetched: int | None = None
    rows_evicted: int | None = None
    rows_written_back: int | None = None  # dirty victims and flushed rows
    rows_flushed: int | None = None  # by the barrier at the end
    bytes_fetched: int | None = None  # row records
    bytes_written_back: int | None = None
    hit_ratio: float | None = None  # 1 - rows_fetched / unique_rows; None without look-ups
    bound_rows_fetched: int | None = None  # with the whole future known
    ratio_to_bound: float | None = None
    memory: str | int | None = None  # store.memory, as requested; None here and below: the store has no memory tier
    memory_rows: int | None = None  # slots of the tier, of all groups
    rows_entered: int | None = None  # the tier
    rows_from_cold: int | None = None  # how many of these the cold tier gives; the others were never trained
    rows_left: int | None = None  # the tier
    bytes_from_cold: int | None = None  # row records
    bound_rows_from_cold: int | None = None  # with the whole future known
    cold_ratio_to_bound: float | None = None
    per_step: StepArrays | None = None


def make_result(
    scan: Scan,
    setting: Setting,
    slots: Sequence[Slots],
    moves: Moves,
    bound: Moves,
    *,
    per_step: bool,
) -> Simulation:
    """`slots`: of each level, from the device down."""
    bound_rows, record_bytes = int(bound.fetched.sum()), np.array([group.record_bytes for group in scan.groups])
    written_back = moves.written_back.sum(axis=0) + moves.flushed
    fetched, unique_rows = moves.fetched.sum(axis=0), scan.unique_rows
    rows_fetched = int(fetched.sum())
    return msgspec.structs.replace(
        outline(setting),
        capacity_rows=sum(slots[0]),
        steps=scan.num_train,
        eval_steps=len(scan) - scan.num_train,
        lookups=scan.num_lookups,
        unique_rows=unique_rows,
        rows_fetched=rows_fetched,
        rows_evicted=int(moves.evicted.sum()),
        rows_written_back=int(written_back.sum()),
        rows_flushed=int(moves.flushed.sum()),
        bytes_fetched=int(fetched @ record_bytes),
        bytes_written_back=int(written_back @ record_bytes),
        hit_ratio=1 - rows_fetched / unique_rows if unique_rows else None,
        bound_rows_fetched=bound_rows,
        ratio_to_bound=rows_fetched / bound_rows if bound_rows else None,
        per_step=step_arrays(scan, moves) if per_step else None,
        **tier_counts(setting.job, slots, moves.tier, bound.tier, record_bytes),
    )


def tier_counts(
    job: Job, slots: Sequence[Slots], tier: TierMoves | None, least: TierMoves | None, record_bytes: I64
) -> dict[str, Any]:
    if tier is None or least is None or not isinstance(job.store, StoreWithTier):
        return {}
    from_cold, bound_rows = tier.from_cold.sum(axis=0), int(least.from_cold.sum())
    return {
        "memory": job.store.memory,
        "memory_rows": sum(slots[1]),
        "rows_entered": int(tier.entered.sum()),
        "rows_from_cold": int(from_cold.sum()),
        "rows_left": int(tier.left.sum()),
        "bytes_from_cold": int(from_cold @ record_bytes),
        "bound_rows_from_cold": bound_rows,
        "cold_ratio_to_bound": int(from_cold.sum()) / bound_rows if bound_rows else None,
    }


def step_arrays(scan: Scan, moves: Moves) -> StepArrays:
    return StepArrays(
        step=[step.scheduled.step for step in scan.steps],
        kind=[step.scheduled.kind for step in scan.steps],
        rows_fetched=moves.fetched.sum(axis=1).tolist(),
        rows_evicted=moves.evicted.sum(axis=1).tolist(),
        rows_written_back=moves.written_back.sum(axis=1).tolist(),
        **({} if moves.tier is None else tier_arrays(moves.tier)),
    )


def tier_arrays(tier: TierMoves) -> dict[str, list[int]]:
    counts = {"rows_entered": tier.entered, "rows_from_cold": tier.from_cold, "rows_left": tier.left}
    return {name: values.sum(axis=1).tolist() for name, values in counts.items()}


def outline(setting: Setting, skipped: str | None = None) -> Simulation:
    job = setting.job
    return Simulation(
        policy=setting.policy,
        capacity=job.cache.capacity,
        horizon=setting.horizon,
        batch_size=job.data.batch_size,
        shuffle=job.data.shuffle,
        skipped=skipped,
    )


def batches_of(result: Simulation) -> str:
    return f"{result.batch_size:,}" + ("" if result.shuffle == "none" else f", shuffle {result.shuffle}")
