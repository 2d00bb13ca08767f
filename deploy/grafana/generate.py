"""Generates Grafana's dashboard from panels.toml: `python -m rowcast.deploy.grafana.generate` writes
dashboards/rowcast.json.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
PANELS, DASHBOARD = HERE / "panels.toml", HERE / "dashboards" / "rowcast.json"
WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    title: str
    description: str  # what is shown, what a bad value means, what to change
    unit: str  # Grafana's id
    queries: Mapping[str, str]  # legend -> expression
    kind: Literal["stat", "bargauge", "timeseries"] = "timeseries"
    width: int = 8  # of 24
    height: int = 7
    from_zero: bool = True  # whether the scale begins at 0
    top: float | None = None  # where the scale ends
    decimals: int | None = None
    stacked: bool = False
    show: Literal["value", "name"] = "value"  # stat: the number, or the series' name
    colours: Sequence[tuple[float, str]] = ((-math.inf, "green"),)  # each from its value up

    @property
    def is_of_now(self) -> bool:
        """Whether current values are queried instead of a time series; series that have ended are then not shown."""
        return self.kind == "bargauge" or self.show == "name"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def read_rows() -> list[Row]:
    content = tomllib.loads(PANELS.read_text(encoding="utf-8"))
    return [Row(title=row["title"], panels=tuple(Panel(**panel) for panel in row["panel"])) for row in content["row"]]


def dashboard() -> Json:
    return {
        "uid": "rowcast",
        "title": "rowcast",
        "description": "One run: its processes, by the label `job`.",
        "tags": ["rowcast"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,  # shared cross-hair
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [source_variable(), job_variable(), rank_variable()]},
        "panels": list(panels(read_rows())),
    }


def source_variable() -> Json:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def job_variable() -> Json:
    return {
        "name": "job",
        "label": "run",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(rowcast_build_info, job)", "refId": "job"},
        "refresh": 2,  # refresh when the time range changes
        "sort": 1,
    }


def rank_variable() -> Json:
    return {
        "name": "rank",
        "label": "ranks",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": 'label_values(rowcast_build_info{job="$job"}, rank)', "refId": "rank"},
        "refresh": 2,
        "sort": 3,  # by number
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def panels(rows: Sequence[Row]) -> Iterator[Json]:
    """Rows from top to bottom, their panels from left to right; a panel that does not fit starts a new line."""
    number, y = 1, 0
    for row in rows:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": grid(0, y, WIDTH, 1),
            "panels": [],
        }
        number, x, y, height = number + 1, 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            yield {"id": number, **panel_json(panel), "gridPos": grid(x, y, panel.width, panel.height)}
            number, x, height = number + 1, x + panel.width, max(height, panel.height)
        y += height


def grid(x: int, y: int, width: int, height: int) -> Json:
    return {"x": x, "y": y, "w": width, "h": height}


def panel_json(panel: Panel) -> Json:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults(panel), "overrides": []},
        "options": options(panel),
        "targets": [target(panel, number, legend, expr) for number, (legend, expr) in enumerate(panel.queries.items())],
    }


def defaults(panel: Panel) -> Json:
    steps = [{"value": value if math.isfinite(value) else None, "color": colour} for value, colour in panel.colours]
    limits = {"min": 0 if panel.from_zero else None, "max": panel.top, "decimals": panel.decimals}
    return {
        "unit": panel.unit,
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
        "thresholds": {"mode": "absolute", "steps": steps},
        **{name: value for name, value in limits.items() if value is not None},
        **({"custom": drawing(panel)} if panel.kind == "timeseries" else {}),
    }


def drawing(panel: Panel) -> Json:
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 60 if panel.stacked else 10,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }


def options(panel: Panel) -> Json:
    latest = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "timeseries":
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "bargauge":
        return {
            "orientation": "horizontal",
            "displayMode": "basic",
            "valueMode": "text",
            "showUnfilled": True,
            "reduceOptions": latest,
        }
    named = panel.show == "name"
    return {
        "textMode": "name" if named else "value_and_name" if len(panel.queries) > 1 else "value",
        "colorMode": "background" if named else "value",
        "graphMode": "none" if named else "area",
        "orientation": "horizontal",
        "justifyMode": "center",
        "reduceOptions": latest,
    }


def target(panel: Panel, number: int, legend: str, expr: str) -> Json:
    return {
        "refId": chr(ord("A") + number),
        "datasource": SOURCE,
        "expr": expr,
        "legendFormat": legend,
        "editorMode": "code",
        "instant": panel.is_of_now,
        "range": not panel.is_of_now,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(text(), encoding="utf-8")
