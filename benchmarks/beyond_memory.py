"""What does a job cost whose tables are ten times `store.memory`, with every row of them trained and most on disk?

Method: two processes as a user starts them, `tiered`, rows of 1,008 bytes (four to a page of 4 KiB), eight tables. An
epoch looks up every row once, each epoch in another order, so in the second one each row that a step needs was trained
an epoch before: the worst there is for a memory, of which little can stay. The first epoch trains all rows. In the
second one the run is stopped, its files leave the page cache, and it goes on from its checkpoint, which has all rows.
What the store's file has in the page cache is written and dropped every tenth of a second. Scratch lies in the folder
for temporary files (TMPDIR), takes about four times the tables at most, and is removed.

    python -m benchmarks.beyond_memory [--memory 1GiB] [--times 10] [--steps 160]
"""

import argparse
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from benchmarks.machine import machine
from benchmarks.processes import start, terminate
from benchmarks.tiers import Seen, watching
from rowcast.job.schema import Job
from rowcast.job.units import parse_bytes
from rowcast.protocol.batch import Batch
from rowcast.trainer.report.report_json import Report, read_report

NUM_TABLES, DIM, BATCH = 8, 252, 1024
ROW_BYTES = 4 * DIM + 8  # with its key on the disk
STEPS = "rowcast_train_steps_total"
LEAST_STEPS = 40
GIB, MIB = 2**30, 2**20
HEADINGS = (
    "phase",
    "steps",
    "samples/s in epoch 2",
    "waits",
    "prefetcher MiB",
    "from cold",
    "late",
    "read GiB",
    "written GiB",
    "store GiB",
    "checkpoints GiB",
    "first step after s",
)
STRIDE = 0.381966  # of a table: consecutive samples of an epoch are far apart


def open_batches(job: Job) -> Callable[[str, int], Iterator[Batch]]:
    """The data set: sample i of an epoch looks up row (a * i + b) of each table, where `a` is prime to its size."""
    num_rows = job.tables[0].num_embeddings

    def batches(split: str, epoch: int) -> Iterator[Batch]:
        factor = next(a for a in range(int(STRIDE * num_rows) + 1000 * epoch, num_rows) if math.gcd(a, num_rows) == 1)
        chance = np.random.default_rng(epoch)
        for first in range(0, num_rows if split == "train" else 0, BATCH):
            samples = np.arange(first, first + BATCH)
            ids = np.concatenate([(factor * samples + 7919 * table) % num_rows for table in range(NUM_TABLES)])
            labels = chance.integers(0, 2, BATCH).astype(np.float32)
            yield Batch(dense=chance.random((BATCH, 1), np.float32), labels=labels, ids=ids)

    return batches


def job_file(folder: Path, memory: int, num_steps: int, port: int) -> Path:
    """`num_steps`: of an epoch, which is also how many batches of rows a table has."""
    tables = NUM_TABLES * num_steps * BATCH * ROW_BYTES
    path = folder / "job.toml"
    path.write_text(
        f"""
        job = {{ run_dir = "{folder / "run"}", seed = 7 }}
        data.format = "benchmarks.beyond_memory:open_batches"
        data.batch_size = {BATCH}
        data.epochs = 2
        tables_from = {{ cardinalities = {[num_steps * BATCH] * NUM_TABLES}, embedding_dim = {DIM} }}
        model = {{ kind = "dlrm", bottom_mlp = [{DIM}], top_mlp = [1] }}
        optimizer.sparse = {{ kind = "sgd", lr = 0.05 }}
        optimizer.dense = {{ kind = "sgd", lr = 0.1 }}
        cache.capacity = "{4 * NUM_TABLES * BATCH * 4 * DIM}"
        lookahead = {{ depth = 2, id_bytes = "64MiB" }}
        checkpoint = {{ every = "epoch", keep = 1, memory = "32MiB" }}
        store = {{ kind = "tiered", memory = "{memory}", disk = "{3 * tables // 2}", path = "{folder / "tables"}" }}
        prefetcher.threads = 1
        trainer.threads = 1
        metrics.prefetcher = "127.0.0.1:0"
        metrics.trainer = "127.0.0.1:{port}"
        """
    )
    return path


