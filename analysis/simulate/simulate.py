"""`rowcast simulate`: counts the rows that a run would move with other policies, capacities, horizons, batch sizes
and orders, before it is trained.

    data set --batches--> scan: the distinct rows of each step      once a batch size and order
                            |
                            +--> belady: the bound                once a capacity
                            +--> each policy and horizon

It runs the planner of training over the schedule of training, with slots divided as in training. So its counts of each
step are those that a run would report, if a run can have the policy.

Defines the result of each simulated setting. Names are those of report.json.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import msgspec
import numpy as np

from rowcast.analysis.scan.steps import Scan, scan
from rowcast.analysis.show import AnalysisProgress
from rowcast.analysis.simulate.grid import BOUND, WITH_TIER, Grid, Setting, batches_jobs, capacity_jobs, settings
from rowcast.analysis.simulate.moves import (
    Moves,
    TierMoves,
    bound_planner,
    new_planner,
    planned_moves,
    ttl_moves,
    window_moves,
)
from rowcast.job.schema import Horizon, Job
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.capacity import MEASURED_BATCHES, measure, slots_of
from rowcast.prefetcher.planner.planner import Slots
from rowcast.prefetcher.run.sizing import job_levels, sizes
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError


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


OpenBatches = Callable[[Job], Iterable[ScheduledBatch]]


def simulate(
    job: Job,
    grid: Grid,
    open_batches: OpenBatches,
    *,
    progress: AnalysisProgress | None = None,
    per_step: bool = False,
) -> list[Simulation]:
    """Returns a result for each setting, ordered by batch size, order and capacity; policies and horizons are in the
    given order.

    `open_batches` returns the batches of a run of a job, from its first step. A setting that cannot run becomes a
    result that says why. Raises ConfigError for values that no job can have, and what reading the data raises."""
    shown = progress or AnalysisProgress()
    return [
        result
        for own in batches_jobs(job, grid)
        for result in simulated(own, grid, open_batches(own), shown, per_step=per_step)
    ]


def simulated(
    job: Job, grid: Grid, batches: Iterable[ScheduledBatch], progress: AnalysisProgress, *, per_step: bool
) -> Iterator[Simulation]:
    groups, left = group_specs(job), iter(batches)
    measured = list(islice(left, MEASURED_BATCHES))
    scanned: Scan | None = None
    for own, of_own in settings_of_jobs(job, grid):
        try:
            touched, rings = measure(groups, measured), partial(sizes, own, groups, measured, own.lookahead.depth)
            levels = job_levels(own, groups, touched, slots_of(own, groups, touched), rings)
            if scanned is None:
                scanned = scan(groups, chain(measured, left), progress.begin("reading the data", None))
            bound = moved(scanned, bound_setting(of_own[0].job), levels, measured, progress)
        except ConfigError as error:
            yield from (outline(setting, str(error)) for setting in of_own)
            continue
        for setting in of_own:
            slots = levels if setting.policy in WITH_TIER else levels[:1]
            try:
                moves = bound if setting.policy == BOUND else moved(scanned, setting, slots, measured, progress)
            except ConfigError as error:
                yield outline(setting, str(error))
            else:
                yield make_result(scanned, setting, slots, moves, bound, per_step=per_step)


def moved(
    scanned: Scan,
    setting: Setting,
    slots: Sequence[Slots],
    measured: Sequence[ScheduledBatch],
    progress: AnalysisProgress,
) -> Moves:
    """`slots`: of each level, from the device down. Raises ConfigError if a step does not fit."""
    tick = progress.begin(description(setting), len(scanned))
    match setting.policy:
        case "window":
            return window_moves(scanned, slots[0], setting.horizon_batches, setting.job.job.seed, tick)
        case "ttl":
            return ttl_moves(scanned, slots[0], setting.horizon_batches, tick)
        case "belady":
            return planned_moves(scanned, bound_planner(scanned, slots), tick)
    return planned_moves(scanned, new_planner(setting, scanned.groups, slots, measured), tick)


def settings_of_jobs(job: Job, grid: Grid) -> Iterator[tuple[Job, list[Setting]]]:
    """Yields the settings of each capacity and memory tier. A policy without a tier has one setting per capacity."""
    simulated = set[str | int]()
    for own in capacity_jobs(job, grid):
        again = own.cache.capacity in simulated
        found = [setting for setting in settings(own, grid) if setting.policy in WITH_TIER or not again]
        simulated.add(own.cache.capacity)
        if found:
            yield own, found


def bound_setting(job: Job) -> Setting:
    return Setting(policy=BOUND, horizon=None, job=job)


def description(setting: Setting) -> str:
    """`lookahead, horizon 64, capacity 70000 rows, batches of 2048`."""
    horizon = "" if setting.horizon is None else f", horizon {setting.horizon}"
    data = setting.job.data
    order = "" if data.shuffle == "none" else f", shuffle {data.shuffle}"
    store = setting.job.store
    tier = f", memory {store.memory}" if isinstance(store, StoreWithTier) else ""
    return (
        f"{setting.policy}{horizon}, capacity {setting.job.cache.capacity}{tier}, batches of {data.batch_size}{order}"
    )
