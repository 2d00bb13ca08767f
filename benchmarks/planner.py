"""How fast is a plan, and where does its time go?

Method: 26 columns with Criteo Kaggle cardinalities, Zipf 1.05 over permuted ids (the project's own synthetic stream),
single-hot. One `RowPlanner` plans a stream of batches. A round times, one after the other in one thread and over the
same batch,

    unique      torch.unique(ids, return_inverse=True, return_counts=True) over the batch's keys
    grouping    Grouper.group, which replaces it
    plan        all that the planner does for a step: RowPlanner.add of a batch and RowPlanner.plan of another

once the cache is full and evicts. Figures are medians of the rounds. A second stream spreads its ids over 10**12 rows;
a third is planned with two threads, beside a pair of spin loops that shows what two threads can gain at that moment.
The fit is least squares of relative errors over batch sizes.

Two group planners plan the largest batches by turns, in one thread: one with a single part, one with eight that come
one after the other. So processor time tells what several threads would add and what they would divide.

    make bench-planner
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.machine import write_result
from rowcast.job.file import parse_job
from rowcast.job.schema import CRITEO_KAGGLE_CARDINALITIES, Job
from rowcast.job.tables import KEY_SHIFT, GroupSpec, group_specs
from rowcast.prefetcher.planner.eviction import new_policy
from rowcast.prefetcher.planner.group_planner import GroupPlanner
from rowcast.prefetcher.planner.grouping import Grouper
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.runtime.compiled import compiled_loop
from rowcast.runtime.stages import Part, Result, ThreadPool

BATCH_SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
HORIZON, DEPTH = 16, 4
SPREAD_ROWS = 10**12
NUM_PARTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Medians for one batch, in milliseconds."""

    batch_size: int
    num_threads: int
    spread: bool
    lookups: int
    distinct_rows: int
    rows_fetched: int
    unique_ms: float
    grouping_ms: float
    plan_ms: float

    @property
    def lookups_per_s(self) -> float:
        return 1e3 * self.lookups / self.plan_ms


