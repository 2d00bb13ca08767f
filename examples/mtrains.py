"""MTrainS (arXiv 2305.01515) on any job's log: what each table asks of each tier, and so which tables belong on a disk.

    python -m examples.mtrains JOB.toml --store-memory 448MiB --step-ms 20

Rows move as the planner of a run with this job would move them; nothing is trained.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from rowcast.analysis.scan import StepRows
from rowcast.analysis.simulate.moves import entries
from rowcast.analysis.simulate.simulate import with_memory
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.job.tables import KEY_SHIFT, group_specs
from rowcast.prefetcher.planner.first_batches import MEASURED_BATCHES, measure, slots_of
from rowcast.prefetcher.planner.planner import Slots, groupers_of, job_planner
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.prefetcher.run.sizing import job_levels, sizes
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import BarrierPlan
from rowcast.runtime.arrays import I64

TIERS = ("device", "memory", "cold")  # each gives rows to the one before; the device gives them to the step


@dataclass(frozen=True, kw_only=True)
class TableTraffic:
    """Of all steps of an epoch's schedule, evaluations included."""

    table: str
    lookups: int
    distinct_rows: int
    record_bytes: int  # of a row with its optimizer state
    hottest: list[float]  # share of look-ups of 1 % and 10 % of the distinct rows, rounded up, those with most of them
    reuse_steps: list[int]  # steps from one use of a row to the next: p50, p90, p99; empty if none is used again
    bytes_per_second: dict[str, float]  # of row records, from each of TIERS; 0 from cold without a memory tier


def table_traffic(
    job: Job, first: Sequence[ScheduledBatch], rest: Iterable[ScheduledBatch], levels: Sequence[Slots], step_ms: float
) -> list[TableTraffic]:
    """Returns all tables in the job's order. `first`, `rest`: the batches; those that divide the capacity, and others.
    `levels`: slots of each group, from the device down. Raises ConfigError if a batch does not fit."""
    groups, steps, counts = group_specs(job), list[tuple[ScheduledBatch, tuple[StepRows, ...]]](), list[I64]()
    groupers = groupers_of(groups)
    for scheduled in chain(first, rest):
        groupings = [grouper.group(grouper.lookups(scheduled.batch)) for grouper in groupers]
        counts += [np.diff(grouping.segment_offsets) for grouping in groupings]
        steps.append((scheduled, tuple(map(StepRows.of, groupings))))
    of_steps = [(at, rows.keys) for at, (_, of_groups) in enumerate(steps) for rows in of_groups]
    keys = np.concatenate([own for _, own in of_steps])
    at = np.repeat([number for number, _ in of_steps], [len(own) for _, own in of_steps])
    order = np.argsort(keys, kind="stable")  # by row, and its uses by step
    keys, at, lookups = keys[order], at[order], np.concatenate(counts)[order]
    moved = moved_rows(job, first, steps, levels, np.unique(keys))
    record_bytes = {table.index: group.record_bytes for group in groups for table in group.tables}
    found, seconds = [], len(steps) * step_ms / 1000
    for index, table in enumerate(job.tables):
        uses = slice(*np.searchsorted(keys, [index << KEY_SHIFT, index + 1 << KEY_SHIFT]).tolist())
        starts = np.unique(keys[uses], return_index=True)[1]
        of_rows = np.sort(np.add.reduceat(lookups[uses], starts))[::-1] if len(starts) else starts
        distances = np.diff(at[uses])[np.diff(keys[uses]) == 0]
        quantiles = np.quantile(distances, (0.5, 0.9, 0.99), method="inverted_cdf") if len(distances) else []
        most = [of_rows[: int(np.ceil(share * len(of_rows)))].sum() for share in (0.01, 0.1)]
        rates = np.array([uses.stop - uses.start, *moved[:, index]]) * record_bytes[index] / seconds
        found.append(
            TableTraffic(
                table=table.name,
                lookups=int(of_rows.sum()),
                distinct_rows=len(of_rows),
                record_bytes=record_bytes[index],
                hottest=[float(own / max(1, of_rows.sum())) for own in most],
                reuse_steps=[int(own) for own in quantiles],
                bytes_per_second=dict(zip(TIERS, rates.tolist(), strict=True)),
            )
        )
    return found


def moved_rows(
    job: Job,
    first: Sequence[ScheduledBatch],
    steps: Sequence[tuple[ScheduledBatch, tuple[StepRows, ...]]],
    levels: Sequence[Slots],
    keys: I64,
) -> I64:
    """Returns i64 [2, T], the rows of each table that go to the device, and that memory reads from the cold tier.

    `keys`: of all rows, ascending. A row that was never trained is in no tier, so it is not read from the cold one."""
    moved, trained = np.zeros((2, len(job.tables)), np.int64), np.zeros(len(keys), bool)
    planner = job_planner(job, group_specs(job), levels, first)
    at = steps[0][0].step
    for entry in entries(planner, steps, planner.move):
        if isinstance(entry, BarrierPlan):
            continue
        for number, level in enumerate(entry.levels):
            rows = np.concatenate([group.fetch_keys for group in level])
            if number == 1:
                rows = rows[trained[np.searchsorted(keys, rows)]]
            moved[number] += np.bincount(rows >> KEY_SHIFT, minlength=len(job.tables))
        for step in entry.bundle.steps:
            if step.kind == "train":
                for of_group in steps[step.step - at][1]:
                    trained[np.searchsorted(keys, of_group.keys)] = True
    return moved


def line(table: TableTraffic) -> str:
    hottest = ", ".join(f"{share:.1%}" for share in table.hottest)
    rates = " | ".join(f"{rate / 1e6:,.3f}" for rate in table.bytes_per_second.values())
    megabytes = table.distinct_rows * table.record_bytes / 1e6
    steps = ", ".join(f"{number:,}" for number in table.reuse_steps)
    rows = f"{table.lookups:,} | {table.distinct_rows:,} | {megabytes:,.1f}"
    return f"| {table.table} | {rows} | {hottest} | {steps} | {rates} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], help="section.key=value, as for rowcast train")
    parser.add_argument("--store-memory", help="as store.memory, for a job without a memory tier")
    parser.add_argument("--step-ms", type=float, default=100.0, help="the time of a step")
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    job = load_job(options.config, tuple(options.set))
    job = with_memory(job, options.store_memory) if options.store_memory else job
    batches = iter(schedule(job, open_reader(job), options.max_steps))
    groups, first = group_specs(job), list(islice(batches, MEASURED_BATCHES))
    touched = measure(groups, first)
    rings = partial(sizes, job, groups, first, job.lookahead.depth)
    levels = job_levels(job, groups, touched, slots_of(job, groups, touched), rings)
    tables = table_traffic(job, first, batches, levels, options.step_ms)
    if options.json:
        print(json.dumps([asdict(table) for table in tables]))
        return
    print(f"Steps of {options.step_ms:g} ms; the device holds {sum(levels[0]):,} rows", end="")
    print("" if len(levels) == 1 else f", memory {sum(levels[1]):,}", end=".\n\n")
    print("| table | look-ups | distinct rows | MB | hottest 1 %, 10 % | used again after steps: p50, p90, p99", end="")
    print(" | device MB/s | from memory | from cold |\n|---|---|---|---|---|---|---|---|---|")
    print("\n".join(map(line, tables)))


if __name__ == "__main__":
    main()
