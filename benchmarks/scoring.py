"""What `rowcast score` costs beside the training of the job and beside an evaluation of the same rows.

Method: write two Parquet files of 10^6 rows; train on one; evaluate and score the other, in turn. Memory is the largest
sum of the proportional set sizes of all processes, sampled every 0.05 s; processor time is that of all of them.

    python -m benchmarks.scoring --rounds 2
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

NUM_ROWS = 1_000_000
NUM_IDS = 100_000
POLL_S = 0.05
JOB = f"""
data = {{ format = "parquet", path = "clicks.parquet" }}
tables_from = {{ cardinalities = {[NUM_IDS] * 8}, embedding_dim = 16 }}
model = {{ kind = "dlrm", bottom_mlp = [32, 16], top_mlp = [32, 1] }}
optimizer = {{ sparse = {{ kind = "adagrad", lr = 0.02 }}, dense = {{ kind = "adagrad", lr = 0.02 }} }}
job = {{ run_dir = "run" }}
cache = {{ capacity = "16MiB" }}
trainer = {{ device = "cpu", threads = 1 }}
metrics = {{ prefetcher = "127.0.0.1:0", trainer = "127.0.0.1:0" }}
"""


def write_samples(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = {f"cat_{i}": rng.zipf(1.2, NUM_ROWS) % NUM_IDS for i in range(8)}
    dense = {f"int_{i}": rng.random(NUM_ROWS) for i in range(3)}
    pq.write_table(pa.table({"label": rng.integers(0, 2, NUM_ROWS), **ids, **dense}), path, row_group_size=65536)


def text_of(path: Path) -> str:
    """Empty where a process has just ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


def memory_of(pid: int) -> float:
    """In MiB, of a process and all below it."""
    lines = text_of(Path(f"/proc/{pid}/smaps_rollup")).splitlines()
    below = [child for thread in Path(f"/proc/{pid}/task").glob("*") for child in text_of(thread / "children").split()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024 + sum(
        map(memory_of, map(int, below))
    )


def measured(folder: Path, *arguments: str) -> tuple[float, float]:
    """The peak of memory in MiB, and seconds of processor time."""

    def spent_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before_s, peak = spent_s(), 0.0
    command = [sys.executable, "-m", "rowcast", *arguments]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(POLL_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with code {process.returncode}")
    return peak, spent_s() - before_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what scoring costs.")
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder, job = Path(name), ["--config", "job.toml"]
        (folder / "job.toml").write_text(JOB)
        for seed, file in enumerate(("clicks.parquet", "new.parquet")):
            write_samples(folder / file, seed)
        for number in range(rounds):
            trained = measured(folder, "train", *job, "--fresh")
            evaluated = measured(folder, "train", *job, "--eval", "--set=data.eval_path=new.parquet")
            scored = measured(folder, "score", "--run=run", "--data=new.parquet", f"--out=scores-{number}.parquet")
            for what, (mib, seconds) in (("train", trained), ("evaluate", evaluated), ("score", scored)):
                print(f"{what:9}{mib:7,.0f} MiB{seconds:7.1f} s")
            print(f"memory {scored[0] / trained[0]:.3f} of training's, {scored[1] / evaluated[1]:.3f} of the processor "
                  "time of the evaluation")  # fmt: skip


if __name__ == "__main__":
    main()