def stream(batch_size: int, num_batches: int, spread: bool) -> tuple[tuple[GroupSpec, ...], list[ScheduledBatch]]:
    rows = [SPREAD_ROWS // len(CRITEO_KAGGLE_CARDINALITIES) if spread else n for n in CRITEO_KAGGLE_CARDINALITIES]
    factors = [wide // own if spread else 1 for wide, own in zip(rows, CRITEO_KAGGLE_CARDINALITIES, strict=True)]
    narrow, wide = job(batch_size, num_batches, CRITEO_KAGGLE_CARDINALITIES), job(batch_size, num_batches, rows)
    batches = schedule(narrow, open_reader(narrow))
    return group_specs(wide), [spread_ids(scheduled, np.array(factors)) for scheduled in batches]


def job(batch_size: int, num_batches: int, cardinalities: Sequence[int], dim: int = 16) -> Job:
    synthetic = {"samples": batch_size * num_batches, "zipf": 1.05}
    return job_over({"format": "synthetic", "batch_size": batch_size, "synthetic": synthetic}, cardinalities, dim)


def job_over(data: Mapping[str, Any], cardinalities: Sequence[int], dim: int = 16) -> Job:
    """A job for code that asks for one and trains nothing; `data` is that section of a job file."""
    return parse_job(
        {
            "job": {"run_dir": "unused"},
            "data": dict(data),
            "tables_from": {"cardinalities": list(cardinalities), "embedding_dim": dim},
            "model": {"kind": "dlrm", "bottom_mlp": [dim], "top_mlp": [1]},
            "optimizer": {"sparse": {"kind": "sgd", "lr": 0.1}, "dense": {"kind": "sgd", "lr": 0.1}},
            "cache": {"capacity": "1GiB"},
        }
    )


def spread_ids(scheduled: ScheduledBatch, factors: npt.NDArray[np.int64]) -> ScheduledBatch:
    batch = scheduled.batch
    ids = (batch.ids.reshape(len(factors), -1) * factors[:, None]).ravel()
    return ScheduledBatch.at(
        step=scheduled.step,
        kind=scheduled.kind,
        train_step=scheduled.train_step,
        epoch=scheduled.epoch,
        batch=Batch(dense=batch.dense, labels=batch.labels, ids=ids),
    )


def measure(batch_size: int, rounds: int, *, spread: bool = False, num_threads: int = 1) -> Times:
    """Has slots for two batches, so that a few steps fill them; a large machine would have more and evict less."""
    groups, batches = stream(batch_size, HORIZON + 12 + rounds, spread)
    grouper = Grouper(groups[0], len(CRITEO_KAGGLE_CARDINALITIES))
    slots = 2 * max(grouper.group(grouper.lookups(scheduled.batch)).num_unique for scheduled in batches)
    planner = RowPlanner(groups, [(slots,)], DEPTH, HORIZON, num_threads=num_threads)
    table_of_lookup = np.repeat(np.arange(len(CRITEO_KAGGLE_CARDINALITIES)), batch_size) << KEY_SHIFT
    times: list[tuple[float, float, float]] = []
    fetched: list[int] = []
    for scheduled in batches:
        keys = torch.from_numpy(scheduled.batch.ids | table_of_lookup)
        before = planner.counters.rows_fetched
        unique_s = seconds(partial(torch.unique, keys, return_inverse=True, return_counts=True))
        grouping_s = seconds(partial(group, grouper, scheduled.batch))
        plan_s = seconds(partial(add_and_plan, planner, scheduled))
        times.append((unique_s, grouping_s, plan_s))
        fetched.append(planner.counters.rows_fetched - before)
    unique_ms, grouping_ms, plan_ms = (1e3 * statistics.median(own) for own in zip(*times[-rounds:], strict=True))
    return Times(
        batch_size=batch_size,
        num_threads=num_threads,
        spread=spread,
        lookups=len(batches[-1].batch.ids),
        distinct_rows=grouper.group(grouper.lookups(batches[-1].batch)).num_unique,
        rows_fetched=int(statistics.median(fetched[-rounds:])),
        unique_ms=unique_ms,
        grouping_ms=grouping_ms,
        plan_ms=plan_ms,
    )


class OneAfterAnother(ThreadPool):
    """Runs all parts in this thread. `longest_s`: the sum of the longest part of each region; `sum_s`: of all parts."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.num_threads = num_parts
        self.longest_s = self.sum_s = 0.0

    def over(self, parts: Sequence[Part], work: Callable[[Part], Result]) -> list[Result]:
        found, spent = list[Result](), list[float]()
        for part in parts:
            began = time.thread_time()
            found.append(work(part))
            spent.append(time.thread_time() - began)
        self.longest_s += max(spent)
        self.sum_s += sum(spent)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class InParts:
    """Medians of processor time to enter and move a batch, over those of a planner with one part."""

    batch_size: int
    num_parts: int
    whole: float
    longest: float  # the longest parts and the serial rest


def measure_parts(batch_size: int, rounds: int, num_parts: int) -> InParts:
    groups, batches = stream(batch_size, HORIZON + 12 + rounds, spread=False)
    grouper = Grouper(groups[0], len(CRITEO_KAGGLE_CARDINALITIES))
    keys = [grouper.group(grouper.lookups(scheduled.batch)).keys for scheduled in batches]
    slots = 2 * max(map(len, keys))
    pools = [OneAfterAnother(1), OneAfterAnother(num_parts)]
    planners = [GroupPlanner(groups[0], slots, new_policy("lookahead", ()), "cache.capacity", pool) for pool in pools]
    ratios: list[tuple[float, float]] = []
    for step in range(len(keys)):
        spent = [0.0, 0.0]
        for which in (0, 1) if step % 2 else (1, 0):
            pools[which].longest_s = pools[which].sum_s = 0.0
            began = time.thread_time()
            planners[which].enter(keys[step], step)
            if step >= HORIZON:
                planners[which].move(len(keys[step - HORIZON]), step - HORIZON, step, train=True)
            spent[which] = time.thread_time() - began
        one, whole = spent
        ratios.append((whole / one, (whole - pools[1].sum_s + pools[1].longest_s) / one))
    whole, longest = (statistics.median(own) for own in zip(*ratios[-rounds:], strict=True))
    return InParts(batch_size=batch_size, num_parts=num_parts, whole=whole, longest=longest)


@compiled_loop
def spin(num_rounds: int) -> int:
    found = 0
    for i in range(num_rounds):
        found = (found * 31 + i) & 0xFFFF
    return found


def spin_gain(num_threads: int = 2, num_rounds: int = 30_000_000) -> float:
    """Returns how much faster threads spin than one does their work: less than their number if cores are taken."""
    spin(1)  # compiles
    with ThreadPoolExecutor(num_threads) as pool:
        alone = seconds(lambda: [spin(num_rounds) for _ in range(num_threads)])
        return alone / seconds(lambda: list(pool.map(spin, [num_rounds] * num_threads)))


def group(grouper: Grouper, batch: Batch) -> None:
    grouper.group(grouper.lookups(batch))


def add_and_plan(planner: RowPlanner, scheduled: ScheduledBatch) -> None:
    planner.add(scheduled)
    if planner.ready():
        planner.plan()


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def fit(times: list[Times]) -> tuple[float, float, float]:
    """Returns (a, b, largest relative error) of plan time = a * look-ups + b * distinct rows; a and b in ns."""
    features = np.array([(own.lookups, own.distinct_rows) for own in times], float)
    plan_ns = np.array([own.plan_ms for own in times]) * 1e6
    (a, b), *_ = np.linalg.lstsq(features / plan_ns[:, None], np.ones(len(times)), rcond=None)
    return float(a), float(b), float(np.abs(features @ [a, b] / plan_ns - 1).max())


def report(
    times: list[Times], spread: Times, threaded: Times, alone: Times, spun: float, parts: InParts
) -> Iterator[str]:
    yield "| batch | look-ups | distinct rows | fetched | torch.unique ms | grouping ms | plan ms | M look-ups/s |"
    yield "|---|---|---|---|---|---|---|---|"
    for own in [*times, spread]:
        label = f"{own.batch_size} over 10^12 rows" if own.spread else str(own.batch_size)
        yield (
            f"| {label} | {own.lookups:,} | {own.distinct_rows:,} | {own.rows_fetched:,} | {own.unique_ms:.2f} | "
            f"{own.grouping_ms:.2f} "
            f"| {own.plan_ms:.2f} | {own.lookups_per_s / 1e6:.1f} |"
        )
    a, b, error = fit(times)
    main = next(own for own in times if own.batch_size == spread.batch_size)
    yield ""
    within = f"within {100 * error:.0f} % from batch {times[0].batch_size} up"
    yield f"plan time = {a:.1f} ns x look-ups + {b:.1f} ns x distinct rows, {within}"
    yield f"grouping: {main.unique_ms / main.grouping_ms:.1f} times as fast as torch.unique"
    yield f"whole plan: {main.plan_ms / main.unique_ms:.2f} of its time"
    yield f"over 10^12 rows: {spread.plan_ms / main.plan_ms:.2f} times the time"
    gain = alone.plan_ms / threaded.plan_ms
    yield f"two threads: {gain:.2f} times as fast as one; two spin loops: {spun:.2f}"
    yield (
        f"{parts.num_parts} parts at batch {parts.batch_size}, enter and move, over one part: {parts.whole:.2f}; "
        f"the longest parts and the serial rest {parts.longest:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--batch-size", type=int, default=16384, help="of the comparison over 10^12 rows and with two threads"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measure(1024, 2)  # compiles
    times = [measure(batch_size, arguments.rounds) for batch_size in BATCH_SIZES]
    spread = measure(arguments.batch_size, arguments.rounds, spread=True)
    alone, threaded = (measure(arguments.batch_size, arguments.rounds, num_threads=n) for n in (1, 2))
    spun = spin_gain()
    parts = measure_parts(BATCH_SIZES[-1], arguments.rounds, NUM_PARTS)
    print("\n".join(report(times, spread, threaded, alone, spun, parts)))
    all_times = [asdict(own) for own in [*times, spread, alone, threaded]]
    write_result("planner", times=all_times, fit=fit(times), spin_gain=spun, parts=asdict(parts))


if __name__ == "__main__":
    main()