class Watched:
    """One start of both processes, looked at once a second."""

    def __init__(self, folder: Path, config: Path, port: int, *options: str) -> None:
        self.began_s = time.monotonic()
        self.seen = list[tuple[float, int]]()  # seconds after the start, train steps of this process
        self.checkpoints = 0  # the most bytes that they took
        self.prefetcher = Seen()
        self._folder, self._port = folder, port
        self.processes = {
            "trainer": start("trainer", [f"--config={config}"]),
            "prefetcher": start("prefetcher", [f"--config={config}", *options]),
        }
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        pid = self.processes["prefetcher"].pid
        self._stack.enter_context(watching(pid, self._folder / "tables", self.prefetcher, drop=True))
        self._readers = [threading.Thread(target=self._wait, args=(name,)) for name in self.processes]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        for reader in self._readers:
            reader.join()
        self._stack.close()

    def _wait(self, name: str) -> None:
        try:
            terminate({name: self.processes[name]}, 3600)
        except RuntimeError as error:
            print(error, file=sys.stderr)

    def until(self, steps: int | None) -> None:
        """Returns once the trainer has counted so many steps, or both processes have ended."""
        while any(reader.is_alive() for reader in self._readers):
            time.sleep(1)
            self.checkpoints = max(self.checkpoints, bytes_below(self._folder / "run" / "checkpoints"))
            if (counted := counted_steps(self._port)) is not None:
                self.seen.append((time.monotonic() - self.began_s, counted))
                if steps is not None and counted >= steps:
                    return

    def report(self) -> Report:
        for name, process in self.processes.items():
            if process.returncode:
                raise RuntimeError(f"the {name} ended with code {process.returncode}")
        return read_report(self._folder / "run" / "report.json")

    def rate(self, first: int, last: int) -> float:
        """Samples a second between two train steps of this process."""
        own = [(at, steps) for at, steps in self.seen if first <= steps <= last]
        (began, before), (ended, after) = own[0], own[-1]
        return BATCH * (after - before) / max(1e-9, ended - began)


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    name: str
    samples_s: float
    first_step_s: float  # from the start of the processes to the first look that saw a step
    watched: Watched
    report: Report


def counted_steps(port: int) -> int | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return None
    return next((int(float(line.split()[1])) for line in lines if line.startswith(STEPS)), None)


def bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512 if path.is_file() else 0
        except OSError:  # removed meanwhile
            continue
    return total


def forget_files(folder: Path) -> None:
    """Writes a folder's files and drops them from the page cache."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def phases(folder: Path, memory: int, num_steps: int, more: int) -> Iterator[Phase]:
    port = free_port()
    config = job_file(folder, memory, num_steps, port)
    checked = [sys.executable, "-m", "rowcast.prefetcher", "check", "--config", str(config)]
    if (asked := subprocess.run(checked, capture_output=True, text=True, check=False)).returncode:
        raise SystemExit(asked.stdout + asked.stderr)
    for name, options in (("trained and stopped", []), ("went on", [f"--max-steps={num_steps + 2 * more}"])):
        forget_files(folder / "run")
        with Watched(folder, config, port, *options) as own:
            own.until(None if options else num_steps + more)
            if not options:
                print(f"first epoch: {own.rate(1, num_steps):,.0f} samples/s", flush=True)
                own.processes["trainer"].send_signal(signal.SIGTERM)
            own.until(None)
            first = next(at for at, steps in own.seen if steps)
            steady = own.rate(1 if options else num_steps, num_steps + 2 * more)
            yield Phase(name=name, samples_s=steady, first_step_s=first, watched=own, report=own.report())


def line(phase: Phase, memory: int) -> str:
    report, tier = phase.report, phase.report.tier
    assert tier is not None, "a tiered store"
    return (
        f"| {phase.name} | {report.steps:,} | {phase.samples_s:,.0f} | {report.stall_share:.1%} | "
        f"{report.host_bytes / MIB:,.0f} of {memory / MIB:,.0f} | {tier.rows_from_cold:,} | {tier.late_rows:,} | "
        f"{tier.bytes_read / GIB:.1f} | {tier.bytes_written / GIB:.1f} | {phase.watched.prefetcher.disk / GIB:.1f} | "
        f"{phase.watched.checkpoints / GIB:.1f} | {phase.first_step_s:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="1GiB", help="store.memory")
    parser.add_argument("--times", type=float, default=10.0, help="the tables' bytes, over store.memory")
    parser.add_argument("--steps", type=int, default=160, help="of the second epoch, before and after the stop")
    options = parser.parse_args()
    memory = parse_bytes(options.memory)
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps {options.steps}: the trainer's steps are looked at once a second; give {LEAST_STEPS}")
    num_steps = int(options.times * memory / (NUM_TABLES * BATCH * ROW_BYTES))
    num_rows = NUM_TABLES * num_steps * BATCH
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as path:
        free = shutil.disk_usage(path).free
        print(machine())
        print(
            f"{num_rows:,} rows of {4 * DIM} bytes, {num_rows * 4 * DIM / GIB:.1f} GiB, {num_steps} steps of {BATCH} "
            f"samples an epoch; store.memory {options.memory}; disk free {free / GIB:.0f} GiB; "
            f"load {os.getloadavg()[0]:.1f}"
        )
        print(f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|", flush=True)
        waits = []
        for phase in phases(Path(path), memory, num_steps, options.steps):
            print(line(phase, memory), flush=True)
            waits.append(f"waits of the prefetcher, {phase.name}: {json.dumps(phase.report.waits_s['prefetcher'])}")
        print(*waits, f"load {os.getloadavg()[0]:.1f}", sep="\n")


if __name__ == "__main__":
    main()
