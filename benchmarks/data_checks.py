"""What does looking for rows that are not finite cost of a step's processor time, and of a checkpoint's?

    python -m benchmarks.data_checks [--config examples/demo.toml] [--rounds 3]

The check is short, so a run with it cannot be told from one without: a machine's speed changes by more. It is timed by
itself, in one thread, on as many rows as come home in a step of the job, and at a checkpoint. A step's processor time
is that of all processes of real runs, a long one minus a short one over the steps between; a checkpoint's is the same
with one after each step, minus a step's: with fewer, runs differ by more than checkpoints take. The floor is the bytes
that are read, over the speed of a sum over an array of as many bytes. Of the casts to fp32, a step's share is the look
at as many dense values as its batch has.
"""

import argparse
import collections
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from rowcast.job.file import load_job
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.checkpoints.row_files import RowFiles
from rowcast.prefetcher.readers.id_check import is_kept
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.stores.records import FiniteRows
from rowcast.prefetcher.stores.store import Keys, Records
from rowcast.runtime.disk import Disk

REPEATS = 50
SHORT, LONG, EVERY = 60, 160, 1  # train steps


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_checks")
    parser.add_argument("--config", type=Path, default=Path("examples/demo.toml"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    groups = group_specs(load_job(options.config))
    plain, saving = ([per_step(options.config, every) for _ in range(options.rounds)] for every in (10 * LONG, EVERY))
    step_s, home = (statistics.median(own) for own in zip(*plain, strict=True))
    saving_s, home_saving = (statistics.median(own) for own in zip(*saving, strict=True))
    for what, whole_s, rows in (("step", step_s, home), ("checkpoint", saving_s - step_s, home_saving - home)):
        num_rows = max(1, round(rows))
        check_s, floor_s, nbytes = check(groups, num_rows)
        print(
            f"a {what}: {whole_s * 1e3:.1f} ms; {num_rows:,} rows come home, {nbytes / 1e6:.2f} MB; looked at in "
            f"{check_s * 1e6:.0f} us, {check_s / whole_s:.3%}; floor {floor_s * 1e6:.0f} us"
        )
    print(f"writing those of a checkpoint to its row files alone: {write(groups, num_rows) * 1e3:.1f} ms")
    job = load_job(options.config)
    dense = np.ones((job.data.batch_size, len(open_reader(job).dense_names)), np.float32)
    cast_s = seconds(lambda: is_kept(dense))
    print(f"casts to fp32: {dense.size:,} dense values of a step in {cast_s * 1e6:.0f} us, {cast_s / step_s:.3%}")


def check(groups: tuple[GroupSpec, ...], num_rows: int) -> tuple[float, float, int]:
    """Seconds of the check and of a sum, and bytes, for rows divided over the groups by their tables' rows."""
    work = [(FiniteRows(group), keys, records) for group, keys, records in shares(groups, num_rows)]
    check_s = seconds(lambda: [finite.fault(keys, records) for finite, keys, records in work])
    floor_s = seconds(lambda: [records.view(np.uint64).sum() for _, _, records in work])
    return check_s, floor_s, sum(records.nbytes for _, _, records in work)


def shares(groups: tuple[GroupSpec, ...], num_rows: int) -> Iterator[tuple[GroupSpec, Keys, Records]]:
    total = sum(group.num_rows for group in groups)
    for group in groups:
        count = -(-num_rows * group.num_rows // total)
        yield group, np.arange(count), np.zeros((count, group.record_bytes), np.uint8)


def write(groups: tuple[GroupSpec, ...], num_rows: int) -> float:
    """Seconds of writing a row file of each group, with its checksum."""
    own = [*shares(groups, num_rows)]

    def files() -> None:
        with TemporaryDirectory() as root:
            folder = Path(root) / "step-000000000001"
            folder.mkdir()
            layer = RowFiles(Disk(), folder)
            for group, keys, records in own:
                collections.deque(layer.add(group, keys, records), maxlen=0)
            collections.deque(layer.flush(), maxlen=0)

    return seconds(files)


def seconds(work: Callable[[], object]) -> float:
    work()
    began_s = time.thread_time()
    for _ in range(REPEATS):
        work()
    return (time.thread_time() - began_s) / REPEATS


def per_step(config: Path, every: int) -> tuple[float, float]:
    """Processor seconds, and rows home, of a train step."""
    (short_s, short_rows), (long_s, long_rows) = (run(config, every, steps) for steps in (SHORT, LONG))
    return (long_s - short_s) / (LONG - SHORT), (long_rows - short_rows) / (LONG - SHORT)


def run(config: Path, every: int, steps: int) -> tuple[float, int]:
    """Processor time of all processes, and rows home."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rowcast.deploy.local", f"--config={config}", f"--max-steps={steps}"]
        settings = {"job.run_dir": folder, "data.eval_fraction": 0.0, "checkpoint.every": every}
        ports = {"metrics.prefetcher": "127.0.0.1:0", "metrics.trainer": "127.0.0.1:0"}
        options = [f"--set={key}={value}" for key, value in {**settings, **ports}.items()]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, *options], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        report = (Path(folder) / "report.json").read_text()
    found = re.search(r'"rows_written_back": (\d+)', report)
    assert found, "the report counts the rows that came home"
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, int(found[1])


if __name__ == "__main__":
    main()
