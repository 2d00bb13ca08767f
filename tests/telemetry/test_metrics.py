import time
from dataclasses import fields
from typing import Any, get_args

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
from rowcast.prefetcher.stores.store_counts import StoreCounts, described
from rowcast.protocol.counters import CountersCollector, new_registry
from rowcast.runtime.telemetry.metrics import BOTH, METRICS, Health, Process, State, build_info, families
from rowcast.trainer.step.metrics import TrainerCollector, TrainerCounters, TrainerGauges
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


def test_both_processes_report_the_same_totals_for_the_same_steps() -> None:
    both = collectors()
    prefetcher, trainer = values(both["prefetcher"]), values(both["trainer"])
    names = {metric.name for metric in METRICS if metric.processes == BOTH and metric.type == "counter"}
    names -= {"rowcast_stall_seconds_total", "rowcast_phase_seconds_total", "rowcast_queue_blocked_seconds_total"}
    shared = {key: value for key, value in prefetcher.items() if key[0] in names}
    assert {name for name, _ in shared} == names
    assert shared == {key: value for key, value in trainer.items() if key[0] in names}


def test_counters_of_steps_rows_and_bytes_are_what_happened() -> None:
    found = values(collectors()["trainer"])
    first, second = (("group", "fp32_d16_sgd"),), (("group", "fp32_d32_sgd"),)
    to_device, from_device = ("direction", "to_device"), ("direction", "from_device")
    assert found["rowcast_train_steps_total", ()] == 2
    assert found["rowcast_eval_steps_total", ()] == 1
    assert found["rowcast_samples_total", ()] == 64
    assert found["rowcast_eval_samples_total", ()] == 16
    assert found["rowcast_lookups_total", first] == 60
    assert found["rowcast_unique_rows_total", first] == 30
    assert found["rowcast_hits_total", first] == 18
    assert found["rowcast_rows_fetched_total", first] == 12
    assert found["rowcast_rows_evicted_total", first] == 9
    assert found["rowcast_rows_written_back_total", first] == 3
    assert found["rowcast_rows_written_back_total", second] == 3
    assert found["rowcast_rows_flushed_total", first] == 1
    assert found["rowcast_rows_flushed_total", second] == 2
    assert found["rowcast_row_bytes_total", (to_device, *second)] == 4 * 128
    assert found["rowcast_row_bytes_total", (from_device, *first)] == 3 * 64
    assert found["rowcast_plan_bytes_total", (to_device,)] == 1024
    assert found["rowcast_loss", ()] == 0.5
    assert [found["rowcast_learning_rate", (("optimizer", side),)] for side in ("sparse", "dense")] == [0.05, 0.01]


def test_gauges_are_read_at_scrape_time() -> None:
    found = values(collectors()["prefetcher"])
    assert found["rowcast_queue_depth", (("queue", "batches"),)] == 5
    assert found["rowcast_ring_used_bytes", (("direction", "to_device"),)] == 4096
    assert found["rowcast_depth_steps", ()] == 4
    assert found["rowcast_horizon_batches", ()] == 64
    assert found["rowcast_write_back_lag_steps", ()] == 2
    second = (("group", "fp32_d32_sgd"),)
    assert [found[f"rowcast_slots_{state}", second] for state in ("free", "clean", "dirty")] == [4, 5, 6]


def test_a_store_with_tiers_shows_each_count_once_and_a_store_without_shows_none() -> None:
    found = {
        (name, tuple(value for _, value in labels)): value
        for (name, labels), value in values(collectors()["prefetcher"]).items()
        if name.startswith(("rowcast_tier_", "rowcast_store_"))
    }
    with_tiers, counts = three_steps.groups()[0].name, three_steps.store_counts()
    assert all(with_tiers in labels for _, labels in found)
    assert sorted(found.values()) == sorted(getattr(counts, field.name) for field in fields(StoreCounts))
    # labels come sorted by their names: from, group, to; direction, group; group, tier
    assert found["rowcast_tier_rows", (with_tiers, "cold")] == counts.cold_rows
    assert found["rowcast_tier_reads_total", (with_tiers, "untouched")] == counts.untouched_reads
    assert found["rowcast_tier_moved_rows_total", ("cold", with_tiers, "memory")] == counts.loaded
    assert found["rowcast_tier_moved_rows_total", ("memory", with_tiers, "cold")] == counts.spilled
    assert found["rowcast_tier_moved_rows_total", ("memory", with_tiers, "none")] == counts.dropped
    assert found["rowcast_tier_late_rows_total", (with_tiers,)] == counts.late
    assert found["rowcast_tier_bytes_total", ("written", with_tiers)] == counts.bytes_written
    assert found["rowcast_tier_read_seconds_total", (with_tiers,)] == counts.read_seconds
    assert found["rowcast_store_index_bytes", (with_tiers,)] == counts.index_bytes
    assert found["rowcast_store_disk_garbage_bytes", (with_tiers,)] == counts.disk_garbage_bytes


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


