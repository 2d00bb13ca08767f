"""rowcast and stock PyTorch while both train: each has turns of some seconds, and a contestant without a turn is
stopped (SIGSTOP).

A shared machine changes its speed from minute to minute. Turns of whole runs see that as a difference, turns of seconds
hardly do. Starts and last barriers are not included; first values of rows are, while the run is in its first epoch.
Medians over all turns, ratios within a round.

    rowcast              both processes, started by rowcast.deploy.local
    rowcast, background  the same with prefetcher.background = true
    stock                one process, nn.EmbeddingBag(sparse=True) and torch.optim, every row in memory
    stock, worker        the same, with a DataLoader worker process that decodes the batches

Ratios are to the faster of the two stocks; those of processor time, with all processes and threads, are to `stock`.
`benchmarks.training.table` does this for several kinds of data, optimizers and widths.

    python -m benchmarks.training.steady --config examples/retail.toml --name retail \\
        --set data.path='"train.tsv"' --set data.epochs=40
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import write_result
from benchmarks.processes import processor_s, turns
from benchmarks.training import ours
from benchmarks.training.recorded import touched, train_batches
from rowcast.job.file import load_job

START_S = 300.0
WARM_STEPS = 8  # before a contestant is stopped for the first time
SETTLE_S = 0.3  # of a turn, not measured
POLL_S = 0.2
EDGE_S = 0.01  # resolution of the end of a step
STOCKS = ("stock", "stock, worker")
PYTHON = (sys.executable, "-m")
SAMPLES, WAITS = "rowcast_samples_total", "rowcast_stall_seconds_total"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    wall_s: float
    samples: float
    waited_s: float
    spent: dict[str, float]  # seconds of the processor, by process

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.wall_s

    @property
    def processor_per_sample_s(self) -> float:
        return sum(self.spent.values()) / self.samples


class Contestant:
    """A process and all its children. It runs until its first turn, then only in its turns."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        """`port`: where it serves its counters."""
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._port = port

    def warm_up(self, samples: int) -> None:
        """Raises RuntimeError if it does not train."""
        deadline_s = time.monotonic() + START_S
        while self._counted()[SAMPLES] < samples:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{self._process.args!r} has not trained {samples} samples")
            time.sleep(POLL_S)
        self._signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> Turn:
        self._signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        before, began_s = self._at_step_end()
        spent = processor_s(self._process.pid)
        time.sleep(seconds)
        after, ended_s = self._at_step_end()
        used = {process: s - spent[process] for process, s in processor_s(self._process.pid).items()}
        self._signal(signal.SIGSTOP)
        if self._process.poll() is not None:
            raise RuntimeError(f"{self._process.args!r} ended during its turns; give it more epochs")
        return Turn(
            wall_s=ended_s - began_s,
            samples=after[SAMPLES] - before[SAMPLES],
            waited_s=after[WAITS] - before[WAITS],
            spent=used,
        )

    def end(self) -> None:
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _at_step_end(self) -> tuple[dict[str, float], float]:
        """The counters when the next step has ended, and that time."""
        deadline_s, first = time.monotonic() + START_S, self._counted()
        while (counted := self._counted())[SAMPLES] == first[SAMPLES] and time.monotonic() < deadline_s:
            time.sleep(EDGE_S)
        return counted, time.perf_counter()

    def _counted(self) -> dict[str, float]:
        counted = dict.fromkeys((SAMPLES, WAITS), 0.0)
        for sample in ours.scraped(self._port):
            if sample.name in counted:
                counted[sample.name] += sample.value
        return counted


def commands(config: Path, settings: Sequence[str], capacity: str, folder: Path) -> dict[str, tuple[list[str], int]]:
    """Per contestant: its command, and the port where it serves its counters."""
    given = ["--config", str(config), *(f"--set={setting}" for setting in settings)]
    *ports, stock_port, worker_port = ours.free_ports(6)
    stock = [*PYTHON, "benchmarks.training.stock", *given]
    found = {
        "stock": ([*stock, f"--port={stock_port}"], stock_port),
        "stock, worker": ([*stock, f"--port={worker_port}", "--worker"], worker_port),
    }
    for name, background in (("rowcast", "false"), ("rowcast, background", "true")):
        trainer_port, prefetcher_port = ports.pop(), ports.pop()
        own = [
            capacity,
            f"prefetcher.background={background}",
            f'metrics.trainer="127.0.0.1:{trainer_port}"',
            f'metrics.prefetcher="127.0.0.1:{prefetcher_port}"',
            f'job.run_dir="{folder / background}"',
        ]
        found[name] = (
            [*PYTHON, "rowcast.deploy.local", *given, *(f"--set={setting}" for setting in own)],
            trainer_port,
        )
    return found


def in_turn(
    started: dict[str, tuple[list[str], int]], warm_samples: int, rounds: int, seconds: float
) -> dict[str, list[Turn]]:
    found: dict[str, list[Turn]] = {name: [] for name in started}
    with ExitStack() as stack:
        contestants = {}
        for name, (command, port) in started.items():
            contestants[name] = Contestant(command, port)
            stack.callback(contestants[name].end)
            contestants[name].warm_up(warm_samples)
        for _, name in turns(list(contestants), rounds):
            found[name].append(contestants[name].turn(seconds))
    return found


def speed(turns_of: Sequence[Turn]) -> float:
    return statistics.median(turn.samples_per_s for turn in turns_of)


def faster_stock(found: dict[str, list[Turn]]) -> str:
    return max(STOCKS, key=lambda name: speed(found[name]))


def ratios(found: dict[str, list[Turn]], name: str) -> list[float]:
    """To the faster stock, round by round."""
    stocks = found[faster_stock(found)]
    return [own.samples_per_s / stock.samples_per_s for own, stock in zip(found[name], stocks, strict=True)]


def processor_ratio(found: dict[str, list[Turn]], name: str) -> float:
    """Processor time of a sample over that of `stock`, which has one process: the median of the rounds."""
    pairs = zip(found[name], found["stock"], strict=True)
    return statistics.median(own.processor_per_sample_s / stock.processor_per_sample_s for own, stock in pairs)


def table(found: dict[str, list[Turn]]) -> str:
    lines = [
        "| contestant | samples/s | over stock | its quartiles | waited for rows | processor time over stock's |",
        "|---|---|---|---|---|---|",
    ]
    for name, own in found.items():
        low, median, high = statistics.quantiles(ratios(found, name), n=4)
        waited = sum(turn.waited_s for turn in own) / sum(turn.wall_s for turn in own)
        lines.append(
            f"| {name} | {speed(own):,.0f} | {median:.2f} | {low:.2f} to {high:.2f} | {100 * waited:.2f} % "
            f"| {processor_ratio(found, name):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--name", required=True, help="of the file in build")
    parser.add_argument("--capacity", type=float, default=10.0, help="percent of the rows that an epoch touches")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a turn")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: quartiles need at least 2")
    settings = (*options.overrides, "data.eval_fraction=0")
    job = load_job(options.config, (*settings, 'cache.capacity="1GiB"', "data.epochs=1"))
    rows = touched(job, train_batches(job, None))
    capacity = ours.capacity_setting(job, rows.rows, options.capacity, rows.largest_batch)
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as folder:
        started = commands(options.config, settings, capacity, Path(folder))
        found = in_turn(started, WARM_STEPS * job.data.batch_size, options.rounds, options.seconds)
    # the location of the data does not affect the figures
    told = [setting for setting in settings if not setting.startswith("data.path")]
    print(f"{options.config.name} {' '.join(told)}, {options.rounds} rounds of {options.seconds:g} s")
    print(table(found))
    medians = {name: statistics.median(ratios(found, name)) for name in found}
    speeds = {name: [turn.samples_per_s for turn in own] for name, own in found.items()}
    write_result(f"steady-{options.name}", settings=[*told, capacity], to_stock=medians, samples_per_s=speeds)


if __name__ == "__main__":
    main()
