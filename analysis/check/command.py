"""The command's own half of `prefetcher check`: findings as lines or JSON, and the exit code."""

import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rowcast.analysis.check.check import check_file
from rowcast.analysis.check.findings import Finding, Level
from rowcast.runtime.errors import ConfigError
from rowcast.runtime.telemetry.format_numbers import plural, stdout_console

STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "error": "bold red"}
SUBJECT_WIDTH = 13


def run_check(config: Path, overrides: tuple[str, ...], *, whole: bool, json: bool) -> int:
    """Returns the exit code: 0 without errors, that of a refused job with any."""
    findings = check_file(config, overrides, whole=whole)
    if json:
        found = list(findings)
        counts = {f"{level}s": count(found, level) for level in ("error", "warning")}
        sys.stdout.buffer.write(msgspec.json.encode({**counts, "findings": found}) + b"\n")
        sys.stdout.buffer.flush()
    else:
        found = print_findings(findings, stdout_console())
    return ConfigError.exit_code if count(found, "error") else 0


def print_findings(findings: Iterable[Finding], console: Console) -> list[Finding]:
    """Each as it comes: folded under its own column on a terminal, one line each elsewhere."""
    found = []
    for finding in findings:
        found.append(finding)
        words = (
            Text(f"{finding.level:7}", STYLES[finding.level]),
            Text(f"{finding.subject:{SUBJECT_WIDTH}}"),
            Text(finding.sentence),
        )
        if console.is_terminal:
            grid = Table.grid(padding=(0, 1, 0, 0))
            grid.add_row(*words)
            console.print(grid)
        else:
            console.print(Text(" ").join(words), soft_wrap=True)
    console.print(f"{plural(count(found, 'error'), 'error')}, {plural(count(found, 'warning'), 'warning')}")
    return found


def count(findings: Iterable[Finding], level: str) -> int:
    return sum(finding.level == level for finding in findings)
