"""What does safety cost: a checkpoint every 100 train steps, and `--verify`?

Method: the retail job (examples/retail.toml), 4 epochs, two processes. Each round runs every way once, in an order that
rotates from round to round, so that other load on the machine affects all alike. A way's cost is the median over the
rounds of its time over that of the plain way in the same round. Time is from the first step to the last barrier, which
makes a checkpoint in every way. The table also has the processor time of both processes, which varies less on a busy
machine.

    make bench-safety ROWCAST_RETAIL=folder        the folder holds train.tsv
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.processes import start, terminate, turns
from rowcast.trainer.report.report_json import read_report

RETAIL = Path(__file__).parents[1] / "examples" / "retail.toml"
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Way:
    settings: tuple[str, ...] = ()  # of both commands
    options: tuple[str, ...] = ()  # of `prefetcher run`


WAYS: dict[str, Way] = {
    PLAIN: Way(("checkpoint.every=0",)),
    "--verify": Way(("checkpoint.every=0",), ("--verify",)),
    "--verify-share 1": Way(("checkpoint.every=0",), ("--verify-share", "1")),
    "checkpoint.every = 100": Way(("checkpoint.every=100",)),
}


@dataclass(frozen=True, slots=True)
class Timed:
    wall_s: float
    cpu_s: float  # of both processes, including start-up
    samples_per_s: float


def run(way: Way, shared: Sequence[str]) -> Timed:
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as folder:
        run_dir = Path(folder) / "run"
        settings = [
            f"--set={setting}" for setting in (*shared, *way.settings, f"job.run_dir={json.dumps(str(run_dir))}")
        ]
        before_s = children_cpu_s()
        prefetcher = start("prefetcher", ["--config", str(RETAIL), *settings, *way.options])
        trainer = start("trainer", ["--config", str(RETAIL), *settings])
        terminate({"trainer": trainer, "prefetcher": prefetcher}, 1800)
        report = read_report(run_dir / "report.json")
        shutil.rmtree(run_dir)
        return Timed(report.wall_s, children_cpu_s() - before_s, report.samples_per_s)


def children_cpu_s() -> float:
    """Processor time of all child processes that have ended, and of their children."""
    times = os.times()
    return times.children_user + times.children_system


def measured(names: Sequence[str], rounds: int, shared: Sequence[str]) -> dict[str, list[Timed]]:
    times: dict[str, list[Timed]] = {name: [] for name in names}
    for number, name in turns(names, rounds):
        times[name].append(run(WAYS[name], shared))
        print(f"round {number}: {name}: {times[name][-1].wall_s:.1f} s", file=sys.stderr, flush=True)
    return times


def cost(times: Mapping[str, Sequence[Timed]], name: str, field: str) -> float:
    """Percent over the plain way of the same round; the median of the rounds."""
    pairs = zip(times[name], times[PLAIN], strict=True)
    ratios = [float(getattr(own, field) / getattr(plain, field)) for own, plain in pairs]
    return 100 * (statistics.median(ratios) - 1)


def table(times: Mapping[str, Sequence[Timed]]) -> str:
    lines = [
        "| | seconds, each round | samples/s | time over plain | processor time over plain |",
        "|---|---|---|---|---|",
    ]
    for name, own in times.items():
        seconds = ", ".join(f"{timed.wall_s:.1f}" for timed in own)
        rate = statistics.median(timed.samples_per_s for timed in own)
        costs = " | ".join(
            "" if name == PLAIN else f"{cost(times, name, field):+.1f} %" for field in ("wall_s", "cpu_s")
        )
        lines.append(f"| {name} | {seconds} | {rate:,.0f} | {costs} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, default=os.environ.get("ROWCAST_RETAIL"), help="the folder of the log")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--way", action="append", choices=[name for name in WAYS if name != PLAIN], help="repeatable; all by default"
    )
    options = parser.parse_args()
    if options.log is None:
        parser.error("name the folder of the log: --log, or ROWCAST_RETAIL")
    shared = (
        f"data.path={json.dumps(str(Path(options.log).absolute() / 'train.tsv'))}",
        f"data.epochs={options.epochs}",
        'metrics.prefetcher="127.0.0.1:0"',
        'metrics.trainer="127.0.0.1:0"',
    )
    names = [PLAIN, *(options.way or [name for name in WAYS if name != PLAIN])]
    times = measured(names, options.rounds, shared)
    print(table(times))
    print(" ".join(f"{name}={value}" for name, value in machine().items()))


if __name__ == "__main__":
    main()
