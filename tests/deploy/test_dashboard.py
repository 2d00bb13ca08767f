"""Grafana's dashboard: its own types know all of it, and its queries are about metrics that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from rowcast.runtime.telemetry.metrics import METRICS
from tests.deploy.prometheus import rules

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
