"""What does an order of the data cost, in rows fetched, and what is it worth, in AUC?

Method: DLRM with rows of 8 floats trains one epoch of each log in each order, batch 2,048, the last tenth held out. A
seed decides first values and shuffles, so orders are compared pair by pair. AUC comes from one process with every row
on the device (`benchmarks/training/resident.py`), whose bits are those of both processes: for the first seed of each
order both processes run as well, at a cache of a tenth of the rows, and every loss, the AUC and the rows fetched must
be equal. Rows fetched are `prefetcher simulate`'s, of the first seed. Nothing is timed.

    python -m benchmarks.orders FOLDER...       folders with day_<n>_{dense,sparse,labels}.npy

Every result is kept in build/orders as soon as it is there, and a sweep that was interrupted goes on.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.traffic import log_cardinalities, rows_touched
from benchmarks.training.resident import ResidentRun
from rowcast.analysis.profile.profile import ProfileRequest, profile_job
from rowcast.analysis.sample import Amount
from rowcast.analysis.simulate.grid import Grid
from rowcast.analysis.simulate.simulate import simulate
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.prefetcher.planner.pin_files import save_pins
from rowcast.prefetcher.readers.data_files import split_rows
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.prefetcher.readers.shuffle import block_permutation
from rowcast.runtime.arrays import I64
from rowcast.runtime.memory import free_memory
from rowcast.trainer.report.report_json import read_report

BUILD = Path("build/orders")
RESULTS = Path(__file__).parent / "results" / "orders.json"
FIGURE = Path(__file__).parent.parent / "docs" / "img" / "orders.png"
BATCH, EVAL_FRACTION, DIM = 2048, 0.1, 8
PERCENTS = (5, 10, 20)  # capacities, of the rows touched
PERCENT_RUN = 10
SORTED_WINDOW = 65536
BLOCKS = 20
MAX_SORTED_IDS = 8000
BASE = "full"  # the order that others are compared with


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    name: str
    shuffle: str = "full"
    hot_percent: int | None = None  # hot blocks, with this share of the rows touched as hot rows
    chunk: int | None = None  # samples in a chunk of a sorted window


ORDERS = (
    Order(name="as logged", shuffle="none"),
    Order(name="window:16384", shuffle="window:16384"),
    Order(name="window:65536", shuffle="window:65536"),
    Order(name=BASE),
    *(Order(name=f"full, sorted windows, chunks of {chunk}", chunk=chunk) for chunk in (16, 1024)),
    *(Order(name=f"full, hot-blocks:{BLOCKS}, {percent} % of rows hot", hot_percent=percent) for percent in (20, 40)),
)


class Log:
    """A log, and what is made of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name.partition("-")[0]
        self.build = BUILD / self.name
        self.build.mkdir(parents=True, exist_ok=True)

    @cached_property
    def cardinalities(self) -> list[int]:
        return log_cardinalities(self.folder)

    @cached_property
    def rows_touched(self) -> int:
        return rows_touched(self.job(ORDERS[0], 0))

    def job(self, order: Order, seed: int) -> Job:
        data = {"format": "criteo-npy", "path": str(self.folder), "shuffle": order.shuffle}
        if order.chunk is not None:
            data |= {"path": str(self.sorted_folder(order, seed)), "shuffle": "none"}
        if order.hot_percent is not None:
            data |= {"order": f"hot-blocks:{BLOCKS}", "hot": str(self.hot_rows(order.hot_percent))}
        return parse_job(
            {
                "job": {"run_dir": str(self.build / "run"), "seed": seed},
                "data": {**data, "batch_size": BATCH, "eval_fraction": EVAL_FRACTION},
                "tables_from": {"cardinalities": self.cardinalities, "embedding_dim": DIM},
                "model": {"kind": "dlrm", "bottom_mlp": [64, DIM], "top_mlp": [64, 1]},
                "optimizer": {"sparse": {"kind": "adagrad", "lr": 0.02}, "dense": {"kind": "sgd", "lr": 0.1}},
                "cache": {"capacity": "1GiB"},
                "trainer": {"device": "cpu", "threads": 1},
                "metrics": {"prefetcher": "127.0.0.1:0", "trainer": "127.0.0.1:0"},
            },
            order.name,
        )

    def hot_rows(self, percent: int) -> Path:
        """The rows that `prefetcher profile` picks from half of the batches."""
        path = self.build / f"hot-{percent}.safetensors"
        if not path.exists():
            budget = f"{self.rows_touched * percent // 100} rows"
            request = ProfileRequest(amount=Amount(share=1.0), budgets=(budget,), memory_bytes=free_memory() / 2)
            save_pins(path, profile_job(self.job(ORDERS[0], 0), request)[1], {})
        return path

    def sorted_folder(self, order: Order, seed: int) -> Path:
        """The log in the order of `full`, in which the chunks of sorted windows take turns; only the newest is kept."""
        folder = self.build / f"sorted-{order.chunk}-{seed}"
        if not folder.exists():
            for old in self.build.glob("sorted-*"):
                shutil.rmtree(old)
            unfinished = self.build / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            sparse = np.load(self.folder / "day_0_sparse.npy", mmap_mode="r")
            train, held_out = split_rows(len(sparse), EVAL_FRACTION)
            assert order.chunk is not None, f"{order.name} has no chunks"
            rows = sorted_order(seed, sparse[: train.stop, self.sorted_column], order.chunk)
            rows = np.concatenate([rows, np.arange(held_out.start, held_out.stop)])
            for part in ("dense", "sparse", "labels"):
                values = np.load(self.folder / f"day_0_{part}.npy", mmap_mode="r")
                np.save(unfinished / f"day_0_{part}.npy", values[rows])
            unfinished.rename(folder)
        return folder

    @cached_property
    def sorted_column(self) -> int:
        """The column with the most ids that is not too large to bring neighbours together."""
        return max((rows, column) for column, rows in enumerate(self.cardinalities) if rows <= MAX_SORTED_IDS)[1]


