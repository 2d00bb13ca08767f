"""What does it cost to number rows as they are touched, instead of table after table?

Method: some rows of 10**12 are added in batches, in a random order. Then batches of 20,000 touched rows are looked up
and their records of 80 bytes gathered; beside it, in turn, as many records at random places of an array that holds
every row. Processor time of one thread, medians.

    python -m benchmarks.touched_rows
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.machine import machine
from rowcast.prefetcher.stores.row_loops import gather
from rowcast.prefetcher.stores.touched_rows import TouchedRows
from rowcast.runtime.arrays import I64

NOMINAL_ROWS = 10**12
BATCH, WORDS = 20_000, 10


def measure(num_touched: int, rounds: int) -> str:
    random = np.random.default_rng(0)
    keys: I64 = np.unique(random.integers(0, NOMINAL_ROWS, num_touched))
    rows, order = TouchedRows("benchmark", 2 * num_touched), random.permutation(keys)
    batches = [np.sort(order[start : start + BATCH]) for start in range(0, len(order), BATCH)]
    added = [cpu_ns(lambda own=own: rows.added(own)) / len(own) for own in batches]  # type: ignore[misc]
    records = np.ones((len(keys), WORDS), np.uint64)
    marks, out = np.ones(len(keys), np.uint8), np.empty((BATCH, WORDS), np.uint64)
    found, gathered, dense = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        asked = np.sort(random.choice(keys, BATCH))
        found.append(cpu_ns(lambda asked=asked: rows.of(asked)) / BATCH)  # type: ignore[misc]
        numbers, places = rows.of(asked), np.sort(random.integers(0, len(keys), BATCH))
        gathered.append(cpu_ns(lambda numbers=numbers: gather(records, marks, numbers, out)) / BATCH)  # type: ignore[misc]
        dense.append(cpu_ns(lambda places=places: gather(records, marks, places, out)) / BATCH)  # type: ignore[misc]
    cells = rows.nbytes / rows.count - 8
    medians = " | ".join(f"{statistics.median(times):.0f}" for times in (added, found, gathered, dense))
    return f"| {rows.count:,} | {cells:.1f} | {medians} |"


def cpu_ns(work: Callable[[], object]) -> float:
    began_ns = time.thread_time_ns()
    work()
    return time.thread_time_ns() - began_ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    measure(100_000, 2)  # compiles
    print(machine())
    print("| touched rows | bytes of cells a row | ns a row: added | found | gathered | gathered in table order |")
    print("|---|---|---|---|---|---|")
    for num_touched in (10**6, 10**7):
        print(measure(num_touched, arguments.rounds))


if __name__ == "__main__":
    main()
