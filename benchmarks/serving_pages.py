"""Which look-ups does a tenth of a version's bytes answer from memory: pages in move-to-front order, or single rows?

Method: no training, only the ids of a click log, in batches as in examples/retail.toml; int8 rows of 16 columns. A
version every 10 steps: the rows that the steps looked up come to the front of one list for each table. Then the
held-out look-ups of trained rows go in order through an LRU of pages, or of rows, which pays 12 bytes a row for its
index. It is warmed by as many look-ups of training. FOLDER has train.tsv, day_0_*.npy and columns.json, the number of
ids of each column.

    divided     hashes, divided by the number of ids: a third of the rows are of several ids
    hashed      a row for each hash, in tables of 2^32 rows
    numbered    a row for each id, numbered as they appear

    python -m benchmarks.serving_pages FOLDER
"""

import argparse
import json
from pathlib import Path

import numpy as np

from benchmarks.machine import machine
from benchmarks.serving import PAGE, SHARE, batches, found_in, ids_in, interleaved
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.runtime.arrays import I64

RETAIL = Path(__file__).parents[1] / "examples" / "retail.toml"
STRIDE, INDEX_BYTES = 32, 12
EVERY = 10  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    print(machine())
    for name, job in log_jobs(folder).items():
        report(name, job)


def log_jobs(folder: Path) -> dict[str, Job]:
    sizes = [column["num_ids"] for column in json.loads((folder / "columns.json").read_text())]
    return {
        "divided": log_job(f"{folder}/train.tsv", "criteo-tsv", sizes),
        "hashed": log_job(f"{folder}/train.tsv", "criteo-tsv", [2**32] * len(sizes)),
        "numbered": log_job(str(folder), "criteo-npy", sizes),
    }


def log_job(path: str, form: str, sizes: list[int]) -> Job:
    return load_job(RETAIL, (f"data.path={path}", f"data.format={form}", f"tables_from.cardinalities={sizes}"))


def report(name: str, job: Job) -> None:
    train, held_out = lookups(job, "train"), lookups(job, "eval")
    tables = [np.unique(np.concatenate(own)) for own in train]
    orders = [move_to_front(own, rows) for own, rows in zip(train, tables, strict=True)]
    measured = interleaved([numbers(rows, np.concatenate(own)) for rows, own in zip(tables, held_out, strict=True)])
    warm = interleaved([numbers(rows, np.concatenate(own)) for rows, own in zip(tables, train, strict=True)])
    warm = warm[-len(measured) :]
    num_rows = sum(map(len, tables))
    room = int(SHARE * STRIDE * num_rows)
    print(f"{name}: {num_rows} trained rows, {len(measured)} held-out look-ups of them")
    for order, places in (("move to front", orders), ("key order", [np.arange(len(rows)) for rows in tables])):
        before, after = ([(t, int(places[t][row]) * STRIDE // PAGE) for t, row in own] for own in (warm, measured))
        print(f"    pages, {order}: {found_in(before, after, room // PAGE):.3f}")
    print(f"    LRU of rows: {found_in(warm, measured, room // (STRIDE + INDEX_BYTES)):.3f}")


def lookups(job: Job, split: str) -> list[list[I64]]:
    """The rows of each table, step by step."""
    steps = [list(ids_in(job, batch).values()) for batch in batches(job, split)]
    return [list(own) for own in zip(*steps, strict=True)]


def numbers(rows: I64, looked_up: I64) -> I64:
    """Which of `rows`, ascending, was looked up; -1: none."""
    found = np.minimum(np.searchsorted(rows, looked_up), len(rows) - 1)
    return np.where(rows[found] == looked_up, found, -1)


def move_to_front(steps: list[I64], rows: I64) -> I64:
    """The place of each row in the last version: changed rows, then new ones, then the others."""
    order = np.empty(0, np.int64)
    for first in range(0, len(steps), EVERY):
        changed = np.unique(numbers(rows, np.concatenate(steps[first : first + EVERY])))
        is_changed = np.isin(order, changed)
        new = np.setdiff1d(changed, order)
        order = np.concatenate([order[is_changed], new, order[~is_changed]])
    places = np.empty(len(rows), np.int64)
    places[order] = np.arange(len(order))
    return places


if __name__ == "__main__":
    main()
