"""What does a step cost where tables have many widths, and a row when it is touched for the first time?

    widths    26 tables of 26 widths (8 to 33) over 26 tables of one width (16), batch 256: both processes train the
              same ids of small npy files, by turns, as in `training/steady.py`; processor time of both
    planner   the same, the planner alone and in one thread, batch 128: 26 groups over one, batch by batch by turns
    rows      8,000 rows, 100 apart in a table of a million rows in memory: the first read and write over the second, of
              128 bytes and 1 KiB (Adagrad, dimension 16 and 128); a new store in each round

Processor time, medians of the rounds or of the batches; ratios are of one round or batch, with quartiles.

    python -m benchmarks.cliffs                        # about 2 minutes
    python -m benchmarks.cliffs --only planner rows    # seconds
"""

import argparse
import statistics
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.machine import write_result
from benchmarks.training import ours
from benchmarks.training.free_cores import free_cores
from benchmarks.training.steady import PYTHON, Turn, in_turn
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import Records, Ticket, finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.runtime.arrays import I64

ROOT = Path(__file__).parents[1]
NUM_TABLES, TABLE_ROWS = 26, 100_000
WIDTHS = {"26 widths": range(8, 8 + NUM_TABLES), "one width": [16] * NUM_TABLES}
TRAINED_BATCH, PLANNED_BATCH = 256, 128
SAMPLES = 2**16
WARM_STEPS = 300  # more than an epoch: no row is new
DEPTH, HORIZON = 4, 16
STORE_ROWS, APART, TOUCHED = 1_000_000, 100, 8_000
RECORDS = {"128 bytes": 16, "1 KiB": 128}  # dimensions, with Adagrad's state
BOTH = ("trainer", "prefetcher")
MEASURES = ("widths", "planner", "rows")

Figures = dict[str, list[float]]


def job_text(widths: Sequence[int], folder: Path) -> str:
    tables = "\n".join(
        f'[[tables]]\nname = "t{n}"\nnum_embeddings = {TABLE_ROWS}\nembedding_dim = {width}\nfeatures = ["cat_{n}"]'
        for n, width in enumerate(widths)
    )
    return f"""
[job]
run_dir = "{folder / "run"}"
[data]
format = "criteo-npy"
path = "{folder}"
batch_size = {TRAINED_BATCH}
epochs = 1000
{tables}
[model]
kind = "examples.custom_model:build"
[optimizer]
sparse = {{ kind = "adagrad", lr = 0.02 }}
dense = {{ kind = "sgd", lr = 0.1 }}
[cache]
capacity = "8MiB"
[trainer]
threads = 1
"""


def skewed(rng: np.random.Generator, shape: tuple[int, ...], rows: int) -> I64:
    """Returns ids; more than half of them are of the first tenth of the rows."""
    ids: I64 = (rows * rng.random(shape) ** 4).astype(np.int64)
    return ids


def write_data(folder: Path, num_samples: int = SAMPLES) -> None:
    rng = np.random.default_rng(1)
    np.save(folder / "day_0_dense.npy", rng.random((num_samples, 13), np.float32))
    np.save(folder / "day_0_sparse.npy", skewed(rng, (num_samples, NUM_TABLES), TABLE_ROWS).astype(np.int32))
    np.save(folder / "day_0_labels.npy", rng.integers(0, 2, (num_samples, 1), np.int32))


def widths(rounds: int, seconds: float) -> Figures:
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as path:
        scratch, started = Path(path), {}
        for name, of_tables in WIDTHS.items():
            folder = scratch / name.replace(" ", "-")
            folder.mkdir()
            write_data(folder)
            (folder / "job.toml").write_text(job_text(of_tables, folder))
            ports = dict(zip(BOTH, ours.free_ports(2), strict=True))
            metrics = [f'--set=metrics.{process}="127.0.0.1:{port}"' for process, port in ports.items()]
            command = [*PYTHON, "rowcast.deploy.local", "--config", str(folder / "job.toml"), *metrics]
            started[name] = (command, ports["trainer"])
        found = in_turn(started, WARM_STEPS * TRAINED_BATCH, rounds, seconds)
    figures = {
        f"widths: {process}, {name}, ms a step": [step_ms(turn, process) for turn in found[name]]
        for name in WIDTHS
        for process in BOTH
    }
    several, one = ([sum(step_ms(turn, process) for process in BOTH) for turn in found[name]] for name in WIDTHS)
    return figures | {"widths: both, 26 over one": ratios(several, one)}


