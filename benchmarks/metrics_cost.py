"""What do the metrics cost: a scrape while a run trains, and the counting itself?

Method, on the demo (examples/demo.toml), with two real processes each time:

1. While it trains, each process is scraped over HTTP every 0.2 s, as Prometheus does; the time is from request to last
byte. Target: 20 ms.
2. In a second run each process counts how often a step calls each method of its counters, each clock that receives a
thread's idle
   time, and Python's clocks. After the run, each is called repeatedly with the arguments of its last call. The cost is
calls per step times
   the processor time of one, over the time of a step in the first run; what a `timed` block calls is counted twice.
Target: 1 %.

    make bench-metrics
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import typer

from benchmarks.machine import machine
from rowcast.trainer.report.report_json import Report, read_report

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"
PROCESSES = ("prefetcher", "trainer")
EVERY_S = 0.2
SCRAPE_INTERVAL_S = 5.0  # as in deploy/prometheus
LOOPS = 20_000
COUNT = "--count"  # with this option the file starts itself

Call = Callable[..., Any]
Costs = dict[str, tuple[int, float]]  # operation -> calls in the whole run, seconds of one


# in a process whose calls are counted


class Tally:
    """Counts calls, except those made within another counted one, and keeps the last of each."""

    def __init__(self) -> None:
        self._replaced: list[tuple[object, str, Call]] = []
        self._calls: Counter[tuple[str, int]] = Counter()  # per thread, as `+=` is not atomic
        self._last: dict[str, Callable[[], object]] = {}
        self._thread = threading.local()

    def replace(self, owner: object, name: str, shown: str) -> None:
        call = getattr(owner, name)
        self._replaced.append((owner, name, call))
        setattr(owner, name, self.counted(shown, call))

    def restore(self) -> None:
        for owner, name, call in self._replaced:
            setattr(owner, name, call)

    def counted(self, name: str, call: Call) -> Call:
        def wrapper(*args: Any, **kwargs: Any) -> object:
            if getattr(self._thread, "inside", False):
                return call(*args, **kwargs)
            self._thread.inside = True
            try:
                self._calls[name, threading.get_ident()] += 1
                self._last[name] = partial(call, *args, **kwargs)
                return call(*args, **kwargs)
            finally:
                self._thread.inside = False

        return wrapper

    def costs(self) -> Costs:
        calls: Counter[str] = Counter()
        for (name, _), number in self._calls.items():
            calls[name] += number
        return {name: (number, seconds_of(self._last[name])) for name, number in sorted(calls.items())}


def seconds_of(call: Callable[[], object]) -> float:
    """Processor time of one call, the best of five loops; a context manager is entered and left."""
    once = partial(enter_and_leave, call) if isinstance(call(), AbstractContextManager) else call
    times = []
    for _ in range(5):
        began_s = time.thread_time()
        for _ in range(LOOPS):
            once()
        times.append((time.thread_time() - began_s) / LOOPS)
    return min(times)


def enter_and_leave(call: Callable[[], object]) -> None:
    manager = call()
    assert isinstance(manager, AbstractContextManager), "asked before"
    with manager:
        pass


def count_calls(process: str, tally: Tally) -> None:
    from rowcast.prefetcher.pipeline.metrics import PrefetcherCounters
    from rowcast.runtime.stages import StageThread
    from rowcast.trainer.step.metrics import TrainerCounters

    counters = PrefetcherCounters if process == "prefetcher" else TrainerCounters
    names = [
        name
        for base in counters.__mro__
        for name, value in vars(base).items()
        if callable(value) and not name.startswith("_")
    ]
    for name in dict.fromkeys(names):
        if name != "total":  # called by the peer watch, which is not a metric
            tally.replace(counters, name, name)
    init = StageThread.__init__

    def with_clock(
        self: StageThread, name: str, stage: Any, bell: Any, on_error: Any, on_idle: Any = None, **others: Any
    ) -> None:
        clock = None if on_idle is None else tally.counted(f"idle: {name}", on_idle)
        init(self, name, stage, bell, on_error, clock, **others)

    StageThread.__init__ = with_clock  # type: ignore[method-assign]
    for clock in ("perf_counter", "time"):
        tally.replace(time, clock, f"time.{clock}")


def run_counted(process: str, out: Path, arguments: list[str]) -> None:
    tally = Tally()
    count_calls(process, tally)
    if process == "prefetcher":
        from rowcast.command_line.prefetcher import app
    else:
        from rowcast.command_line.trainer import app
    try:
        app(arguments)
    finally:
        tally.restore()
        out.write_text(json.dumps(tally.costs()))


# the two runs


def demo(folder: Path, samples: int, *, counted: bool) -> dict[str, subprocess.Popen[bytes]]:
    settings = (
        f'job.run_dir="{folder / "run"}"',
        f"data.synthetic.samples={samples}",
        *(f"metrics.{name}=127.0.0.1:0" for name in PROCESSES),
    )
    started = {}
    for name in PROCESSES:
        module = (
            ["-m", "benchmarks.metrics_cost", COUNT, name, str(folder / f"{name}.json")] if counted else ["-m", name]
        )
        command = [sys.executable, *module, "run", "--config", str(DEMO), *(f"--set={setting}" for setting in settings)]
        with (folder / f"{name}.log").open("wb") as log:
            started[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
    return started


def terminate(folder: Path, started: dict[str, subprocess.Popen[bytes]]) -> Report:
    for name, process in started.items():
        if process.wait(timeout=900) != 0:
            raise RuntimeError(
                f"the {name} ended with code {process.returncode}: {(folder / f'{name}.log').read_text()[-2000:]}"
            )
    return read_report(folder / "run" / "report.json")


def scraped(samples: int) -> tuple[dict[str, list[float]], dict[str, int], Report]:
    times: dict[str, list[float]] = {name: [] for name in PROCESSES}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as path:
        folder = Path(path)
        started = demo(folder, samples, counted=False)
        while all(process.poll() is None for process in started.values()):
            for name in PROCESSES:
                seconds, page = scrape(folder / f"{name}.log")
                if b'state="running"} 1' in page:
                    times[name].append(seconds)
                    sizes[name] = len(page)
            time.sleep(EVERY_S)
        return times, sizes, terminate(folder, started)


def scrape(log: Path) -> tuple[float, bytes]:
    """Seconds and page; the page is empty while the process does not serve, before its start and after its end."""
    address = re.findall(r'event="serving metrics" address=(\S+)', log.read_text())
    began_s = time.perf_counter()
    try:
        page = urllib.request.urlopen(f"http://{address[-1]}/metrics", timeout=10).read() if address else b""
    except OSError:
        page = b""
    return time.perf_counter() - began_s, page


def counted(samples: int) -> tuple[dict[str, Costs], Report]:
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as path:
        folder = Path(path)
        report = terminate(folder, demo(folder, samples, counted=True))
        return {name: json.loads((folder / f"{name}.json").read_text()) for name in PROCESSES}, report


# tables


def scrape_table(times: dict[str, list[float]], sizes: dict[str, int]) -> list[str]:
    lines = ["| scrape of | scrapes | median ms | worst ms | bytes |", "|---|---|---|---|---|"]
    for name, seconds in times.items():
        median_ms, worst_ms = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
        lines.append(f"| {name} | {len(seconds)} | {median_ms:.1f} | {worst_ms:.1f} | {sizes[name]:,} |")
    return lines


def cost_table(costs: dict[str, Costs], num_steps: int, step_s: float) -> list[str]:
    lines = ["| process | operation | calls a step | ns each | us a step |", "|---|---|---|---|---|"]
    for process, operations in costs.items():
        for name, (calls, seconds) in operations.items():
            a_step = calls / num_steps
            lines.append(f"| {process} | {name} | {a_step:.1f} | {1e9 * seconds:.0f} | {1e6 * seconds * a_step:.2f} |")
    for process, operations in costs.items():
        total_s = sum(calls * seconds for calls, seconds in operations.values()) / num_steps
        lines.append(
            f"| {process} | all | | | {1e6 * total_s:.1f}: {100 * total_s / step_s:.3f} % of a step of "
            f"{1e3 * step_s:.1f} ms |"
        )
    return lines


def steps_of(report: Report) -> int:
    return report.steps + report.eval_steps


def main(samples: int = 650_000) -> None:
    times, sizes, report = scraped(samples)
    step_s = report.wall_s / steps_of(report)
    typer.echo("\n".join(scrape_table(times, sizes)))
    for name, seconds in times.items():
        share = 100 * statistics.median(seconds) / SCRAPE_INTERVAL_S
        typer.echo(
            f"one scrape of the {name} every {SCRAPE_INTERVAL_S:g} s takes {share:.2f} % of one core's time at most"
        )
    costs, counted_report = counted(samples)
    typer.echo("\n".join(["", *cost_table(costs, steps_of(counted_report), step_s), ""]))
    typer.echo(" ".join(f"{name}={value}" for name, value in machine().items()))


def dispatch(arguments: Sequence[str]) -> None:
    if arguments[:1] == [COUNT]:
        run_counted(arguments[1], Path(arguments[2]), list(arguments[3:]))
    else:
        typer.run(main)


if __name__ == "__main__":
    dispatch(sys.argv[1:])
