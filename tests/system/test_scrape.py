"""Both processes' /metrics: every metric of the table, and counters that only grow and agree with the report."""

import os
import re
import time
import urllib.request
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

import rowcast.prefetcher.pipeline.metrics
import rowcast.trainer.device.streams
import rowcast.trainer.step.metrics
from rowcast.command_line.trainer import app
from rowcast.job.file import load_job
from rowcast.job.tables import group_specs
from rowcast.runtime.telemetry.metrics import METRICS, Process, State
from rowcast.trainer.models.runner import StepRunner
from rowcast.trainer.report.report_json import Report, read_report
from rowcast.trainer.step.cache import Step
from rowcast.trainer.step.engine import TrainerEngine
from tests.support import processes
from tests.support.metric_table import metric_table
from tests.support.processes import Session

ROOT = Path(__file__).parents[2]
NUM_STEPS = 30
HELD_STEP = 12
MIDDLE = -3  # index into a process's scrapes
HOLD = "ROWCAST_TEST_HOLD"  # a folder

Key = tuple[str, tuple[tuple[str, str], ...]]
REASONS = {
    "prefetcher": get_args(rowcast.prefetcher.pipeline.metrics.StallReason),
    "trainer": get_args(rowcast.trainer.step.metrics.StallReason),
}
PHASES = {
    "prefetcher": get_args(rowcast.prefetcher.pipeline.metrics.Phase),
    "trainer": get_args(rowcast.trainer.device.streams.Phase),
}
QUEUES = {
    "prefetcher": get_args(rowcast.prefetcher.pipeline.metrics.Queue),
    "trainer": get_args(rowcast.trainer.step.metrics.Queue),
}


# two real processes, of which the trainer is held twice


def held_trainer() -> None:
    """The trainer's command, held in the middle of training and before its good-bye, when nothing more is counted."""
    folder = Path(os.environ[HOLD])
    train, say_bye = StepRunner.train, TrainerEngine.say_bye

    def held_train(runner: StepRunner, step: Step, loss: Tensor) -> None:
        if step.header.train_step == HELD_STEP:
            hold(folder / "middle")
        train(runner, step, loss)

    def held_bye(engine: TrainerEngine) -> None:
        hold(folder / "end")
        say_bye(engine)

    with patch.object(StepRunner, "train", held_train), patch.object(TrainerEngine, "say_bye", held_bye):
        app()


def hold(path: Path) -> None:
    """Makes `<path>.reached`, and waits for `path`."""
    path.with_suffix(".reached").touch()
    while not path.exists():
        time.sleep(0.01)


class Scrapes:
    """Scrapes of one process, oldest first."""

    def __init__(self, started: processes.Process) -> None:
        self.families: list[dict[str, Family]] = []
        self._started = started

    def scrape(self) -> None:
        self._started.until_logged("serving metrics")
        address = re.findall(r'event="serving metrics" address=(\S+)', self._started.stderr)[-1]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        self.families.append({family.name: family for family in text_string_to_metric_families(text)})

    def values(self, number: int) -> dict[Key, float]:
        """By name and the labels besides the rank."""
        return {
            (sample.name, tuple(sorted(label for label in sample.labels.items() if label[0] != "rank"))): sample.value
            for family in self.families[number].values()
            for sample in family.samples
        }

    def counters(self, number: int) -> dict[Key, float]:
        counters = {metric.name for metric in METRICS if metric.type == "counter"}
        return {key: value for key, value in self.values(number).items() if key[0] in counters}

    def total(self, name: str, **labels: str) -> float:
        """A counter at the end, summed over the labels that are not given."""
        return sum(
            value
            for (found, found_labels), value in self.values(-1).items()
            if found == name and labels.items() <= dict(found_labels).items()
        )


