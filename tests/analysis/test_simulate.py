"""A simulation says step by step what a run of the same job does; settings that cannot run are results that say why."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from rowcast.analysis.scan import scan
from rowcast.analysis.simulate.command import require_one
from rowcast.analysis.simulate.moves import TierMoves, planned_moves
from rowcast.analysis.simulate.simulate import Grid, Simulation, StepArrays, simulate
from rowcast.analysis.simulate.simulate import settings as settings_of_grid
from rowcast.job.file import with_values
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.first_batches import measure, slots_of
from rowcast.prefetcher.planner.planner import job_planner
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.prefetcher.stores.store import StoreCounts
from rowcast.prefetcher.stores.tiered_store import TieredStore
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import GroupPlan
from rowcast.runtime.errors import ConfigError
from rowcast.trainer.report.report_json import read_report
from tests.support.batches import BAGS, Bags, distinct_rows, small_batches, small_job
from tests.support.driver import InProcessRun, Settings
from tests.support.facts import facts
from tests.support.processes import Session

EVERYTHING = 2**30


def least_bytes(job: Job, batches: Sequence[ScheduledBatch]) -> int:
    """A capacity that just holds every batch."""
    return sum(
        group.record_bytes * max(distinct_rows(group, scheduled.batch) for scheduled in batches)
        for group in group_specs(job)
    )


def workload(
    bags: Bags, *, share: float = 1.2, depth: int = 2, horizon: int = 6, **sections: Any
) -> tuple[Job, list[ScheduledBatch]]:
    """`share`: the capacity, in least ones. `sections` are laid over the job's."""
    job = small_job("adagrad", bags, depth=depth, horizon=horizon)
    batches = small_batches(job, bags, num_steps=20, eval_at=(3, 4, 11))
    cache = {"capacity": int(share * least_bytes(job, batches)), **sections.pop("cache", {})}
    return with_values(job, {"cache": cache, **sections}), batches


def simulated(job: Job, batches: Iterable[ScheduledBatch], grid: Grid | None = None) -> list[Simulation]:
    return simulate(job, grid or Grid(), lambda _: batches, per_step=True)


def arrays(result: Simulation) -> StepArrays:
    assert result.per_step is not None, result.skipped
    return result.per_step


WAYS: list[dict[str, Any]] = [
    {"share": 1.05, "depth": 1, "horizon": 0},
    {"share": 1.05, "depth": 4, "horizon": 2},
    {"share": 1.3, "depth": 2, "horizon": 8},
    {"share": 50},
    {"lookahead": {"horizon": "auto", "id_bytes": "40KB"}},
    {"checkpoint": {"every": 3}},
    {"cache": {"policy": "lru"}, "checkpoint": {"every": 7}},
    {"cache": {"policy": "lru"}},
    {"cache": {"policy": "lfu"}},
    {"cache": {"policy": "static"}},
    {"share": 2.5, "cache": {"groups": {"fp32_d5_adagrad": "400 rows"}}},
]