def sorted_order(seed: int, ids: I64, chunk: int) -> I64:
    """A full shuffle in windows that are sorted by id (ids in a random order), cut into chunks and shuffled again."""
    random, rows = np.random.default_rng(seed), block_permutation(seed, 0, 0, len(ids))
    rank, parts = random.permutation(int(ids.max()) + 1), []
    for start in range(0, len(rows), SORTED_WINDOW):
        window = rows[start : start + SORTED_WINDOW]
        window = window[np.argsort(rank[ids[window]], kind="stable")]
        chunks = [window[first : first + chunk] for first in range(0, len(window), chunk)]
        parts += [chunks[i] for i in random.permutation(len(chunks))]
    return np.concatenate(parts)


def trained(job: Job) -> tuple[float, list[float]]:
    """AUC and the loss of each train step, of one process with every row on the device."""
    batches = list(schedule(job, open_reader(job)))
    run = ResidentRun(job, batches, torch.device("cpu"))
    for scheduled, step, loss in zip(batches, run.steps, run.losses, strict=True):
        if scheduled.kind == "train":
            run.runner.train(step, loss)
        else:
            run.runner.evaluate(step)
    auc = run.runner.close_evaluation().result().auc
    assert auc is not None, "both labels occur"
    return auc, [loss.item() for scheduled, loss in zip(batches, run.losses, strict=True) if scheduled.kind == "train"]


def rows_fetched(log: Log, job: Job) -> dict[str, float]:
    """Rows fetched a step, evaluation included, by the capacity in percent of the rows touched. A capacity that the
    largest batch does not fit is left out."""
    capacities = {f"{log.rows_touched * percent // 100} rows": str(percent) for percent in PERCENTS}
    results = simulate(
        job, Grid(policies=["lookahead"], capacities=list(capacities)), lambda own: schedule(own, open_reader(own))
    )
    found = {}
    for own in results:
        if own.rows_fetched is not None and own.steps is not None:
            found[capacities[str(own.capacity)]] = own.rows_fetched / (own.steps + (own.eval_steps or 0))
    return found


