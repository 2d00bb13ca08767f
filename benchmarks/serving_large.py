"""What do versions of a large table cost: bytes, the publisher's work and memory, cold rows, look-ups in a refresh?

Method: a run without training whose checkpoints have all rows of one table, and then every 20th row twice. Each version
is published by a process of its own. `cpu`: its processor time. `memory`: the most of RssAnon, which leaves mapped
files out. `cold`: rows spread over the table, looked up by a process after the pages of their files were dropped;
asked for together, and one by one. `refresh`: processor time of look-ups of 1,300 warm rows, while another thread opens
the newest version again and again, and without, in turns.

    python -m benchmarks.serving_large FOLDER [--rows 20000000] [--columns 16]
"""

import argparse
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from rowcast.job.schema import Job
from rowcast.job.tables import make_keys
from rowcast.prefetcher.checkpoints.write_queue import RowBlock
from rowcast.runtime.checkpoint_manifest import newest_checkpoint, read_manifest
from rowcast.serving.model import Model
from rowcast.serving.publisher import Publisher
from rowcast.serving.snapshot import Counts, TableView, open_snapshot
from rowcast.serving.version_file import read_version, version_name
from tests.serving.served_run import ServedRun, Told
from tests.support import jobs

BLOCK, EVERY = 65536, 20
COLD, CALLS, TURNS = 1300, 300, 6
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--part", choices=("all", "publish", "together", "one by one", "refresh"), default="all")
    given = parser.parse_args()
    run_dir, to = given.folder / "run", given.folder / "served"
    if given.part == "publish":
        publish(run_dir, to)
    elif given.part == "refresh":
        refreshing(to)
    elif given.part != "all":
        cold(to, given.rows, together=given.part == "together")
    else:
        print(machine())
        everything(given.folder, given.rows, given.columns)


def everything(folder: Path, rows: int, columns: int) -> None:
    run = LargeRun(large_job(folder / "run", rows, columns))
    for number in range(3):
        run.write(np.arange(rows) if number == 0 else np.arange(number, rows, EVERY))
        part(folder, rows, "publish")
    newest = newest_checkpoint(folder / "run")
    assert newest is not None
    delta = sum(file.nbytes for shard in read_manifest(newest).shards for file in shard.layers[-1].files)
    [table] = read_version(folder / "served", 3).tables
    total = (table.rows.nbytes + table.index.nbytes) / delta
    print(f"bytes over the checkpoint's layer: rows {table.rows.nbytes / delta:.3f}, with index {total:.3f}")
    for name in ("together", "one by one", "refresh"):
        part(folder, rows, name)


def part(folder: Path, rows: int, name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.serving_large", str(folder), f"--rows={rows}", f"--part={name}"]
    subprocess.run(command, check=True)


def large_job(run_dir: Path, rows: int, columns: int) -> Job:
    return jobs.job(
        job={"run_dir": str(run_dir), "seed": 9},
        data={"synthetic": {"samples": 1000}},
        tables=[jobs.table("t", rows, columns, "t")],
        optimizer={"sparse": {"kind": "adagrad", "lr": 0.1}},
    )


class LargeRun(ServedRun):
    """Writes rows without keeping them."""

    chosen: Any = ()

    def write(self, chosen: Any) -> None:
        self.chosen = chosen
        self.step += 10
        self.checkpoint()

    def blocks(self) -> Iterator[RowBlock]:  # type: ignore[override]
        [group] = self.groups
        floats = np.random.default_rng(self.step).normal(size=(BLOCK, group.record_floats)).astype(np.float32)
        for first in range(0, len(self.chosen), BLOCK):
            keys = make_keys(0, self.chosen[first : first + BLOCK].astype(np.int64))
            yield RowBlock(group_index=0, keys=keys, records=floats.view(np.uint8)[: len(keys)].copy())


def publish(run_dir: Path, to: Path) -> None:
    publisher, most, ended = Publisher(run_dir, to, "int8", 3, Told()), [anonymous()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            most[0] = max(most[0], anonymous())

    watcher = threading.Thread(target=watch)
    with publisher.lock():
        watcher.start()
        began_s = time.process_time()
        version = publisher.publish()
        spent_s = time.process_time() - began_s
        ended.set()
        watcher.join()
    assert version is not None
    before = read_version(to, version.base).num_rows
    print(
        f"{version.kind} version of {version.num_rows} rows: cpu {spent_s:.1f} s, memory {most[0] / MIB:.0f} MiB "
        f"(8 bytes a row and 256 MiB: {(8 * before) / MIB + 256:.0f})"
    )


def anonymous() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


def cold(to: Path, rows: int, *, together: bool) -> None:
    model = Model(to)
    if not together:
        TableView.ask_for = lambda self, places: []  # type: ignore[method-assign]
    now = model.now()
    model.rows("t", np.arange(2))  # compiled loops
    for own in now.versions:
        for index in own.indexes:
            index.tags.max(), index.places.max()
        for table in own.file.tables:
            drop(to / version_name(own.file.number) / table.rows.name)
    ids = np.random.default_rng(4).permutation(rows)[:COLD]
    faults, began_s = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt, time.thread_time()
    model.rows("t", ids)
    spent_ms = 1e3 * (time.thread_time() - began_s)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - faults
    print(f"{COLD} cold rows, {'together' if together else 'one by one'}: {faults} page faults, cpu {spent_ms:.1f} ms")


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def refreshing(to: Path) -> None:
    newest = Model(to).now()
    before = open_snapshot(to, newest.version.number - 1, None, "changed", Counts())
    ids, times = np.arange(0, 26 * COLD, 26), dict[bool, list[float]]({True: [], False: []})
    for turn in range(2 * TURNS):
        ended, is_beside = threading.Event(), turn % 2 == 0

        def refresh(ended: threading.Event = ended) -> None:
            while not ended.is_set():
                open_snapshot(to, newest.version.number, before, "changed", Counts())

        thread = threading.Thread(target=refresh)
        if is_beside:
            thread.start()
        for call in range(CALLS):
            began_s = time.thread_time()
            before.rows("t", ids)
            if call:
                times[is_beside].append(time.thread_time() - began_s)
        ended.set()
        if is_beside:
            thread.join()
    beside, alone = (1e6 * np.percentile(times[which], 99) for which in (True, False))
    print(f"look-ups of {COLD} rows, p99 of cpu: in a refresh {beside:.0f} us, without {alone:.0f} us")
    print(f"ratio {beside / alone:.2f}")


if __name__ == "__main__":
    main()
