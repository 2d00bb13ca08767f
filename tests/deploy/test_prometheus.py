"""Rules and alerts: checked and unit-tested by promtool, and evaluated by a real Prometheus that scrapes a whole run of
two real processes, whose trainer is killed in the middle and started again."""

import json
import re
import signal
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rowcast.deploy.grafana.generate import DASHBOARD
from rowcast.runtime.telemetry.metrics import BOTH, METRICS, Process
from tests.deploy.prometheus import ROOT, Prometheus, Series, program, promtool, read_yaml, rules
from tests.support import processes
from tests.support.processes import Session

OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ALERTS = [rule["alert"] for rule in rules("alerts.yml", "alert")]
RECORDS = [rule["record"] for rule in rules("rules.yml", "record")]

NUM_STEPS = 1500
SCRAPES = 8  # of both processes before the trainer is killed
START_TIMEOUT_S = 120.0  # the first start on a machine compiles the planner
END_TIMEOUT_S = 90.0
SLOW_TRAINER = (
    "import time; from rowcast.trainer.models.runner import StepRunner; train = StepRunner.train; "
    "StepRunner.train = lambda self, step, loss: (time.sleep(0.025), train(self, step, loss))[1]"
)


# the files


@pytest.mark.parametrize("check", ["config prometheus.yml", "rules rules.yml", "rules alerts.yml"])
def test_promtool_finds_no_fault(check: str) -> None:
    assert "SUCCESS" in promtool("check", *check.split())


@pytest.mark.parametrize("cases", ["rules_test.yml", "alerts_test.yml"])
def test_promtool_passes_the_unit_tests(cases: str) -> None:
    assert "SUCCESS" in promtool("test", "rules", cases)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_a_case_in_which_it_fires_and_one_in_which_it_is_silent(alert: str) -> None:
    cases = [
        case
        for test in read_yaml("alerts_test.yml")["tests"]
        for case in test["alert_rule_test"]
        if case["alertname"] == alert
    ]
    assert {bool(case["exp_alerts"]) for case in cases} == {True, False}


@pytest.mark.parametrize("record", RECORDS)
def test_a_recording_rule_has_a_case(record: str) -> None:
    cases = [
        case["expr"]
        for test in read_yaml("rules_test.yml")["tests"]
        for case in test["promql_expr_test"]
        if case["exp_samples"]
    ]
    assert any(record in expr for expr in cases)


