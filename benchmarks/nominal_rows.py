"""Does a job train as fast over 10**12 rows as over 3 * 10**7, and what memory does its prefetcher take?

Method: the demo's model, two real processes, and the same batches each time, with ids as they are or spread over the
tables; rounds in turn, each of

    in order    26 tables with Criteo Kaggle cardinalities, rows numbered table after table, however large the tables
    as touched  the same tables, rows numbered as they are touched, which is how a store in memory keeps that many
    10**12      ids spread over 10**12 rows in all, numbered as they are touched

Memory is the prefetcher's peak. Rows are counted in the run's last checkpoint, which has every row that was trained.
`--stages`: no runs, but the prefetcher's work for each step in one thread, in order and over 10**12 in turn: it plans,
reads the rows that come and writes those that leave. Processor time, steps of the second half; a busy machine disturbs
this ratio less than those of runs.

    python -m benchmarks.nominal_rows [--stages]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from benchmarks.machine import machine
from benchmarks.planner import SPREAD_ROWS, job, spread_ids
from benchmarks.processes import turns
from rowcast.job.schema import CRITEO_KAGGLE_CARDINALITIES, Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.cli import app
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.prefetcher.stores import memory_store
from rowcast.prefetcher.stores.store import finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.trainer.report.report_json import Report, read_report

NUM_TABLES = len(CRITEO_KAGGLE_CARDINALITIES)
BATCH, DIM, RECORD_BYTES = 2048, 16, 80
WAYS = ("in order", "as touched", "10**12")
SLOTS, HORIZON = 400_000, 16  # 32 MiB
IN_ORDER = "--in-order"  # with this option the file is a prefetcher that numbers rows table after table
MIB = 2**20


def open_batches(wide: Job, num_batches: int) -> Callable[[str, int], Iterator[Batch]]:
    """The data set of every run: the same batches, with ids spread over the job's tables."""
    narrow = job(BATCH, num_batches, CRITEO_KAGGLE_CARDINALITIES)
    rows = zip(wide.tables, CRITEO_KAGGLE_CARDINALITIES, strict=True)
    factors = np.array([table.num_embeddings // own for table, own in rows])

    def batches(split: str, epoch: int) -> Iterator[Batch]:
        for scheduled in schedule(narrow, open_reader(narrow)):
            if scheduled.kind == split:
                yield spread_ids(scheduled, factors).batch

    return batches


def job_file(folder: Path, rows: list[int], num_batches: int) -> Path:
    path = folder / "job.toml"
    path.write_text(
        f"""
        job = {{ run_dir = "{folder / "run"}", seed = 7 }}
        data.format = "benchmarks.nominal_rows:open_batches"
        data.batch_size = {BATCH}
        data.options.num_batches = {num_batches}
        tables_from = {{ cardinalities = {rows}, embedding_dim = {DIM} }}
        model = {{ kind = "dlrm", bottom_mlp = [512, 256, 64, {DIM}], top_mlp = [512, 256, 1] }}
        cache = {{ capacity = "32MiB" }}
        [optimizer]
        sparse = {{ kind = "rowwise_adagrad", lr = 0.05 }}
        dense = {{ kind = "sgd", lr = 0.1 }}
        """
    )
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    report: Report
    rows: int
    prefetcher_cpu_s: float  # its decoding process too


def train(way: str, num_batches: int, changes: Sequence[str] = ()) -> Trained:
    wide = [SPREAD_ROWS // NUM_TABLES] * NUM_TABLES if way == "10**12" else list(CRITEO_KAGGLE_CARDINALITIES)
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as path:
        folder = Path(path)
        config = job_file(folder, wide, num_batches)
        with (folder / "log").open("wb") as log:
            module = ["benchmarks.nominal_rows", IN_ORDER] if way == "in order" else ["prefetcher"]
            prefetcher, trainer = (start([*own, "run", *changes], config, log) for own in (module, ["trainer"]))
            codes = [trainer.wait(timeout=1800)]
            _, status, usage = os.wait4(prefetcher.pid, 0)
            codes += [os.waitstatus_to_exitcode(status)]
        if codes != [0, 0]:
            raise RuntimeError(f"trainer and prefetcher ended with {codes}: {(folder / 'log').read_text()[-2000:]}")
        newest = max(folder.glob("run/checkpoints/step-*/manifest.json"))
        [shard] = json.loads(newest.read_text())["shards"]
        return Trained(
            report=read_report(folder / "run" / "report.json"),
            rows=sum(layer["num_rows"] for layer in shard["layers"]),
            prefetcher_cpu_s=usage.ru_utime + usage.ru_stime,
        )


def start(module: list[str], config: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", *module, "--config", str(config)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)


class Prefetcher:
    """The stages of a prefetcher, in the caller's thread. Rows come back as they were sent."""

    def __init__(self, rows: list[int], num_batches: int, in_order_bytes: int) -> None:
        wide = job(BATCH, num_batches, rows, DIM)
        narrow = job(BATCH, num_batches, CRITEO_KAGGLE_CARDINALITIES, DIM)
        factors = np.array([own // old for own, old in zip(rows, CRITEO_KAGGLE_CARDINALITIES, strict=True)])
        self.batches = [spread_ids(scheduled, factors) for scheduled in schedule(narrow, open_reader(narrow))]
        [group] = groups = group_specs(wide)
        self._planner = RowPlanner(groups, (SLOTS,), depth=4, horizon=HORIZON)
        memory_store.IN_ORDER_BYTES = in_order_bytes
        self._store = TrackedStore(memory_store.MemoryStore(group), group, seed=7)
        self._records = np.zeros((SLOTS, group.record_bytes), np.uint8)

    def cpu_ms(self, batch: ScheduledBatch) -> float:
        began_ns = time.thread_time_ns()
        self._planner.add(batch)
        if self._planner.ready():
            _, plan = self._planner.plan()
            rows = plan.groups[0]
            finish(self._store.read(rows.fetch.keys, self._records[: len(rows.fetch)]))
            leaving = rows.evict.keys[: rows.num_dirty]
            finish(self._store.write(leaving, self._records[: len(leaving)]))
        return (time.thread_time_ns() - began_ns) / 1e6


def compare_stages(num_batches: int) -> None:
    ways = {
        "in order": Prefetcher(list(CRITEO_KAGGLE_CARDINALITIES), num_batches, 2**60),
        "10**12": Prefetcher([SPREAD_ROWS // NUM_TABLES] * NUM_TABLES, num_batches, 0),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for step in range(num_batches):
        for way, own in ways.items():
            times[way].append(own.cpu_ms(own.batches[step]))
    settled = slice(num_batches // 2, None)
    for way in ways:
        print(f"{way}: {statistics.median(times[way][settled]):.2f} ms a step")
    show(
        "10**12 over in order",
        [statistics.median(w / n for w, n in zip(times["10**12"][settled], times["in order"][settled], strict=True))],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in the job files of the runs")
    parser.add_argument("--stages", action="store_true")
    options = parser.parse_args()
    print(machine())
    if options.stages:
        compare_stages(options.batches)
        return
    train("10**12", 20)  # compiles
    trained: dict[str, list[Trained]] = {way: [] for way in WAYS}
    print(
        "| round | tables | samples/s | stall % | prefetcher cpu s | rows | MiB | prefetcher's peak MiB |", flush=True
    )
    print("|---|---|---|---|---|---|---|---|")
    for number, way in turns(options.ways, options.rounds):
        run = train(way, options.batches, [f"--set={setting}" for setting in options.set])
        trained[way].append(run)
        print(
            f"| {number} | {way} | {run.report.samples_per_s:,.0f} | {100 * run.report.stall_share:.1f} | "
            f"{run.prefetcher_cpu_s:.1f} | {run.rows:,} | {run.rows * RECORD_BYTES / MIB:.0f} | "
            f"{run.report.host_bytes / MIB:.0f} |",
            flush=True,
        )
    for way in WAYS[:2]:
        pairs = list(zip(trained["10**12"], trained[way], strict=False))
        show(f"samples/s, 10**12 over {way}", [a.report.samples_per_s / b.report.samples_per_s for a, b in pairs])
        show(
            f"prefetcher's processor time, 10**12 over {way}",
            [a.prefetcher_cpu_s / b.prefetcher_cpu_s for a, b in pairs],
        )


def show(name: str, ratios: list[float]) -> None:
    if ratios:
        print(f"{name}: median {statistics.median(ratios):.3f} of " + " ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    if sys.argv[1:2] == [IN_ORDER]:
        memory_store.IN_ORDER_BYTES = 2**60
        app(sys.argv[2:])
    else:
        main()
