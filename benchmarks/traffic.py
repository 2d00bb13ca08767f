"""How many rows does each policy fetch on real logs, against Belady's rule with the whole future?

Method: `rowcast simulate` over each log, batch 2,048, one epoch, at capacities that are a percentage of the distinct
rows that the log touches. The horizon of look-ahead is "auto" within its default budget, 8 and 32 batches.
Nothing is timed, so the figures do not depend on the machine.

    python -m benchmarks.traffic --percent 5,10,20 FOLDER...       folders with day_<n>_{dense,sparse,labels}.npy
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.machine import write_result
from benchmarks.planner import job_over
from rowcast.analysis.simulate.simulate import POLICIES, Grid, Simulation, simulate
from rowcast.job.schema import Horizon, Job
from rowcast.job.tables import group_specs
from rowcast.prefetcher.planner.planner import groupers_of
from rowcast.prefetcher.readers.reader import open_reader, schedule

HORIZONS: tuple[Horizon, ...] = ("auto", 8, 32)


def log_cardinalities(folder: Path) -> list[int]:
    sparse = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("day_*_sparse.npy"))]
    return [1 + max(int(part[:, column].max()) for part in sparse) for column in range(sparse[0].shape[1])]


def log_job(folder: Path, batch_size: int) -> Job:
    data = {"format": "criteo-npy", "path": str(folder), "batch_size": batch_size}
    return job_over(data, log_cardinalities(folder))


def rows_touched(job: Job) -> int:
    (grouper,) = groupers_of(group_specs(job))
    keys = [grouper.group(grouper.lookups(scheduled.batch)).keys for scheduled in schedule(job, open_reader(job))]
    return len(np.unique(np.concatenate(keys)))


def simulated(job: Job, percents: list[int]) -> Iterator[tuple[int, list[Simulation]]]:
    touched = rows_touched(job)
    for percent in percents:
        grid = Grid(policies=POLICIES, capacities=[f"{touched * percent // 100} rows"], horizons=HORIZONS)
        yield percent, simulate(job, grid, lambda own: schedule(own, open_reader(own)))


def ratios(results: list[Simulation]) -> dict[str, float]:
    """`policy` or `policy horizon` -> rows fetched over the bound's."""
    found = {}
    for own in results:
        name = own.policy if own.horizon in (None, "auto") else f"{own.policy} {own.horizon}"
        if own.ratio_to_bound is not None:
            found[name] = own.ratio_to_bound
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--percent", default="5,10,20", help="capacities, of the rows touched")
    parser.add_argument("--batch-size", type=int, default=2048)
    arguments = parser.parse_args()
    lines = []
    for folder in arguments.folders:
        job = log_job(folder, arguments.batch_size)
        for percent, results in simulated(job, [int(p) for p in arguments.percent.split(",")]):
            bound = next(own.bound_rows_fetched for own in results if own.bound_rows_fetched)
            lines.append(
                {"log": folder.name, "percent": percent, "bound_rows_fetched": bound, "ratios": ratios(results)}
            )
            columns = list(lines[-1]["ratios"])
            if len(lines) == 1:
                print(f"| log | capacity | bound | {' | '.join(columns)} |\n|{'---|' * (3 + len(columns))}")
            cells = " | ".join(f"{lines[-1]['ratios'].get(name, float('nan')):.3f}" for name in columns)
            print(f"| {folder.name} | {percent} % | {bound:,} | {cells} |", flush=True)
    write_result(f"traffic-{arguments.folders[0].name.partition('-')[0]}", lines=lines)


if __name__ == "__main__":
    main()