def step_ms(turn: Turn, process: str) -> float:
    return 1e3 * TRAINED_BATCH * turn.spent[process] / turn.samples


def ratios(own: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(own, other, strict=True)]


def spent_ms(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - began_s)


def planner(batches: int) -> Figures:
    rng = np.random.default_rng(2)
    planners = {name: made_planner(group_specs(parsed(job_text(own, ROOT)))) for name, own in WIDTHS.items()}
    times: dict[str, list[float]] = {name: [] for name in planners}
    dense, labels = np.zeros((PLANNED_BATCH, 1), np.float32), np.zeros(PLANNED_BATCH, np.float32)
    for step in range(2 * HORIZON + batches):
        ids = skewed(rng, (NUM_TABLES * PLANNED_BATCH,), TABLE_ROWS)
        batch = ScheduledBatch.at(
            step=step, kind="train", train_step=step, epoch=0, batch=Batch(dense=dense, labels=labels, ids=ids)
        )
        for name in planners if step % 2 else reversed(planners):
            times[name].append(spent_ms(partial(add_and_plan, planners[name], batch)))
    last = {name: own[-batches:] for name, own in times.items()}
    figures = {f"planner: {name}, ms a step": own for name, own in last.items()}
    return figures | {"planner: 26 groups over one": ratios(*last.values())}


def parsed(text: str) -> Job:
    return parse_job(tomllib.loads(text))


def made_planner(groups: tuple[GroupSpec, ...]) -> RowPlanner:
    """With slots for the rows of two batches."""
    slots = tuple(2 * PLANNED_BATCH * len(group.tables) for group in groups)
    return RowPlanner(groups, [slots], DEPTH, HORIZON)


def add_and_plan(own: RowPlanner, batch: ScheduledBatch) -> None:
    own.add(batch)
    if own.ready():
        own.plan()


def rows(rounds: int) -> Figures:
    figures: Figures = {}
    for name, dim in RECORDS.items():
        text = job_text([dim], ROOT).replace(str(TABLE_ROWS), str(STORE_ROWS))
        (group,) = group_specs(parsed(text))
        keys = np.arange(TOUCHED, dtype=np.int64) * APART
        touch(group, keys[:8])  # compiles
        found = [touch(group, keys) for _ in range(rounds)]
        first_read, first_write, second_read, second_write = map(list, zip(*found, strict=True))
        figures |= {
            f"rows: first read of {name}, ms": first_read,
            f"rows: first write of {name}, ms": first_write,
            f"rows: first read over second, {name}": ratios(first_read, second_read),
            f"rows: first write over second, {name}": ratios(first_write, second_write),
        }
    return figures


def touch(group: GroupSpec, keys: I64) -> tuple[float, ...]:
    """Milliseconds of reading, writing, reading and writing these rows of a new store."""
    store = TrackedStore(MemoryStore(group), group, seed=1)
    records = np.ones((len(keys), group.record_bytes), np.uint8)
    read, write = (partial(done, of, keys, records) for of in (store.read, store.write))
    found = tuple(map(spent_ms, (read, write, read, write)))
    store.close()
    return found


def done(work: Callable[[I64, Records], Ticket], keys: I64, records: Records) -> None:
    finish(work(keys, records))


def line(what: str, values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"| {what} | {middle:.2f} | {low:.2f} to {high:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--batches", type=int, default=200, help="that the planner plans")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: quartiles need at least 2")
    measures: dict[str, Callable[[], Figures]] = {
        "widths": partial(widths, options.rounds, options.seconds),
        "planner": partial(planner, options.batches),
        "rows": partial(rows, options.rounds),
    }
    free, figures = [free_cores()], Figures()
    for name in options.only:
        figures |= measures[name]()
    free.append(free_cores())
    print("| what | median | quartiles |\n|---|---|---|")
    print("\n".join(line(what, values) for what, values in figures.items()))
    print(f"{options.rounds} rounds, free cores {free[0]:.2f} before and {free[1]:.2f} after")
    write_result("cliffs", rounds=options.rounds, free_cores=free, figures=figures)


if __name__ == "__main__":
    main()