@pytest.mark.parametrize("rule", rules("alerts.yml", "alert"), ids=ALERTS)
def test_an_alert_says_how_bad_it_is_what_it_saw_and_where_its_runbook_is(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert "$value" in rule["annotations"]["description"]
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["runbook"] == f"docs/operations.md#{str(rule['alert']).lower()}"


def test_the_runbook_has_the_alerts_that_there_are() -> None:
    runbook = OPERATIONS.partition("\n## Runbook\n")[2].partition("\n## ")[0]
    sections = re.findall(r"^### (\w+)\n\n(.+?)(?=\n### |\Z)", runbook, flags=re.MULTILINE | re.DOTALL)
    assert [name for name, _ in sections] == ALERTS
    for name, section in sections:
        assert all(word in section for word in ("Means:", "Look at:", "Change:")), name


@pytest.mark.parametrize("name", [*(metric.name for metric in METRICS), *RECORDS])
def test_every_metric_and_every_rule_is_explained(name: str) -> None:
    assert f"`{name}`" in OPERATIONS


# a real run


@dataclass(slots=True)
class WatchedRun:
    """What Prometheus knew of one run, at three moments: training, without its trainer, and when all is over."""

    up: list[Series]
    metrics: dict[Process, set[str]]  # names of all series
    records: dict[str, list[Series]]
    panels: dict[str, list[Series]]  # query -> what it returned
    served: dict[Process, str]  # the page of each process
    firing: set[str]  # while all was well
    firing_without_trainer: set[str] = field(default_factory=set)
    down: list[Series] = field(default_factory=list)
    firing_at_the_end: set[str] = field(default_factory=set)
    progress: list[Series] = field(default_factory=list)


def panel_queries() -> dict[str, str]:
    """Panel and query -> expression for the run `rowcast`."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$job", "rowcast").replace("$rank", ".*")
        for panel in panels
        for target in panel.get("targets", [])
    }


def metrics_address(process: processes.Process) -> str:
    process.until_logged("serving metrics")
    return str(re.findall(r'event="serving metrics" address=(\S+)', process.stderr)[-1])


def seen(prometheus: Prometheus, addresses: dict[Process, str]) -> WatchedRun:
    names = {role: prometheus.query(f'count by (__name__) ({{job="rowcast", role="{role}"}})') for role in BOTH}
    pages = {}
    for role, address in addresses.items():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            pages[role] = answer.read().decode()
    return WatchedRun(
        up=prometheus.query("up"),
        metrics={role: {series.labels["__name__"] for series in found} for role, found in names.items()},
        records={record: prometheus.query(record) for record in RECORDS},
        panels={name: prometheus.query(expr) for name, expr in panel_queries().items()},
        served=pages,
        firing=prometheus.firing(),
    )


def watch(folder: Path) -> WatchedRun:
    with Session(folder) as session:
        session.write_job(
            data={"eval_fraction": 0.01, "synthetic": {"samples": 64 * NUM_STEPS * 100 // 99}},
            eval={"every": 100},
            checkpoint={"every": 100},
            store={"kind": "tiered", "memory": "700 rows"},
            transport={"rejoin_timeout": "60s"},
        )
        prefetcher, trainer = session.start("prefetcher"), session.start_patched("trainer", SLOW_TRAINER)
        addresses: dict[Process, str] = {"prefetcher": metrics_address(prefetcher), "trainer": metrics_address(trainer)}
        at_once = ("RowcastPeerDown", "RowcastWaitsForPeer")
        with Prometheus(folder / "prometheus", addresses, at_once) as prometheus:
            prometheus.until(
                lambda: prometheus.query(
                    "rowcast_eval_auc and on (job) increase(rowcast_checkpoints_total[1m]) > 0 "
                    f"and on (job) min by (job) (count_over_time(rowcast_train_steps_total[1m])) >= {SCRAPES} "
                    "and on (job) job:rowcast_time_left_seconds:estimate"
                ),
                "run in progress",
                START_TIMEOUT_S,
            )
            run = seen(prometheus, addresses)
            trainer.signal(signal.SIGKILL)
            prometheus.until(
                lambda: "RowcastPeerDown" in prometheus.firing() and "RowcastWaitsForPeer" in prometheus.firing(),
                "alert",
            )
            run.firing_without_trainer, run.down = prometheus.firing(), prometheus.query("up == 0")
            again = session.start("trainer", f"--set=metrics.trainer={addresses['trainer']}")
            for process in (prefetcher, again):
                assert process.ended(END_TIMEOUT_S).code == 0, process.stderr
            prometheus.until(
                lambda: len(prometheus.query("up == 0")) == 2 and not prometheus.firing(), "quiet after the end"
            )
            run.firing_at_the_end = prometheus.firing()
            run.progress = prometheus.query(
                "last_over_time(rowcast_train_step[5m]) / last_over_time(rowcast_expected_train_steps[5m])"
            )
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    program("prometheus")
    return watch(tmp_path_factory.mktemp("watched"))


def test_both_processes_are_scraped(run: WatchedRun) -> None:
    assert {series.labels["role"]: series.value for series in run.up} == {"prefetcher": 1, "trainer": 1}


@pytest.mark.parametrize("role", BOTH)
def test_every_metric_of_the_table_is_in_prometheus_for_its_process(run: WatchedRun, role: Process) -> None:
    of_other_models = {"task", "figure"}  # this job has one label, and its model no ranks
    expected = {
        metric.name for metric in METRICS if role in metric.processes and not of_other_models & {*metric.labels}
    }
    found = {name for name in run.metrics[role] if name.startswith("rowcast_")}
    assert found == expected
    assert "process_resident_memory_bytes" in run.metrics[role]


@pytest.mark.parametrize("role", BOTH)
def test_promtool_likes_what_the_processes_serve(run: WatchedRun, role: Process) -> None:
    promtool("check", "metrics", stdin=run.served[role])


@pytest.mark.parametrize("record", RECORDS)
def test_a_recording_rule_has_data(run: WatchedRun, record: str) -> None:
    assert run.records[record], f"{record} is empty"
    assert all(series.labels["job"] == "rowcast" for series in run.records[record])


@pytest.mark.parametrize("query", panel_queries())
def test_a_query_of_the_dashboard_returns_data(run: WatchedRun, query: str) -> None:
    of_several_labels = "rowcast_eval_task_" in panel_queries()[query]  # this job has one
    assert bool(run.panels[query]) is not of_several_labels, f"for {panel_queries()[query]}: {run.panels[query]}"


def test_the_numbers_are_those_of_the_run(run: WatchedRun) -> None:
    value = {record: found[0].value for record, found in run.records.items()}
    assert 0 < value["job:rowcast_hits_per_unique_row:ratio_rate1m"] < 1
    assert 0 < value["job:rowcast_progress:ratio"] < 1
    assert 0 < value["job:rowcast_device_busy:ratio_rate1m"] <= 1
    assert value["job:rowcast_samples:rate1m"] == pytest.approx(64 * value["job:rowcast_train_steps:rate1m"], rel=0.01)


def test_nothing_fires_while_all_is_well(run: WatchedRun) -> None:
    assert run.firing == set()
    assert [series.labels["alertname"] for series in run.panels["Alerts A"]] == ["none"]


def test_killing_the_trainer_fires_the_alerts_that_say_so_and_no_other(run: WatchedRun) -> None:
    assert run.firing_without_trainer == {"RowcastPeerDown", "RowcastWaitsForPeer"}
    assert [series.labels["role"] for series in run.down] == ["trainer"]


def test_when_the_run_has_ended_in_order_nothing_fires(run: WatchedRun) -> None:
    assert run.firing_at_the_end == set()
    # of the last scrape; what came after it in so short a run is not known
    assert run.progress[0].value > run.records["job:rowcast_progress:ratio"][0].value