class ScrapedRun:
    """One run of two processes: the trainer scraped alone, both while they meet, in the middle, and at the end."""

    def __init__(self, folder: Path) -> None:
        self.groups: tuple[str, ...] = ()
        self.report: Report | None = None
        with Session(folder) as session, patch.dict(processes.COMMANDS, {"trainer": ["-c", HELD_TRAINER, "run"]}):
            data = {"eval_fraction": 0.1, "synthetic": {"samples": 64 * NUM_STEPS * 10 // 9}}
            session.write_job(
                data=data,
                eval={"every": 10},
                cache={"capacity": "20KiB"},
                store={"kind": "tiered", "memory": "700 rows"},
                lookahead={"depth": 2, "horizon": 4, "bundle": 2},
            )
            self.groups = tuple(group.name for group in group_specs(load_job(session.config)))
            paths = {"PYTHONPATH": str(ROOT), HOLD: str(folder)}
            started = {"trainer": session.start("trainer", **paths)}
            self.scrapes: dict[str, Scrapes] = {"trainer": Scrapes(started["trainer"])}
            self._scrape()  # alone: nothing was counted yet
            started["prefetcher"] = session.start("prefetcher", **paths)
            self.scrapes["prefetcher"] = Scrapes(started["prefetcher"])
            self._scrape()
            for name in ("middle", "end"):
                started["trainer"].until((folder / f"{name}.reached").exists, f"the trainer at {name!r}")
                self._scrape()
                self._scrape()
                (folder / name).touch()
            for process in started.values():
                process.ended().quiet()
            self.report = read_report(session.run_dir / "report.json")

    def _scrape(self) -> None:
        for scrapes in self.scrapes.values():
            scrapes.scrape()


HELD_TRAINER = "from tests.system.test_scrape import held_trainer; held_trainer()"
BOTH: tuple[Process, ...] = ("prefetcher", "trainer")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ScrapedRun:
    return ScrapedRun(tmp_path_factory.mktemp("scraped"))


@pytest.mark.parametrize("process", BOTH)
def test_every_label_has_all_its_values_from_the_first_scrape_on(run: ScrapedRun, process: Process) -> None:
    expected = {
        "group": set(run.groups),
        "reason": set(REASONS[process]),
        "phase": set(PHASES[process]),
        "queue": set(QUEUES[process]),
        "side": {"producer", "consumer"},
        "optimizer": set(get_args(rowcast.trainer.step.engine.Side)) if process == "trainer" else set(),
        "state": set(get_args(State)),
        "tier": {"memory", "cold", "untouched"} if process == "prefetcher" else set(),
        "from": {"memory", "cold", "untouched"} if process == "prefetcher" else set(),
        "to": {"memory", "cold", "none"} if process == "prefetcher" else set(),
        "process": {process},
    }
    for number in range(len(run.scrapes[process].families)):
        for label, values in expected.items():
            assert {
                dict(labels)[label] for _, labels in run.scrapes[process].values(number) if label in dict(labels)
            } == values


@pytest.mark.parametrize("process", BOTH)
def test_counters_only_grow_and_none_vanishes(run: ScrapedRun, process: Process) -> None:
    scrapes = run.scrapes[process]
    grew = 0
    for number in range(1, len(scrapes.families)):
        before, after = scrapes.counters(number - 1), scrapes.counters(number)
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert after[key] >= value, f"{key} fell from {value} to {after[key]}"
            grew += after[key] > value
    assert grew > 10


def test_the_middle_was_scraped_in_the_middle(run: ScrapedRun) -> None:
    steps: Key = ("rowcast_train_steps_total", ())
    assert run.scrapes["trainer"].values(0)[steps] == 0
    assert 0 < run.scrapes["trainer"].values(MIDDLE)[steps] <= HELD_STEP
    assert HELD_STEP < run.scrapes["prefetcher"].values(MIDDLE)[steps] < NUM_STEPS


@pytest.mark.parametrize("process", BOTH)
def test_at_the_end_every_counter_agrees_with_the_report(run: ScrapedRun, process: Process) -> None:
    report, total = run.report, run.scrapes[process].total
    assert report is not None
    assert total("rowcast_train_steps_total") == report.steps == NUM_STEPS
    assert total("rowcast_eval_steps_total") == report.eval_steps > 0
    assert total("rowcast_samples_total") == report.samples
    assert total("rowcast_lookups_total") == report.lookups
    assert total("rowcast_unique_rows_total") == report.unique_rows
    assert report.hit_ratio is not None
    assert total("rowcast_hits_total") / total("rowcast_unique_rows_total") == report.hit_ratio
    assert total("rowcast_rows_fetched_total") == report.rows_fetched
    assert total("rowcast_rows_evicted_total") == report.rows_evicted > 0
    assert total("rowcast_rows_written_back_total") == report.rows_written_back
    assert total("rowcast_rows_flushed_total") == report.rows_flushed > 0
    row_bytes = total("rowcast_row_bytes_total", direction="to_device")
    assert row_bytes + total("rowcast_plan_bytes_total", direction="to_device") == report.bytes_to_device
    assert total("rowcast_row_bytes_total", direction="from_device") == report.bytes_from_device > 0
    assert total("rowcast_plan_bytes_total", direction="from_device") == 0


def test_at_the_end_both_processes_have_counted_the_same(run: ScrapedRun) -> None:
    counters = [metric for metric in METRICS if metric.type == "counter" and metric.processes == BOTH]
    shared = {metric.name for metric in counters if not metric.name.endswith("_seconds_total")}
    both = [
        {key: value for key, value in run.scrapes[process].values(-1).items() if key[0] in shared} for process in BOTH
    ]
    assert both[0] == both[1]
    assert {name for name, _ in both[0]} == shared


@pytest.mark.parametrize("process", BOTH)
def test_every_phase_took_time(run: ScrapedRun, process: Process) -> None:
    for phase in set(PHASES[process]) - {"exchange"}:  # a trainer alone has nothing to exchange
        assert run.scrapes[process].total("rowcast_phase_seconds_total", phase=phase) > 0, (
            f"phase {phase} was never counted"
        )


def test_at_the_end_nothing_is_in_flight_dirty_or_behind(run: ScrapedRun) -> None:
    total = run.scrapes["prefetcher"].total
    for name in (
        "rowcast_in_flight_plans",
        "rowcast_slots_dirty",
        "rowcast_write_back_lag_plans",
        "rowcast_known_batches",
    ):
        assert total(name) == 0, name
    assert total("rowcast_ring_used_bytes") == 0
    assert total("rowcast_slots_clean") > 0
    assert (total("rowcast_depth_plans"), total("rowcast_horizon_batches")) == (2, 4)
    assert run.scrapes["trainer"].total("rowcast_ring_used_bytes") == 0


def test_the_page_of_metrics_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert text.count("<!-- metrics -->") == text.count("<!-- /metrics -->") == 1, (
        "docs/metrics.md has no marked table of metrics"
    )
    marked = text.partition("<!-- metrics -->")[2].partition("<!-- /metrics -->")[0]
    assert marked.strip("\n") == metric_table().strip("\n")
