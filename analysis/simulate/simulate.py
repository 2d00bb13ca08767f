"""`rowcast simulate`: counts the rows that a run would move with other policies, capacities, horizons, batch sizes
and orders, before it is trained.

    data set --batches--> scan: the distinct rows of each step      once a batch size and order
                            |
                            +--> belady: the bound                once a capacity
                            +--> each policy and horizon

It runs the planner of training over the schedule of training, with slots divided as in training. So its counts of each
step are those that a run would report, if a run can have the policy.

A setting is a policy, capacity, memory tier, horizon, batch size and order, with the values of a run of the job. Its
result has the names of report.json.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, product
from typing import Any

import msgspec
import numpy as np

from rowcast.analysis.scan import Scan, scan
from rowcast.analysis.show import AnalysisProgress
from rowcast.analysis.simulate.moves import Moves, TierMoves, bound_planner, planned_moves
from rowcast.job.file import parse_job, with_values
from rowcast.job.formats import FORMATS, Data
from rowcast.job.schema import EVICTION_POLICIES, Horizon, Job
from rowcast.job.stores import StoreWithTier
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.planner.first_batches import MEASURED_BATCHES, measure, slots_of
from rowcast.prefetcher.planner.planner import Slots, job_planner
from rowcast.prefetcher.run.sizing import job_levels, sizes
from rowcast.protocol.batch import Kind, ScheduledBatch
from rowcast.runtime.arrays import I64
from rowcast.runtime.errors import ConfigError

BOUND = "belady"
POLICIES = (*EVICTION_POLICIES, BOUND)
WITH_TIER = ("lookahead", BOUND)  # the others are simulated only for the device
# the others know no future, or all of it
LOOKING_AHEAD = tuple(name for name, policy in EVICTION_POLICIES.items() if policy.looks_ahead)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Values to vary; an empty list means the job's own value."""

    policies: Sequence[str] = ()
    capacities: Sequence[str | int] = ()  # as in cache.capacity
    memories: Sequence[str | int] = ()  # as in store.memory; a store without a memory tier is then simulated as tiered
    horizons: Sequence[Horizon] = ()
    batch_sizes: Sequence[int] = ()
    shuffles: Sequence[str] = ()  # as in data.shuffle

    def __post_init__(self) -> None:
        for policy in self.policies:
            if policy not in POLICIES:
                raise ConfigError(f"--policy {policy} is none of {', '.join(POLICIES)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One run to simulate: a policy, and a job with its capacity, horizon and batches, and with the policy if a run can
    have it.

    horizon: batches known beyond the one planned, at least the depth; None if the policy looks at no future, or at all
    of it."""

    policy: str
    horizon: Horizon | None
    job: Job


def batches_jobs(job: Job, grid: Grid) -> list[Job]:
    """One job per batch size and order: each reads the data differently. Raises ConfigError before anything is read."""
    for shuffle in grid.shuffles:
        check_order(job.data, shuffle)
    sizes = dict.fromkeys(grid.batch_sizes or [job.data.batch_size])
    shuffles = dict.fromkeys(grid.shuffles or [job.data.shuffle])
    return [
        with_values(job, {"data": {"batch_size": size, "shuffle": shuffle}})
        for size, shuffle in product(sizes, shuffles)
    ]


def check_order(data: Data, shuffle: str) -> None:
    """Raises ConfigError for an order in which the job's data cannot be read."""
    if data.format not in FORMATS:
        raise ConfigError(f"--shuffle {shuffle}: batches of {data.format} have a fixed order; omit --shuffle")
    able = [name for name in FORMATS if can_have(name, shuffle)]
    if not able:
        raise ConfigError(f"--shuffle {shuffle} is not one of none, full, window:ROWS")
    if data.format not in able:
        raise ConfigError(
            f"--shuffle {shuffle}: {data.format} cannot be read in this order; {' and '.join(able)} can, or use "
            "window:65536"
        )


def can_have(format: str, shuffle: str) -> bool:
    try:
        Data(format=format, path="any", shuffle=shuffle)
    except ValueError:
        return False
    return True


def with_memory(job: Job, memory: str | int) -> Job:
    kind = job.store.kind if isinstance(job.store, StoreWithTier) else "tiered"
    return with_values(job, {"store": {"kind": kind, "memory": memory}})


def without_tier(job: Job) -> Job:
    content = msgspec.to_builtins(job)
    content["store"] = {}
    return parse_job(content, "simulate")


def settings(job: Job, grid: Grid) -> list[Setting]:
    """At the job's capacity and batches. Horizons below the depth are raised to it, as in a run; duplicates are
    removed."""
    by_horizon: dict[tuple[str, Horizon | None], Setting] = {}
    tierless = without_tier(job)
    for policy, horizon in product(grid.policies or [job.cache.policy], grid.horizons or [job.lookahead.horizon]):
        trained = {"policy": policy} if policy in EVICTION_POLICIES else {}
        base = job if policy in WITH_TIER else tierless
        varied = with_values(base, {"lookahead": {"horizon": horizon}, "cache": trained})
        known = known_ahead(varied, policy)
        by_horizon.setdefault((policy, known), Setting(policy=policy, horizon=known, job=varied))
    return list(by_horizon.values())


def known_ahead(job: Job, policy: str) -> Horizon | None:
    """Batches known beyond the one planned, as in a run; None if the policy does not look at them."""
    return job.lookahead.known_ahead if policy in LOOKING_AHEAD else None


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


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one setting, of one trainer or of several. `skipped`: why it cannot run; all counts are then
    None."""

    policy: str
    capacity: str | int  # as requested, of each rank
    horizon: Horizon | None  # None if the policy looks at no future, or at all of it
    batch_size: int  # samples of all ranks together
    shuffle: str
    skipped: str | None = None
    capacity_rows: int | None = None  # slots of all groups, in the mean over ranks
    steps: int | None = None  # training steps
    eval_steps: int | None = None
    lookups: int | None = None
    rows_flushed: int | None = None  # by barriers, all ranks
    bytes_fetched: int | None = None  # row records of the whole run, all ranks
    bytes_written_back: int | None = None  # flushed rows included


class Simulation(Simulated, frozen=True, kw_only=True):
    unique_rows: int | None = None
    rows_fetched: int | None = None
    rows_evicted: int | None = None
    rows_written_back: int | None = None  # dirty victims and flushed rows
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


def job_values(job: Job) -> dict[str, Any]:
    """Returns the fields of `Simulated` that describe the setting."""
    return {
        "policy": job.cache.policy,
        "capacity": job.cache.capacity,
        "horizon": job.lookahead.horizon,
        "batch_size": job.data.batch_size,
        "shuffle": job.data.shuffle,
    }


def run_values(groups: Sequence[GroupSpec], kinds: Sequence[Kind], num_lookups: int, moves: Moves) -> dict[str, int]:
    """Returns the fields of `Simulated` that count a whole run. `kinds`: of each step."""
    record_bytes = [group.record_bytes for group in groups]
    return {
        "steps": kinds.count("train"),
        "eval_steps": kinds.count("eval"),
        "lookups": num_lookups,
        "rows_flushed": int(moves.flushed.sum()),
        "bytes_fetched": int(moves.fetched.sum(axis=0) @ record_bytes),
        "bytes_written_back": int((moves.written_back.sum(axis=0) + moves.flushed) @ record_bytes),
    }


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
    rows_fetched, unique_rows = int(moves.fetched.sum()), scan.unique_rows
    return msgspec.structs.replace(
        outline(setting),
        capacity_rows=sum(slots[0]),
        unique_rows=unique_rows,
        rows_fetched=rows_fetched,
        rows_evicted=int(moves.evicted.sum()),
        rows_written_back=int(moves.written_back.sum() + moves.flushed.sum()),
        hit_ratio=1 - rows_fetched / unique_rows if unique_rows else None,
        bound_rows_fetched=bound_rows,
        ratio_to_bound=rows_fetched / bound_rows if bound_rows else None,
        per_step=step_arrays(scan, moves) if per_step else None,
        **run_values(scan.groups, [step.scheduled.kind for step in scan.steps], scan.num_lookups, moves),
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
    tier = moves.tier
    of_tier = (
        {} if tier is None else {"rows_entered": tier.entered, "rows_from_cold": tier.from_cold, "rows_left": tier.left}
    )
    return StepArrays(
        step=[step.scheduled.step for step in scan.steps],
        kind=[step.scheduled.kind for step in scan.steps],
        rows_fetched=moves.fetched.sum(axis=1).tolist(),
        rows_evicted=moves.evicted.sum(axis=1).tolist(),
        rows_written_back=moves.written_back.sum(axis=1).tolist(),
        **{name: values.sum(axis=1).tolist() for name, values in of_tier.items()},
    )


def outline(setting: Setting, skipped: str | None = None) -> Simulation:
    values = job_values(setting.job) | {"policy": setting.policy, "horizon": setting.horizon}
    return Simulation(**values, skipped=skipped)


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
        for varied in batches_jobs(job, grid)
        for result in simulated(varied, grid, open_batches(varied), shown, per_step=per_step)
    ]


def simulated(
    job: Job, grid: Grid, batches: Iterable[ScheduledBatch], progress: AnalysisProgress, *, per_step: bool
) -> Iterator[Simulation]:
    groups, left = group_specs(job), iter(batches)
    measured = list(islice(left, MEASURED_BATCHES))
    scanned: Scan | None = None
    for varied, of_own in settings_of_jobs(job, grid):
        try:
            touched, rings = measure(groups, measured), partial(sizes, varied, groups, measured, varied.lookahead.depth)
            levels = job_levels(varied, groups, touched, slots_of(varied, groups, touched), rings)
            if scanned is None:
                scanned = scan(groups, chain(measured, left), progress.begin("reading the data", None))
            bound = moved(scanned, Setting(policy=BOUND, horizon=None, job=of_own[0].job), levels, measured, progress)
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
    if setting.policy == BOUND:
        return planned_moves(scanned, bound_planner(scanned, slots), tick)
    return planned_moves(scanned, job_planner(setting.job, scanned.groups, slots, measured), tick)


def settings_of_jobs(job: Job, grid: Grid) -> Iterator[tuple[Job, list[Setting]]]:
    """Yields the settings of each capacity and memory tier. A policy without a tier has one setting per capacity."""
    simulated = set[str | int]()
    for capacity in dict.fromkeys(grid.capacities or [job.cache.capacity]):
        base = with_values(job, {"cache": {"capacity": capacity}})
        for varied in [with_memory(base, memory) for memory in dict.fromkeys(grid.memories)] or [base]:
            again = varied.cache.capacity in simulated
            of_job = [setting for setting in settings(varied, grid) if setting.policy in WITH_TIER or not again]
            simulated.add(varied.cache.capacity)
            if of_job:
                yield varied, of_job


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
