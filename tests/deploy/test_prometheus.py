"""Rules and alerts: checked and unit-tested by promtool, and explained in docs/operations.md."""

import re

import pytest

from rowcast.runtime.telemetry.metrics import METRICS
from tests.deploy.prometheus import ROOT, promtool, read_yaml, rules

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
