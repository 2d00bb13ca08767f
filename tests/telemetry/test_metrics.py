from dataclasses import fields
from typing import Any, get_args

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.stores.store import StoreCounts, described
from rowcast.protocol.scrape import CountersCollector, new_registry
from rowcast.runtime.telemetry.metrics import BOTH, METRICS, Health, Process, State, build_info, families
from rowcast.trainer.step.engine import TrainerCollector, TrainerGauges
from rowcast.trainer.step.metrics import TrainerCounters
from tests.support import three_steps

ALLOWED_LABELS = {
    "group",
    "direction",
    "figure",
    "kind",
    "reason",
    "phase",
    "task",
    "queue",
    "side",
    "state",
    "optimizer",
    "tier",
    "from",
    "to",
}


def collectors() -> dict[Process, CountersCollector[Any, Any]]:
    prefetcher, trainer = three_steps.run_of_three_steps()
    return {
        "prefetcher": three_steps.prefetcher_collector(prefetcher),
        "trainer": three_steps.trainer_collector(trainer),
    }


def scrape(collector: CountersCollector[Any, Any]) -> dict[str, Family]:
    text = generate_latest(new_registry(collector)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(collector: CountersCollector[Any, Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """By name and the labels besides the rank, which is that of the collector."""
    samples = [sample for family in scrape(collector).values() for sample in family.samples]
    assert {sample.labels.pop("rank") for sample in samples} == {str(collector.rank)}
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


@pytest.mark.parametrize("process", BOTH)
def test_a_scrape_has_every_metric_of_the_table_with_its_type_labels_and_help(process: Process) -> None:
    found = scrape(collectors()[process])
    expected = {metric.name.removesuffix("_total"): metric for metric in METRICS if process in metric.processes}
    assert {name for name in found if not name.startswith("process_")} == set(expected)
    for name, metric in expected.items():
        assert found[name].type == metric.type
        assert found[name].documentation == metric.help
        assert found[name].samples, f"{metric.name} has no sample"
        for sample in found[name].samples:
            assert sample.name == metric.name
            assert set(sample.labels) == {"rank", *metric.labels}


@pytest.mark.parametrize("process", BOTH)
def test_the_metrics_of_a_rank_carry_its_number(process: Process) -> None:
    prefetcher, trainer = three_steps.run_of_three_steps()
    prefetcher.rank = trainer.rank = 3
    collector = (
        three_steps.prefetcher_collector(prefetcher)
        if process == "prefetcher"
        else three_steps.trainer_collector(trainer)
    )
    samples = [sample for family in scrape(collector).values() for sample in family.samples]
    assert {sample.labels["rank"] for sample in samples} == {"3"}
    assert {sample.name for sample in samples} >= {"rowcast_state", "process_cpu_seconds_total"}


def test_names_and_labels_keep_the_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("rowcast_")
        assert metric.name.endswith("_total") == (metric.type == "counter")
        assert metric.name == "rowcast_build_info" or set(metric.labels) <= ALLOWED_LABELS


FIRST, SECOND = ({"group": name} for name in ("fp32_d16_sgd", "fp32_d32_sgd"))
TO, FROM = ({"direction": name} for name in ("to_device", "from_device"))
COUNTS = three_steps.store_counts()
VALUES: dict[Process, list[tuple[str, dict[str, str], float]]] = {  # metric without "rowcast_", labels, value
    "trainer": [
        ("train_steps_total", {}, 2),
        ("eval_steps_total", {}, 1),
        ("samples_total", {}, 64),
        ("eval_samples_total", {}, 16),
        ("lookups_total", FIRST, 60),
        ("unique_rows_total", FIRST, 30),
        ("hits_total", FIRST, 18),
        ("rows_fetched_total", FIRST, 12),
        ("rows_evicted_total", FIRST, 9),
        ("rows_written_back_total", FIRST, 3),
        ("rows_flushed_total", FIRST, 1),
        ("rows_flushed_total", SECOND, 2),
        ("row_bytes_total", TO | SECOND, 4 * 128),
        ("row_bytes_total", FROM | FIRST, 3 * 64),
        ("plan_bytes_total", TO, 1024),
        ("loss", {}, 0.5),
        ("learning_rate", {"optimizer": "sparse"}, 0.05),
        ("stall_seconds_total", {"reason": "rows"}, 1.5),
        ("queue_blocked_seconds_total", {"queue": "steps", "side": "consumer"}, 3),
    ],
    "prefetcher": [
        ("queue_depth", {"queue": "batches"}, 5),
        ("ring_used_bytes", TO, 4096),
        ("depth_plans", {}, 4),
        ("horizon_batches", {}, 64),
        ("write_back_lag_plans", {}, 2),
        ("slots_free", SECOND, 4),
        ("slots_clean", SECOND, 5),
        ("slots_dirty", SECOND, 6),
        ("stall_seconds_total", {"reason": "credit"}, 0.75),
        ("stall_seconds_total", {"reason": "store"}, 0),
        ("phase_seconds_total", {"phase": "plan"}, 0.125),
        ("queue_blocked_seconds_total", {"queue": "plans", "side": "producer"}, 2),
        ("checkpoints_total", {}, 2),
        ("checkpoint_seconds_total", {}, 3),
        ("checkpoint_bytes_total", {}, 1500),
        ("checkpoint_every_steps", {}, 100),
        ("checkpoint_every_seconds", {}, 60),
        ("tier_rows", FIRST | {"tier": "cold"}, COUNTS.cold_rows),
        ("tier_reads_total", FIRST | {"tier": "untouched"}, COUNTS.untouched_reads),
        ("tier_moved_rows_total", FIRST | {"from": "cold", "to": "memory"}, COUNTS.loaded),
        ("tier_moved_rows_total", FIRST | {"from": "memory", "to": "cold"}, COUNTS.spilled),
        ("tier_moved_rows_total", FIRST | {"from": "memory", "to": "none"}, COUNTS.dropped),
        ("tier_late_rows_total", FIRST, COUNTS.late),
        ("tier_bytes_total", FIRST | {"direction": "written"}, COUNTS.bytes_written),
        ("tier_read_seconds_total", FIRST, COUNTS.read_seconds),
        ("store_index_bytes", FIRST, COUNTS.index_bytes),
        ("store_disk_garbage_bytes", FIRST, COUNTS.disk_garbage_bytes),
    ],
}


@pytest.mark.parametrize("process", BOTH)
def test_metrics_are_what_happened_and_what_is_now(process: Process) -> None:
    prefetcher, trainer = three_steps.run_of_three_steps()
    started = prefetcher.checkpoint_last_timestamp_seconds
    for seconds in (0.5, 0.25):
        prefetcher.stalled("credit", seconds)
    prefetcher.spent("plan", 0.125)
    prefetcher.blocked("plans", "producer", 2.0)
    for seconds, nbytes in ((2.0, 1000), (1.0, 500)):
        prefetcher.checkpointed(seconds, nbytes)
    trainer.stalled("rows", 1.5)
    trainer.blocked("steps", "consumer", 3.0)
    both: dict[Process, CountersCollector[Any, Any]] = {
        "prefetcher": three_steps.prefetcher_collector(prefetcher),
        "trainer": three_steps.trainer_collector(trainer),
    }
    found = values(both[process])
    for name, labels, value in VALUES[process]:
        assert found[f"rowcast_{name}", tuple(sorted(labels.items()))] == value, (name, labels)
    assert prefetcher.checkpoint_last_timestamp_seconds > started


def test_a_store_with_tiers_shows_each_count_once_and_a_store_without_shows_none() -> None:
    found = {
        (name, tuple(value for _, value in labels)): value
        for (name, labels), value in values(collectors()["prefetcher"]).items()
        if name.startswith(("rowcast_tier_", "rowcast_store_"))
    }
    assert all(three_steps.groups()[0].name in labels for _, labels in found)
    assert sorted(found.values()) == sorted(getattr(COUNTS, field.name) for field in fields(StoreCounts))


def test_a_wait_for_a_tiered_store_says_what_the_cold_tier_gave_and_what_to_change() -> None:
    slow = StoreCounts(memory_reads=900, cold_reads=100, loaded=1900, late=40, read_seconds=0.5)
    other = StoreCounts(loaded=1000, read_seconds=0.5, memory_reads=1000, late=1)
    assert described([slow, other, None]).startswith(
        "the cold tier, which gave 3,000 rows a second while it was read, with 41 rows late so far; raise store.memory"
    )
    assert "gave 0 rows a second" in described([StoreCounts()])
    assert described([None]) == "the store"
    assert (slow.keeps_up, other.keeps_up, StoreCounts().keeps_up) == (False, True, True)


@pytest.mark.parametrize("process", BOTH)
def test_the_state_of_the_process_is_1_and_the_others_0(process: Process) -> None:
    states = {
        dict(labels)["state"]: value
        for (name, labels), value in values(collectors()[process]).items()
        if name == "rowcast_state"
    }
    assert set(states) == set(get_args(State))
    assert {state for state, value in states.items() if value} == {"starting"}


def test_what_is_not_known_yet_has_no_sample() -> None:
    _, trainer = three_steps.run_of_three_steps()
    found = scrape(
        TrainerCollector(
            trainer, lambda: TrainerGauges(train_step=2, learning_rates={}), build_info("trainer", "retail"), Health()
        )
    )
    gauges = [metric.name for metric in METRICS if metric.name.startswith("rowcast_eval_") and metric.type == "gauge"]
    for name in ("rowcast_expected_train_steps", *gauges):
        assert found[name].samples == []


@pytest.mark.parametrize("counters", three_steps.run_of_three_steps(), ids=BOTH)
def test_a_reason_or_phase_outside_the_list_is_refused(counters: PrefetcherCounters | TrainerCounters) -> None:
    with pytest.raises(KeyError):
        counters.stalled("weather", 1.0)  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        counters.spent("lunch", 1.0)  # type: ignore[arg-type]


def test_a_collector_that_names_an_unknown_metric_is_a_bug() -> None:
    with pytest.raises(KeyError, match="rowcast_slots_free"):
        list(families("trainer", [("rowcast_slots_free", ("g",), 1.0)]))