def both_processes(log: Log, job: Job, auc: float, losses: list[float], fetched: float) -> None:
    """Runs prefetcher and trainer, and ends the benchmark if a loss, the AUC or the rows fetched differ."""
    shutil.rmtree(job.run_dir, ignore_errors=True)
    content = msgspec.to_builtins(job)
    content["cache"]["capacity"] = f"{log.rows_touched * PERCENT_RUN // 100} rows"
    file = log.build / "job.json"
    file.write_bytes(msgspec.json.encode(content))
    subprocess.run(
        [sys.executable, "-m", "rowcast.deploy.local", "--config", str(file)], check=True, stdout=subprocess.DEVNULL
    )
    report, own = read_report(job.run_dir / "report.json"), np.fromfile(job.run_dir / "losses.f32", np.float32)
    steps = report.steps + report.eval_steps
    if own.tolist() != losses or report.auc != auc or report.rows_fetched != round(fetched * steps):
        sys.exit(
            f"{job.data}: both processes gave AUC {report.auc} and {report.rows_fetched} rows, not {auc} and "
            f"{fetched * steps}; losses differ in {np.count_nonzero(own != losses)} of {len(losses)} steps"
        )


class Kept:
    """The results so far: a line of JSON each."""

    def __init__(self, log: Log) -> None:
        self._path = log.build / "results.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def has(self, order: Order, seed: int) -> bool:
        return any((line["order"], line["seed"]) == (order.name, seed) for line in self.lines)

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def sweep(log: Log, orders: tuple[Order, ...], seeds: range) -> list[dict[str, Any]]:
    kept = Kept(log)
    for seed in seeds:
        for order in orders:
            if kept.has(order, seed):
                continue
            job = log.job(order, seed)
            auc, losses = trained(job)
            line: dict[str, Any] = {"order": order.name, "seed": seed, "auc": auc}
            if seed == seeds[0]:
                line["rows_fetched"] = rows_fetched(log, job)
                both_processes(log, job, auc, losses, line["rows_fetched"][str(PERCENT_RUN)])
            kept.add(line)
    return kept.lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    order: str
    rows_fetched: Mapping[str, float]
    num_seeds: int
    auc: float
    error: float  # standard error of the mean
    gain: float  # over the full shuffle, mean over seeds
    gain_error: float  # its standard error


def summaries(lines: list[dict[str, Any]]) -> Iterator[Summary]:
    by_order: dict[str, dict[int, float]] = {}
    for line in lines:
        by_order.setdefault(line["order"], {})[line["seed"]] = line["auc"]
    fetched = {line["order"]: line["rows_fetched"] for line in lines if "rows_fetched" in line}
    for order in (order.name for order in ORDERS if order.name in by_order):
        aucs = by_order[order]
        gains = [auc - by_order[BASE][seed] for seed, auc in aucs.items()]
        yield Summary(
            order=order,
            rows_fetched=fetched[order],
            num_seeds=len(aucs),
            auc=mean(aucs.values()),
            error=standard_error(list(aucs.values())),
            gain=mean(gains),
            gain_error=standard_error(gains),
        )


def standard_error(values: list[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def print_table(log: str, found: list[Summary]) -> None:
    print(f"\n| {log} | {' | '.join(f'rows, {percent} %' for percent in PERCENTS)} | AUC | against `{BASE}` |")
    print("|---|" + "---|" * (len(PERCENTS) + 2))
    for own in found:
        rows = " | ".join(rows_text(own.rows_fetched.get(str(percent))) for percent in PERCENTS)
        gain = "" if own.order == BASE else f"{own.gain:+.4f} +- {own.gain_error:.4f}"
        print(f"| {own.order} | {rows} | {own.auc:.4f} +- {own.error:.4f} | {gain} |")


def rows_text(rows: float | None) -> str:
    return "-" if rows is None else f"{rows:,.0f}"


def draw(results: Mapping[str, list[Summary]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(6 * len(results), 4.5), squeeze=False)
    for ax, (log, found) in zip(axes[0], results.items(), strict=True):
        for own in found:
            rows = own.rows_fetched[str(PERCENT_RUN)]
            ax.errorbar(rows, own.auc, yerr=own.error, marker="o", capsize=3, linestyle="none", label=own.order)
        ax.set(
            title=f"{log}, {found[0].num_seeds} seeds",
            xlabel=f"rows fetched a step, cache of {PERCENT_RUN} % of the rows",
            ylabel="AUC, +- its standard error",
        )
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", default="", help="regular expression: only these orders, and no table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    orders = tuple(order for order in ORDERS if re.search(options.only, order.name))
    results = {}
    for log in map(Log, options.folders):
        lines = sweep(log, orders, range(options.seeds))
        if not options.only:
            results[log.name] = list(summaries(lines))
    if options.only:
        return
    for name, found in results.items():
        print_table(name, found)
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    draw(results)


if __name__ == "__main__":
    main()