@pytest.mark.parametrize("process", BOTH)
def test_memory_and_processor_time_of_the_process_are_served_too(process: Process) -> None:
    found = values(collectors()[process])
    assert found["process_resident_memory_bytes", ()] > 2**20
    assert found["process_cpu_seconds_total", ()] > 0


def test_checkpoints_are_counted_when_they_are_durable() -> None:
    prefetcher, _ = three_steps.run_of_three_steps()
    started = prefetcher.checkpoint_last_timestamp_seconds
    assert (
        values(three_steps.prefetcher_collector(prefetcher))["rowcast_checkpoint_last_timestamp_seconds", ()] == started
    )
    prefetcher.checkpointed(2.0, 1000)
    prefetcher.checkpointed(1.0, 500)
    found = values(three_steps.prefetcher_collector(prefetcher))
    assert found["rowcast_checkpoints_total", ()] == 2
    assert found["rowcast_checkpoint_seconds_total", ()] == 3
    assert found["rowcast_checkpoint_bytes_total", ()] == 1500
    assert (
        found["rowcast_checkpoint_last_timestamp_seconds", ()] == prefetcher.checkpoint_last_timestamp_seconds > started
    )
    assert found["rowcast_checkpoint_every_steps", ()] == 100


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


def test_stalls_phases_and_blocked_sides_add_up_under_their_labels() -> None:
    prefetcher, trainer = three_steps.run_of_three_steps()
    prefetcher.stalled("credit", 0.5)
    prefetcher.stalled("credit", 0.25)
    prefetcher.spent("plan", 0.125)
    prefetcher.blocked("plans", "producer", 2.0)
    trainer.stalled("rows", 1.5)
    trainer.blocked("steps", "consumer", 3.0)
    found = values(three_steps.prefetcher_collector(prefetcher))
    assert found["rowcast_stall_seconds_total", (("reason", "credit"),)] == 0.75
    assert found["rowcast_stall_seconds_total", (("reason", "store"),)] == 0
    assert found["rowcast_phase_seconds_total", (("phase", "plan"),)] == 0.125
    assert found["rowcast_queue_blocked_seconds_total", (("queue", "plans"), ("side", "producer"))] == 2
    assert found["rowcast_queue_blocked_seconds_total", (("queue", "plans"), ("side", "consumer"))] == 0
    found = values(three_steps.trainer_collector(trainer))
    assert found["rowcast_stall_seconds_total", (("reason", "rows"),)] == trainer.waited_s == 1.5
    assert found["rowcast_queue_blocked_seconds_total", (("queue", "steps"), ("side", "consumer"))] == 3


@pytest.mark.parametrize("counters", three_steps.run_of_three_steps(), ids=BOTH)
def test_a_reason_or_phase_outside_the_list_is_refused(counters: PrefetcherCounters | TrainerCounters) -> None:
    with pytest.raises(KeyError):
        counters.stalled("weather", 1.0)  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        counters.spent("lunch", 1.0)  # type: ignore[arg-type]


def test_the_loss_has_no_sample_before_the_first_step() -> None:
    counters = TrainerCounters(groups={}, stalls={}, phases={}, queues={})
    found = scrape(three_steps.trainer_collector(counters))
    assert found["rowcast_loss"].samples == []


def test_progress_is_the_start_before_the_first_step_and_the_newest_step_after() -> None:
    _, trainer = three_steps.run_of_three_steps()
    trainer.last_progress_timestamp_seconds = 1.0
    before = time.time()
    trainer.progressed()
    assert before <= trainer.last_progress_timestamp_seconds <= time.time()


def test_a_collector_that_names_an_unknown_metric_is_a_bug() -> None:
    with pytest.raises(KeyError, match="rowcast_slots_free"):
        list(families("trainer", [("rowcast_slots_free", ("g",), 1.0)]))


def test_registering_a_collector_reads_no_counter() -> None:
    class Unreadable(CountersCollector[Any, Any]):
        process = "trainer"

        def samples(self) -> list[tuple[str, tuple[str, ...], float]]:
            raise ValueError("read")

    registry = new_registry(
        Unreadable(three_steps.run_of_three_steps()[1], lambda: None, build_info("trainer", "retail"), Health())
    )
    with pytest.raises(ValueError, match="read"):
        generate_latest(registry)