@pytest.mark.parametrize("bags", BAGS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_step_moves_what_a_run_moves(bags: Bags, way: dict[str, Any]) -> None:
    job, batches = workload(bags, **way)
    slots = slots_of(job, group_specs(job), measure(group_specs(job), batches[:32]))
    run = InProcessRun(job, batches, Settings(slots=slots, seed=1, seeded_streams=False)).run()
    (result,) = simulated(job, batches)
    steps, totals = arrays(result), run.trainer.counters.total
    assert steps.step == [plan.step for plan in run.plans]
    assert steps.kind == [plan.kind for plan in run.plans]
    assert steps.rows_fetched == [sum(len(group.fetch_keys) for group in plan.groups) for plan in run.plans]
    assert steps.rows_evicted == [sum(len(group.evict_keys) for group in plan.groups) for plan in run.plans]
    assert steps.rows_written_back == [sum(group.num_dirty for group in plan.groups) for plan in run.plans]
    assert (result.steps, result.eval_steps) == (20, 3)
    assert result.capacity_rows == sum(slots)
    for name in ("lookups", "unique_rows", "rows_fetched", "rows_evicted", "rows_written_back", "rows_flushed"):
        assert getattr(result, name) == totals(name), name
    assert result.bytes_fetched == totals("row_bytes_to_device")
    assert result.bytes_written_back == totals("row_bytes_from_device")
    assert result.hit_ratio == pytest.approx(totals("hits") / totals("unique_rows"))
    assert (result.rows_evicted or 0) > 100 or way == {"share": 50}, "the cache is so large that nothing leaves"


TIERS: list[dict[str, Any]] = [
    {"share": 1.1, "horizon": 6},
    {"share": 1.1, "depth": 1, "horizon": 2},
    {"share": 1.3, "lookahead": {"horizon": "auto", "id_bytes": "40KB"}},
    {"share": 1.1, "checkpoint": {"every": 3}},
]


@pytest.fixture
def staged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a disk that is fast: no row is late."""
    stage = TieredStore.stage

    def at_once(store: TieredStore, step: int, plan: GroupPlan) -> None:
        stage(store, step, plan)
        while store.advance(None):
            pass

    monkeypatch.setattr(TieredStore, "stage", at_once)


def tier_of_run(
    job: Job, batches: list[ScheduledBatch], factor: float, seed: int
) -> tuple[TierMoves, InProcessRun, list[StoreCounts]]:
    """What is simulated with a tier of `factor` times the device's slots, a run with it, and its stores' counts."""
    groups = group_specs(job)
    slots = slots_of(job, groups, measure(groups, batches[:32]))
    tier = tuple(int(factor * n) for n in slots)
    settings = Settings(slots=slots, tier_slots=tier, tier_reserve=2000, seed=seed, seeded_streams=False)
    run = InProcessRun(job, batches, settings).run()
    (setting,) = settings_of_grid(job, Grid())
    planner = job_planner(setting.job, groups, [slots, tier], batches[:32])
    moved = planned_moves(scan(groups, batches, lambda: None), planner, lambda: None).tier
    counts = [store.counts() for store in run.plain_stores]
    assert moved is not None
    return moved, run, [own for own in counts if own is not None]


@pytest.mark.usefixtures("staged_at_once")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way", TIERS, ids=str)
def test_at_every_step_the_rows_enter_and_leave_memory_that_do_in_a_run(way: dict[str, Any], seed: int) -> None:
    moved, run, counts = tier_of_run(*workload("single", **way), 1.4, seed)
    assert moved.entered.tolist() == [[len(group.load_keys) for group in plan.groups] for plan in run.plans]
    assert moved.left.tolist() == [[len(group.spill_keys) for group in plan.groups] for plan in run.plans]
    assert (moved.left.sum(axis=0) > 100).all(), "hardly a row leaves"
    # a row that comes back before it has left is not read again, however often the plans say so
    for group, own in enumerate(counts):
        entered, from_cold = (int(values[:, group].sum()) for values in (moved.entered, moved.from_cold))
        kept = entered - own.loaded - own.untouched_loaded
        assert own.late == 0
        assert own.loaded <= from_cold <= own.loaded + kept


@pytest.mark.usefixtures("staged_at_once")
@pytest.mark.parametrize("seed", range(2))
def test_where_rows_come_back_late_a_run_reads_as_many_from_the_cold_tier(seed: int) -> None:
    job, first = workload("single", share=1.05, depth=1, horizon=40)
    again = [
        ScheduledBatch.at(step=step, kind="train", train_step=step, epoch=0, batch=first[place].batch)
        for step, place in enumerate(place for _ in range(3) for place in range(20))
    ]
    moved, _, counts = tier_of_run(job, again, 3.0, seed)
    from_cold, entered = moved.from_cold.sum(axis=0), moved.entered.sum(axis=0)
    assert (from_cold > 100).all()
    for own, cold, both in zip(counts, from_cold.tolist(), entered.tolist(), strict=True):
        assert (own.untouched_loaded, own.late) == (both - cold, 0)
        assert 0.99 * cold <= own.loaded <= cold  # one or two rows come back before they have left


ORDERS = ("none", "window:500", "full")


def test_the_command_agrees_with_the_report_of_two_processes(session: Session) -> None:
    shuffle = "window:500"  # the orders are compared in one process below
    data = {"epochs": 2, "eval_fraction": 0.1, "shuffle": shuffle, "synthetic": {"samples": 64 * 40 + 13}}
    session.write_job(
        data=data,
        eval={"every": 15},
        cache={"capacity": "20KiB"},
        checkpoint={"every": 9},
        lookahead={"depth": 3, "horizon": 8},
    )
    prefetcher, trainer = session.start_both()
    trainer.ended().quiet()
    prefetcher.ended().quiet()
    report = msgspec.to_builtins(read_report(session.run_dir / "report.json"))
    plain = session.start("simulate", "--json").ended().quiet()
    orders = session.start("simulate", "--json", *(f"--shuffle={order}" for order in ORDERS)).ended().quiet()
    (result,) = msgspec.json.decode(plain.stdout)["results"]
    assert result["shuffle"] == shuffle
    each = {own["shuffle"]: own for own in msgspec.json.decode(orders.stdout)["results"]}
    assert list(each) == list(ORDERS)
    assert each[shuffle] == result
    assert len({(own["unique_rows"], own["rows_fetched"]) for own in each.values()}) == 3, "the order changes nothing"
    for name in (
        "steps",
        "eval_steps",
        "lookups",
        "unique_rows",
        "rows_fetched",
        "rows_evicted",
        "rows_written_back",
        "rows_flushed",
    ):
        assert result[name] == report[name], name
    assert result["rows_evicted"] > 0
    assert result["hit_ratio"] == pytest.approx(report["hit_ratio"])
    assert result["bytes_written_back"] == report["bytes_from_device"]


def test_the_grid_is_every_combination_and_horizons_below_the_depth_are_raised() -> None:
    job, batches = workload("multi", depth=3)
    grid = Grid(
        policies=("lru", "lookahead", "belady"), capacities=(f"{EVERYTHING}", "3MB"), horizons=(0, 3, 7, "auto")
    )
    found = [(result.capacity, result.policy, result.horizon) for result in simulated(job, batches, grid)]
    each = [("lru", None), ("lookahead", 3), ("lookahead", 7), ("lookahead", "auto"), ("belady", None)]
    assert found == [(capacity, policy, horizon) for capacity in (f"{EVERYTHING}", "3MB") for policy, horizon in each]


@pytest.mark.parametrize("shuffle", ORDERS)
def test_every_step_in_every_order_moves_what_a_run_in_it_moves(shuffle: str) -> None:
    """The batches of both come from the readers."""
    job = small_job(
        "adagrad", data={"format": "synthetic", "synthetic": {"samples": 64 * 30}, "epochs": 2, "shuffle": shuffle}
    )
    job = with_values(job, {"cache": {"capacity": "60KB"}})
    batches = list(schedule(job, open_reader(job)))
    slots = slots_of(job, group_specs(job), measure(group_specs(job), batches[:32]))
    run = InProcessRun(job, batches, Settings(slots=slots, seed=1, seeded_streams=False)).run()
    results = simulate(job, Grid(shuffles=ORDERS), lambda own: schedule(own, open_reader(own)), per_step=True)
    assert [result.shuffle for result in results] == list(ORDERS)
    steps = arrays(results[ORDERS.index(shuffle)])
    assert steps.rows_fetched == [sum(len(group.fetch_keys) for group in plan.groups) for plan in run.plans]
    assert steps.rows_written_back == [sum(group.num_dirty for group in plan.groups) for plan in run.plans]
    assert sum(steps.rows_evicted) > 100
    assert len({tuple(arrays(result).rows_fetched) for result in results}) == 3


def test_each_order_is_read_with_each_batch_size_and_compared_with_its_own_bound() -> None:
    job, batches = workload("single")
    asked = []

    def open_batches(own: Job) -> list[ScheduledBatch]:
        asked.append((own.data.batch_size, own.data.shuffle))
        return batches[: len(asked) * 5]

    data = msgspec.structs.replace(job.data, format="synthetic")
    results = simulate(
        msgspec.structs.replace(job, data=data),
        Grid(batch_sizes=(5, 12), shuffles=("none", "full", "none")),
        open_batches,
    )
    assert asked == [(5, "none"), (5, "full"), (12, "none"), (12, "full")]
    assert [(result.batch_size, result.shuffle) for result in results] == asked
    assert len({result.bound_rows_fetched for result in results}) == 4


OTHERS = "criteo-tsv and criteo-npy and csv and jsonl and arrow and synthetic can"


@pytest.mark.parametrize(
    ("format", "shuffle", "sentence"),
    [
        (
            "parquet",
            "full",
            f"--shuffle full: parquet cannot be read in this order; {OTHERS}, or use window:65536",
        ),
        *(
            (
                "synthetic",
                order,
                f"--shuffle {order} is not one of none, full, window:ROWS",
            )
            for order in ("random", "window:0", "full+hot-blocks:3")
        ),
        (
            "my_data:batches",
            "none",
            "--shuffle none: batches of my_data:batches have a fixed order; omit --shuffle",
        ),
    ],
)
def test_an_order_that_the_data_cannot_have_is_refused_before_it_is_read(
    format: str, shuffle: str, sentence: str
) -> None:
    job, _ = workload("single")
    job = msgspec.structs.replace(job, data=msgspec.structs.replace(job.data, format=format, path="nowhere"))
    with pytest.raises(ConfigError) as refused:
        simulate(
            job, Grid(shuffles=("window:5", shuffle)) if format == "synthetic" else Grid(shuffles=(shuffle,)), unread
        )
    assert str(refused.value) == sentence


def unread(own: Job) -> list[ScheduledBatch]:
    raise AssertionError(f"{own.data.format} was read")


def test_every_result_is_held_against_the_bound_of_its_capacity() -> None:
    job, batches = workload("multi", horizon=2)
    capacities = [str(int(share * least_bytes(job, batches))) for share in (1.05, 1.5)]
    policies = ("belady", "lookahead", "lru", "lfu", "static")
    results = simulated(job, batches, Grid(policies=policies, capacities=capacities))
    assert len(results) == 10
    for bound, *others in (results[:5], results[5:]):
        assert bound.ratio_to_bound == 1
        assert {other.bound_rows_fetched for other in others} == {bound.rows_fetched}
        ratios = [other.ratio_to_bound or 0 for other in others]
        assert min(ratios) >= 1
        assert all(ratio > 1 for ratio in ratios[1:]), "only look-ahead can be as good"
    assert results[0].rows_fetched != results[5].rows_fetched


def test_a_horizon_of_all_batches_is_the_bound() -> None:
    job, batches = workload("multi", horizon=23)
    ahead, bound = simulated(job, batches, Grid(policies=("lookahead", "belady")))
    assert arrays(ahead) == arrays(bound)


def test_a_capacity_below_the_first_batches_is_a_result_that_says_so() -> None:
    job, batches = workload("multi")
    small, fits = simulated(job, batches, Grid(capacities=("2KB", str(job.cache.capacity)), policies=("lru", "lfu")))[
        1:3
    ]
    assert (small.policy, small.capacity, small.capacity_rows, small.rows_fetched) == ("lfu", "2KB", None, None)
    assert small.skipped is not None
    assert "a batch among the first 32 touches" in small.skipped
    assert fits.skipped is None


def test_a_later_batch_that_does_not_fit_skips_its_capacity_alone() -> None:
    job, batches = workload("multi")
    early = [scheduled for scheduled in batches if scheduled.batch.size > 30]
    late = small_batches(job, "multi", num_steps=60, eval_at=(), seed=9)[:59]
    grown = [
        ScheduledBatch.at(step=step, kind="train", train_step=step, epoch=0, batch=scheduled.batch)
        for step, scheduled in enumerate([*early[:1] * 40, *late])
    ]
    tight = str(least_bytes(job, early[:1]))
    results = simulated(job, grown, Grid(capacities=(tight, "1GiB"), policies=("lookahead", "lru", "lfu", "belady")))
    sentences = {result.skipped for result in results[:4]}
    assert len(sentences) == 1
    (sentence,) = sentences
    assert sentence is not None
    assert sentence.startswith("step 4"), sentence
    assert "distinct rows of group" in sentence
    assert all(result.skipped is None for result in results[4:])


def test_nothing_feasible_is_an_error_with_the_first_sentence() -> None:
    job, batches = workload("multi")
    results = simulated(job, batches, Grid(capacities=("2KB", "3KB")))
    with pytest.raises(ConfigError, match=facts("nothing could be simulated", 2000, 3000)):
        require_one([result.skipped for result in results])


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [
        ({"policies": ("fifo",)}, "--policy fifo is none of lookahead, lru"),
        ({"capacities": ("64 apples",)}, "is not a size"),
        ({"horizons": (2**21,)}, "horizon = 2_097_152"),
        ({"batch_sizes": (0,)}, "batch_size = 0"),
    ],
)
def test_values_that_no_job_can_have_are_refused(grid: dict[str, tuple[str | int, ...]], sentence: str) -> None:
    job, batches = workload("single")
    with pytest.raises(ConfigError, match=sentence):
        simulated(job, batches, Grid(**grid))  # type: ignore[arg-type]


def test_tables_of_any_size_cost_nothing() -> None:
    """No array grows with the tables: a million million rows are simulated like a hundred."""
    job, batches = workload("multi")
    huge = msgspec.structs.replace(
        job, tables=[msgspec.structs.replace(table, num_embeddings=2**40) for table in job.tables]
    )
    (small,), (large,) = simulated(job, batches), simulated(huge, batches)
    assert arrays(small) == arrays(large)


def test_an_empty_run_moves_nothing() -> None:
    job, _ = workload("single")
    for result in simulated(job, [], Grid(policies=("lookahead", "lru", "lfu", "belady"))):
        assert (result.steps, result.rows_fetched, result.hit_ratio, result.ratio_to_bound) == (0, 0, None, None)


def test_per_step_rows_add_up_to_the_totals() -> None:
    job, batches = workload("multi")
    for result in simulated(job, batches, Grid(policies=("lookahead", "lru", "lfu", "static"))):
        steps = arrays(result)
        assert np.sum(steps.rows_fetched) == result.rows_fetched
        assert np.sum(steps.rows_evicted) == result.rows_evicted
        assert np.sum(steps.rows_written_back) + (result.rows_flushed or 0) == result.rows_written_back
