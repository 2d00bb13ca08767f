"""Prometheus and Grafana: promtool checks rules and alerts, docs/operations.md explains them, and Grafana's own types
know all of the dashboard, whose queries are about metrics that exist.
"""

import fcntl
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from rowcast.runtime.telemetry.metrics import METRICS

ROOT = Path(__file__).parents[2]
FILES = ROOT / "deploy" / "prometheus"
FETCHED = ROOT / "build" / "prometheus"  # the package, where this machine has not installed it
FETCH_TIMEOUT_S = 120.0


def program() -> str:
    """Its path. CI and root fetch Debian's package where it is missing; the test is skipped where that fails."""
    found = which()
    if found is None and (os.environ.get("CI") == "true" or os.geteuid() == 0):
        fetch_package()
        found = which()
    if found is None:
        pytest.skip(
            "promtool is not there and could not be fetched; install Debian's package `prometheus` to run this test"
        )
    return found


def which() -> str | None:
    return shutil.which(
        "promtool", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/bin", str(FETCHED / "usr" / "bin")])
    )


@functools.cache
def fetch_package() -> None:
    """Unpacks Debian's package into `build/` and installs nothing: it makes no user and starts no service. A process
    tries once, and one process at a time.
    """
    FETCHED.mkdir(parents=True, exist_ok=True)
    with (FETCHED / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (FETCHED / "usr" / "bin" / "promtool").exists():  # by another worker, while this one waited
            return
        if not done("apt-get", "download", "prometheus"):
            done("apt-get", "update")
            done("apt-get", "download", "prometheus")
        for package in FETCHED.glob("prometheus_*.deb"):
            done("dpkg-deb", "--extract", str(package), "unpacking")
            package.unlink()
        if (FETCHED / "unpacking" / "usr").exists():
            (FETCHED / "unpacking" / "usr").rename(FETCHED / "usr")  # at once: a program that is there is whole


def done(*command: str) -> bool:
    try:
        return (
            subprocess.run(command, cwd=FETCHED, capture_output=True, timeout=FETCH_TIMEOUT_S, check=False).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):  # no such command, or no network
        return False


def promtool(*arguments: str, stdin: str = "") -> str:
    """What it says; an assertion with that where it finds a fault."""
    ended = subprocess.run(
        [program(), *arguments],
        cwd=FILES,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, f"promtool {' '.join(arguments)}: {ended.stdout}{ended.stderr}"
    return ended.stdout


def read_yaml(name: str) -> Any:
    """One of the tree's files for Prometheus."""
    return yaml.safe_load((FILES / name).read_text())


def rules(name: str, kind: Literal["record", "alert"]) -> list[dict[str, Any]]:
    """The rules of one kind in a rule file."""
    return [rule for group in read_yaml(name)["groups"] for rule in group["rules"] if kind in rule]


OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ALERTS = [rule["alert"] for rule in rules("alerts.yml", "alert")]
RECORDS = [rule["record"] for rule in rules("rules.yml", "record")]


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


DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards" / "rowcast.json"
PANELS = [panel for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"] if panel["type"] != "row"]
NAMES = r"[a-z_]+:[a-z0-9_:]+|rowcast_\w+|process_\w+"  # of rules and metrics
WHOLE_RUN = {"Where the trainer's time goes"}  # beside a rule that is about all ranks
PROCESS_METRICS = {f"process_{name}" for name in ("resident_memory_bytes", "cpu_seconds_total")}


def test_grafanas_own_types_know_every_field_of_it() -> None:
    register_default_plugins()
    content = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert list(lost(content, json.loads(JSONEncoder().encode(Dashboard.from_json(content))))) == []
    content["panels"][1]["options"]["textmode"] = "value"
    assert list(lost(content, json.loads(JSONEncoder().encode(Dashboard.from_json(content))))) == [
        "/panels/1/options/textmode"
    ]


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Where `after` has not what `before` has."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{path}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, value in enumerate(before):
            yield from lost(value, after[number], f"{path}/{number}")
    elif before != after:
        yield path


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows_in_which_unit(panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 60
    assert panel["fieldConfig"]["defaults"]["unit"]
    letters = [target["refId"] for target in panel["targets"]]
    assert letters == sorted(set(letters)) != []


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_query_is_about_one_run_and_names_that_exist(panel: dict[str, Any]) -> None:
    known = (
        {metric.name for metric in METRICS}
        | {rule["record"] for rule in rules("rules.yml", "record")}
        | PROCESS_METRICS
    )
    for target in panel["targets"]:
        found = re.findall(NAMES, target["expr"])
        assert set(found) <= known
        assert found or "ALERTS" in target["expr"]
        assert target["expr"].count('job="$job"') >= len(found), f"not only of one run: {target['expr']}"
        of_ranks = [name for name in found if ":" not in name or name.startswith("job_rank")]
        if panel["title"] not in WHOLE_RUN:
            assert target["expr"].count('rank=~"$rank"') >= len(of_ranks), f"of all ranks: {target['expr']}"
