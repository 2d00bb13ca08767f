"""What does it cost to number rows as they are touched, instead of table after table?

Method: rows of 26 tables are added in batches, in a random order. Then batches of 20,000 touched rows are looked up and
their records of 80 bytes gathered; beside it, in turn, as many records at random places of an array that holds every
row. Processor time of one thread; medians, that of the ratios among them. "Held" is the longest time for which a batch
of new rows kept a look-up of another thread waiting, growth included.

    python -m benchmarks.touched_rows
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.machine import machine
from benchmarks.planner import job
from rowcast.job.tables import group_specs, make_keys
from rowcast.prefetcher.stores.row_loops import gather
from rowcast.prefetcher.stores.touched_rows import TouchedRows, reserved
from rowcast.runtime.arrays import I64

NUM_TABLES = 26
BATCH, WORDS = 20_000, 10


def measure(nominal: int, num_touched: int, rounds: int) -> str:
    random, rows_a_table = np.random.default_rng(0), nominal // NUM_TABLES
    [group] = group_specs(job(BATCH, 1, [rows_a_table] * NUM_TABLES))
    keys: I64 = np.concatenate(
        [
            make_keys(table, np.unique(random.integers(0, rows_a_table, num_touched // NUM_TABLES)))
            for table in range(NUM_TABLES)
        ]
    )
    rows, order = TouchedRows(group, 2 * num_touched), random.permutation(keys)
    batches = [np.sort(order[start : start + BATCH]) for start in range(0, len(order), BATCH)]
    added = [cpu_ns(lambda own=own: rows.added(own)) / len(own) for own in batches]  # type: ignore[misc]
    touched, in_order = records(len(keys), huge_pages=True), records(len(keys), huge_pages=False)
    marks, out = np.ones(len(keys), np.uint8), np.empty((BATCH, WORDS), np.uint64)
    found, gathered, dense = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        asked = np.sort(random.choice(keys, BATCH, replace=False))
        found.append(cpu_ns(lambda asked=asked: rows.of(asked)) / BATCH)  # type: ignore[misc]
        numbers, places = rows.of(asked), np.sort(random.choice(len(keys), BATCH, replace=False))
        gathered.append(cpu_ns(lambda numbers=numbers: gather(touched, marks, numbers, out)) / BATCH)  # type: ignore[misc]
        dense.append(cpu_ns(lambda places=places: gather(in_order, marks, places, out)) / BATCH)  # type: ignore[misc]
    ratio = statistics.median((a + b) / c for a, b, c in zip(found, gathered, dense, strict=True))
    medians = " | ".join(f"{statistics.median(times):.0f}" for times in (added, found, gathered, dense))
    held_ms = max(added) * BATCH / 1e6
    return (
        f"| {nominal:,} | {rows.count:,} | {rows.nbytes / rows.count:.1f} | {medians} | {ratio:.2f} | {held_ms:.1f} |"
    )


def records(num_rows: int, *, huge_pages: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    words = reserved(num_rows * WORDS, huge_pages=huge_pages).reshape(num_rows, WORDS)
    words.fill(1)
    return words


def cpu_ns(work: Callable[[], object]) -> float:
    began_ns = time.thread_time_ns()
    work()
    return time.thread_time_ns() - began_ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    measure(10**6, 100_000, 2)  # compiles
    print(machine())
    print(
        "| nominal rows | touched | bytes each | ns each: added | found | gathered | in table order | ratio | held ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for nominal, num_touched in ((10**7, 10**6), (10**9, 10**6), (10**12, 10**6), (10**12, 10**7)):
        print(measure(nominal, num_touched, arguments.rounds))


if __name__ == "__main__":
    main()
