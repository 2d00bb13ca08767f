"""Contestant: rowcast, both processes, started as a user starts them. The results come from their report and their
metrics.
"""

import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.processes import start, terminate
from benchmarks.training.outcome import Outcome
from rowcast.job.schema import Job
from rowcast.trainer.report.report_json import Report, read_report

PROCESSES = ("prefetcher", "trainer")
POLL_S = 0.25
PHASES = "rowcast_phase_seconds"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What both processes of a run leave."""

    report: Report
    logs: dict[str, str]
    samples: dict[str, list[Sample]]  # the last metrics


def run(config: Path, settings: Sequence[str], steps: int | None) -> Outcome:
    """Raises RuntimeError with a process's output if it fails."""
    return outcome(observed(config, settings, steps))


def observed(
    config: Path,
    settings: Sequence[str],
    steps: int | None,
    watch: Callable[[Sequence[Sample]], None] = lambda samples: None,
) -> Observed:
    """`watch` receives the trainer's metrics every POLL_S. Raises RuntimeError with a process's output if it fails."""
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as folder:
        run_dir = Path(folder) / "run"
        ports = dict(zip(PROCESSES, free_ports(len(PROCESSES)), strict=True))
        metrics = [f'metrics.{name}="127.0.0.1:{port}"' for name, port in ports.items()]
        arguments = [f"--set={setting}" for setting in (*settings, *metrics, f'job.run_dir="{run_dir}"')]
        started = {name: start(name, ["--config", str(config), *arguments, *until(name, steps)]) for name in PROCESSES}
        last: dict[str, list[Sample]] = {name: [] for name in PROCESSES}
        while started["trainer"].poll() is None:
            time.sleep(POLL_S)
            for name, port in ports.items():
                samples = scraped(port)
                last[name] = samples or last[name]
                if name == "trainer":
                    watch(samples)
        logs = terminate(started, 120)
        return Observed(report=read_report(run_dir / "report.json"), logs=logs, samples=last)


def until(name: str, steps: int | None) -> list[str]:
    return ["--max-steps", str(steps)] if steps is not None and name == "prefetcher" else []


def free_ports(count: int) -> Iterator[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    for listening in sockets:
        yield listening.getsockname()[1]
        listening.close()


def phases(samples: Sequence[Sample]) -> dict[str, float]:
    """Seconds in each."""
    return {sample.labels["phase"]: sample.value for sample in samples if sample.name == f"{PHASES}_total"}


def scraped(port: int) -> list[Sample]:
    """What a process has counted; empty if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
            text = answer.read().decode()
    except (OSError, urllib.error.URLError):
        return []
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def outcome(found: Observed) -> Outcome:
    report, wall_s = found.report, found.report.wall_s
    last = {name: phases(samples) for name, samples in found.samples.items()}
    seconds_in = {f"{name} {phase}": seconds for name, metrics in last.items() for phase, seconds in metrics.items()}
    return Outcome(
        samples=report.samples,
        steps=report.steps,
        wall_s=wall_s,
        loss=report.loss or 0.0,
        cores={phase: seconds / wall_s for phase, seconds in seconds_in.items()},
        waited_share=report.stall_share,
        need={
            "look-ups": report.lookups / wall_s,
            "distinct rows": report.unique_rows / wall_s,
            "rows fetched": report.rows_fetched / wall_s,
            "rows written back": report.rows_written_back / wall_s,
            "bytes to the device": report.bytes_to_device / wall_s,
            "bytes from the device": report.bytes_from_device / wall_s,
        },
        device_bytes=report.device_bytes,
        phases={phase: 1e3 * seconds / report.steps for phase, seconds in seconds_in.items()},
    )


def capacity_setting(job: Job, rows_touched: int, percent: float, largest_batch: int) -> str:
    """A share of the distinct rows that the run touches, and at least its largest batch."""
    return f'cache.capacity="{max(int(rows_touched * percent / 100), largest_batch)} rows"'
