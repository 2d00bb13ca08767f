"""How fast are cold rows in a segment file, against a mapped file; what does it cost to keep its disk bounded?

Reads: batches of 20,000 random rows, in turn from a segment file, from a mapped file whose pages are touched one after
the other (what the store `mapped` did before it read ahead), and from the segment file by a Python loop of os.preadv
without any check. Cold: every page was dropped from this machine's cache before (`fadvise(DONTNEED)`); the host of a
virtual machine may still have it. Medians; processor time is that of the reading thread.

Garbage: random rows are written again until three times the disk's bytes were asked for; 1.0 would be no row moved.

    python -m benchmarks.segments --folder <on the disk to measure>
"""

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.machine import machine
from rowcast.job.tables import GroupSpec, TableSpec
from rowcast.prefetcher.stores.cold.cold_rows import Moved, Places
from rowcast.prefetcher.stores.cold.page_loops import page_layout
from rowcast.prefetcher.stores.cold.segment_file import SegmentFile
from rowcast.prefetcher.stores.row_loops import gather
from rowcast.prefetcher.stores.store import Keys
from rowcast.runtime.arrays import I64

BATCH = 20_000


def group_of(record_bytes: int) -> GroupSpec:
    table = TableSpec(
        index=0, name="table", num_embeddings=2**40, embedding_dim=1, features=(), pooling="sum", init="zeros"
    )
    return GroupSpec(
        index=0,
        name=f"rows of {record_bytes} bytes",
        tables=(table,),
        embedding_dim=1,
        parts=(),
        record_bytes=record_bytes,
        feature_positions=(),
    )


class Rows:
    """Rows 0 to n - 1 of a segment file, and their places."""

    def __init__(self, folder: Path, record_bytes: int, disk_bytes: int) -> None:
        self.file, self.record_bytes = SegmentFile.open(group_of(record_bytes), folder, disk_bytes), record_bytes
        self.places: Places = np.full(self.file.most, 2**32 - 1, np.uint32)
        self.file.attach(lambda keys: self.places[keys], self.settle)

    def settle(self, moved: Moved) -> None:
        taken = self.places[moved.keys] == moved.old
        self.places[moved.keys[taken]] = moved.new[taken]
        self.file.free(moved.keys, np.where(taken, moved.old, moved.new))

    def write(self, keys: Keys) -> None:
        records = np.ones((len(keys), self.record_bytes), np.uint8)
        new = self.file.write(keys, records)
        old, self.places[keys] = self.places[keys], new
        self.file.free(keys[old != 2**32 - 1], old[old != 2**32 - 1])

    def fill(self, num_rows: int) -> None:
        for start in range(0, num_rows, BATCH):
            self.write(np.arange(start, min(num_rows, start + BATCH)))


def forget(descriptor: int) -> None:
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def measure_reads(folder: Path, record_bytes: int, file_bytes: int, rounds: int) -> str:
    rows, num_rows = Rows(folder, record_bytes, file_bytes * 5 // 4), file_bytes // (record_bytes + 8)
    began = time.perf_counter()
    rows.fill(num_rows)
    append = rows.file.bytes_written / (time.perf_counter() - began) / 2**20
    with tempfile.TemporaryFile(dir=folder, buffering=0) as mapped:
        for start in range(0, num_rows * record_bytes, 2**20):
            os.pwrite(mapped.fileno(), bytes(min(2**20, num_rows * record_bytes - start)), start)
        memory = mmap.mmap(mapped.fileno(), 0)
        memory.madvise(mmap.MADV_RANDOM)
        words = np.frombuffer(memory, np.uint64).reshape(num_rows, -1)
        marks, out = np.ones(num_rows, np.uint8), np.empty((BATCH, record_bytes), np.uint8)
        random, page = np.random.default_rng(0), page_layout(record_bytes)
        segments, one_page = rows.file._file.fileno(), bytearray(page.nbytes)

        def by_pread(keys: I64) -> None:
            pages = np.unique(rows.places[keys] // page.num_rows).tolist()
            for number in pages:
                os.posix_fadvise(segments, number * page.nbytes, page.nbytes, os.POSIX_FADV_WILLNEED)
            for number in pages:
                os.preadv(segments, [one_page], number * page.nbytes)

        ways: list[Callable[[I64], object]] = [
            lambda keys: rows.file.read(keys, rows.places[keys], out),
            lambda keys: gather(words, marks, keys, out.view(np.uint64)),
            by_pread,
        ]
        seconds: dict[bool, list[list[float]]] = {True: [[], [], []], False: [[], [], []]}
        for way in ways:
            way(np.arange(100))  # compiles
        cpu: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds):
            keys = np.unique(random.integers(0, num_rows, BATCH))
            for cold in (True, False):
                for number, way in enumerate(ways):
                    if cold:
                        memory.madvise(mmap.MADV_DONTNEED)
                        forget(mapped.fileno())
                        forget(segments)
                    else:
                        way(keys)
                    began, began_cpu = time.perf_counter(), time.thread_time()
                    way(keys)
                    seconds[cold][number].append(time.perf_counter() - began)
                    if number == 0:
                        cpu[cold].append((time.thread_time() - began_cpu) / len(keys) * 1e6)
    rows.file.close()
    cells = [f"{BATCH / statistics.median(own):,.0f}" for cold in (True, False) for own in seconds[cold]]
    ratio = statistics.median(fault / own for own, fault in zip(*seconds[True][:2], strict=True))
    cpu_us = " | ".join(f"{statistics.median(own):.1f}" for own in cpu.values())
    return f"| {record_bytes} | {' | '.join(cells)} | {ratio:.1f} | {cpu_us} | {append:.0f} |"


def measure_garbage(folder: Path, record_bytes: int, live: float, disk_bytes: int) -> str:
    rows, random = Rows(folder, record_bytes, disk_bytes), np.random.default_rng(0)
    num_rows = int(rows.file.most * live)
    rows.fill(num_rows)
    first, asked, began = rows.file.rows_written, 0, time.thread_time()
    while asked < 3 * rows.file.most:
        keys = np.unique(random.integers(0, num_rows, BATCH))
        rows.write(keys)
        asked += len(keys)
        while rows.file.tidy():
            pass
    cpu = (time.thread_time() - began) / asked * 1e6
    amplification, used = (rows.file.rows_written - first) / asked, rows.file.used_bytes / disk_bytes
    rows.file.close()
    return f"| {record_bytes} | {live:.0%} | {amplification:.2f} | {used:.0%} | {cpu:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/segments"))
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of rows that are read")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    print(machine())
    print(
        "| bytes a row | rows a second, cold: segments | page faults | os.preadv | warm: segments | page faults ",
        end="",
    )
    print("| os.preadv | segments / page faults, cold | cpu us a row, cold | warm | appended MiB/s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for record_bytes in (80, 272, 528):
        nbytes = int(arguments.gigabytes * 2**30)
        print(measure_reads(arguments.folder, record_bytes, nbytes, arguments.rounds), flush=True)
    print("| bytes a row | live | rows written for each that was asked for | disk used | cpu us for each |")
    print("|---|---|---|---|---|")
    for record_bytes in (80, 272):
        for live in (0.5, 0.8):
            print(measure_garbage(arguments.folder, record_bytes, live, 2**28), flush=True)


if __name__ == "__main__":
    main()
