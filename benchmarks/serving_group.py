"""How many held-out look-ups find their page in memory, if a reader may hold the index and a tenth of the rows?

Method: the versions of `benchmarks.serving_pages`, but published, int8. A reader in a control group of its own opens
the newest one, reads its indexes and drops its rows from memory. Then the group's limit becomes what it holds and a
tenth of the rows' bytes. It looks up as many training samples as there are held-out ones, then these, sample by sample.
Each major page fault is a look-up that found nothing; asking for pages together is switched off. Needs root and Linux.

    python -m benchmarks.serving_group FOLDER SCRATCH
"""

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.machine import machine
from benchmarks.memory_group import memory_group, own_group, reclaim, set_limit, used
from benchmarks.serving import SHARE, batches, ids_in
from benchmarks.serving_large import drop
from benchmarks.serving_pages import EVERY, log_jobs
from rowcast.job.schema import Job
from rowcast.job.tables import make_keys
from rowcast.prefetcher.checkpoints.write_queue import RowBlock
from rowcast.runtime.arrays import I64
from rowcast.serving.model import Model
from rowcast.serving.snapshot import TableView
from rowcast.serving.version_file import version_name
from tests.serving.served_run import ServedRun, publish

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a log, as for benchmarks.serving_pages")
    parser.add_argument("scratch", type=Path, help="a new folder")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read is not None:
        read(given.read, given.scratch)
        return
    print(machine())
    for name, job in log_jobs(given.folder.absolute()).items():
        own = given.scratch.absolute() / name
        prepare(job, own)
        with memory_group(8 * GIB) as prefix:
            command = [sys.executable, "-m", "benchmarks.serving_group", ".", str(own), f"--read={own_group()}"]
            print(f"{name}: ", end="", flush=True)
            subprocess.run([*prefix, *command], check=True)


class LogRun(ServedRun):
    changed: Any = ()  # rows of each table

    def blocks(self) -> Iterator[RowBlock]:  # type: ignore[override]
        [group] = self.groups
        for table, rows in enumerate(self.changed):
            floats = np.random.default_rng(self.step).normal(size=(len(rows), group.record_floats)).astype(np.float32)
            records = floats.view(np.uint8).reshape(len(rows), group.record_bytes)
            yield RowBlock(group_index=0, keys=make_keys(table, rows), records=records)


def prepare(job: Job, folder: Path) -> None:
    """Publishes a version every 10 steps; keeps the ids of both splits, i64 [samples, tables]."""
    (folder / "served").mkdir(parents=True)
    own = msgspec.structs.replace(job.job, run_dir=str(folder / "run"))
    run = LogRun(msgspec.structs.replace(job, job=own))
    train, held_out = (ids_of(job, split) for split in ("train", "eval"))
    for first in range(0, len(train), EVERY * job.data.batch_size):
        run.changed = [np.unique(ids) for ids in train[first : first + EVERY * job.data.batch_size].T]
        run.step += EVERY
        run.checkpoint()
        publish(run, folder / "served", "int8")
    np.save(folder / "train.npy", train[-len(held_out) :])
    np.save(folder / "eval.npy", held_out)


def ids_of(job: Job, split: str) -> I64:
    return np.concatenate([np.stack(list(ids_in(job, batch).values()), axis=1) for batch in batches(job, split)])


def read(group: Path, folder: Path) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # each core keeps up to 64 pages ready for its group
    TableView.ask_for = lambda self, places: []  # type: ignore[method-assign]
    warm, held_out = (np.load(folder / f"{split}.npy") for split in ("train", "eval"))
    model = Model(folder / "served")
    now = model.now()
    look_up(now, held_out[:2])  # compiled loops
    reclaim(group)
    look_up(now, held_out[:2])
    nbytes = 0
    for own in now.versions:
        for index, table in zip(own.indexes, own.file.tables, strict=True):
            index.tags.max(), index.places.max()
            drop(folder / "served" / version_name(own.file.number) / table.rows.name)
            nbytes += table.rows.nbytes
    set_limit(group, used(group) + int(SHARE * nbytes))
    look_up(now, warm)
    faults, trained = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, model.counts()["trained"]
    look_up(now, held_out)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
    trained = model.counts()["trained"] - trained
    print(f"{len(now.versions)} versions, {nbytes} bytes of rows, {trained} look-ups of trained rows, {faults} faults")
    print(f"    found in memory: {1 - faults / trained:.3f}")


def look_up(now: Any, ids: I64) -> None:
    features = [rule.feature for rule in now.version.ids]
    for sample in ids:
        now.look_up({name: sample[f : f + 1] for f, name in enumerate(features)})


if __name__ == "__main__":
    main()
