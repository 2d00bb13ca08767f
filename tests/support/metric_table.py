"""The table of docs/metrics.md; `python -m tests.support.metric_table` prints it."""

import sys

from rowcast.runtime.telemetry.metrics import BOTH, METRICS


def metric_table() -> str:
    """Returns the table in docs/metrics.md: every metric of both processes, in Markdown."""
    lines = ["| metric | type | labels | served by | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        served_by = "both" if metric.processes == BOTH else metric.processes[0]
        lines.append(f"| `{metric.name}` | {metric.type} | {labels} | {served_by} | {metric.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(metric_table())
