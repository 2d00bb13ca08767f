"""Collects the text of the report: the job as the trainer read it, versions and the machine."""

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rowcast.job.schema import Job
from rowcast.runtime.machine import usable_cores
from rowcast.runtime.telemetry.format_numbers import human_bytes
from rowcast.trainer.report.report_json import Report

CPUINFO = Path("/proc/cpuinfo")


def job_sections(job: Job) -> list[str]:
    """Lists all values of the job, set or default, as sections of TOML; tables are listed separately."""
    content = msgspec.to_builtins(job)
    del content["tables"], content["tables_from"]
    return [text for name, section in content.items() for text in section_texts(name, section)]


def section_texts(name: str, section: dict[str, Any]) -> Iterator[str]:
    keys = {key: value for key, value in section.items() if value is not None and not isinstance(value, dict)}
    if keys:
        yield "\n".join([f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in keys.items())])
    for key, value in section.items():
        if isinstance(value, dict):
            yield from section_texts(f"{name}.{key}", value)


def toml_value(value: object) -> str:
    """Writes JSON: its strings, numbers and lists are valid TOML."""
    return json.dumps(value, ensure_ascii=False, default=str)


def table_rows(job: Job) -> list[list[str]]:
    return [
        [
            table.name,
            f"{table.num_embeddings:,}",
            f"{table.embedding_dim} + 1" if table.linear else str(table.embedding_dim),
            table.dtype,
            table.pooling,
            table.init,
            ", ".join(table.features),
        ]
        for table in job.tables
    ]


def machine_rows(report: Report) -> list[tuple[str, str]]:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return [
        *report.versions.items(),
        ("device", report.device),
        ("processor", processor()),
        ("cores for the trainer", str(usable_cores())),
        ("memory of the machine", human_bytes(pages * page_bytes)),
        ("system", f"{platform.system()} {platform.release()}"),
    ]


def processor() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.machine()


def continuation(report: Report, starts: list[int]) -> str:
    """Says which steps of the run this process did; "" if all."""
    first = next(iter(starts), 0)
    if not first and len(starts) < 2:
        return ""
    which = f"This process began after train step {first:,}" if first else "This process began the run"
    again = (
        f" and continued from a checkpoint after train step {', '.join(f'{start:,}' for start in starts[1:])}"
        if starts[1:]
        else ""
    )
    return (
        f"{which}{again}; it made {report.steps:,} of the run's {report.train_steps:,} train steps. "
        "Losses and evaluations are those of the whole run; speeds, waits, hits and bytes are those of this process."
    )
