"""Does `prefetcher predict` say what bounds a run? Eight runs in which one thing is forced to bind, walked again.

Method: both processes run as a user starts them, with `--timeline`, on data made here; a reader, a store or a link that
is slow sleeps, so that it takes no core from the others. Each run is then planned again and walked with the durations
that it recorded. Per run: the recorded pace and the walked one, the tasks of the critical path, and what trainer and
fetcher waited for, recorded and walked.

    python -m benchmarks.predict_runs [--job "slow decoder" ...] [--steps 320]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import rowcast
from benchmarks.machine import machine
from benchmarks.processes import terminate
from rowcast.analysis.predict.planned import plan_job
from rowcast.analysis.predict.predict import WHOSE, Walked, described, steady, walk
from rowcast.analysis.predict.recorded import recorded_run, waited
from rowcast.analysis.timeline.recording import read_run
from rowcast.job.file import load_job

SAMPLES, FEATURES, ROWS = 512, 8, 40_000
TABLE: dict[str, object] = {
    "name": "t",
    "num_embeddings": ROWS,
    "embedding_dim": 32,
    "features": [f"f{number}" for number in range(FEATURES)],
}
JOB: dict[str, object] = {
    "job.name": "forced",
    "data.format": "benchmarks.predict_runs:open_batches",
    "data.batch_size": SAMPLES,
    "tables": [TABLE],
    "model": {"kind": "dlrm", "bottom_mlp": [32], "top_mlp": [16, 1]},
    "optimizer.sparse": {"kind": "adagrad", "lr": 0.02},
    "optimizer.dense": {"kind": "sgd", "lr": 0.1},
    "cache.capacity": "12000 rows",
    "checkpoint.every": 0,
    "prefetcher.threads": 1,
    "trainer.threads": 1,
    "metrics.prefetcher": "127.0.0.1:0",
    "metrics.trainer": "127.0.0.1:0",
}
SLOW_STORE = """
import time
from rowcast.prefetcher.stores.memory_store import MemoryStore
read, write = MemoryStore.read, MemoryStore.write
def slow_read(self, keys, out):
    time.sleep({read_s})
    return read(self, keys, out)
def slow_write(self, keys, rows):
    time.sleep({write_s})
    return write(self, keys, rows)
MemoryStore.read, MemoryStore.write = slow_read, slow_write
"""
NARROW_LINK = """
import time
from rowcast.trainer.execute.cache import DeviceCache
copy_in = DeviceCache._copy_in
def slow_copy(self, arrived, piece, room):
    time.sleep(0.1 / piece.message.num_pieces)
    return copy_in(self, arrived, piece, room)
DeviceCache._copy_in = slow_copy
"""
COMMAND = "\nfrom rowcast.{name}.cli import app; app()"
TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Forced:
    expected: set[str]  # names the bottleneck: the path's first task, or what limits it most often
    settings: Mapping[str, object] = field(default_factory=dict)
    prefetcher: str = ""  # code that runs before the command
    trainer: str = ""


FORCED = {
    "slow decoder": Forced(expected={"decode"}, settings={"data.options": {"sleep_ms": 100}}),
    "slow store": Forced(expected={"fetch"}, prefetcher=SLOW_STORE.format(read_s=0.1, write_s=0)),
    "small ring": Forced(
        expected={"ring"},
        settings={
            "transport.ring": "1MiB",
            "tables": [{**TABLE, "embedding_dim": 256}],
            "model": {"kind": "dlrm", "bottom_mlp": [256], "top_mlp": [16, 1]},
        },
        prefetcher=SLOW_STORE.format(read_s=0.005, write_s=0),
    ),
    "depth 1": Forced(
        expected={"credit", "write_back"},
        settings={"lookahead.depth": 1},
        prefetcher=SLOW_STORE.format(read_s=0.015, write_s=0.015),
    ),
    "narrow link": Forced(expected={"copy in"}, trainer=NARROW_LINK),
    "large model": Forced(
        expected={"step"}, settings={"model": {"kind": "dlrm", "bottom_mlp": [1024, 512, 32], "top_mlp": [512, 1]}}
    ),
    "cache of one batch": Forced(
        expected={"write_back"},
        settings={"cache.capacity": "4000 rows"},
        prefetcher=SLOW_STORE.format(read_s=0.0, write_s=0.01),
    ),
    "frequent barriers": Forced(expected={"barrier", "write", "checkpoint"}, settings={"checkpoint.every": 4}),
}


def open_batches(
    job: rowcast.Job, num_batches: int = 320, sleep_ms: float = 0.0
) -> Callable[[str, int], Iterator[rowcast.Batch]]:
    """Low rows are looked up more often than high ones."""

    def batches(split: str, epoch: int) -> Iterator[rowcast.Batch]:
        random = np.random.default_rng(epoch)
        for _ in range(num_batches if split == "train" else 0):
            time.sleep(sleep_ms / 1e3)
            ids = (ROWS * random.random(FEATURES * SAMPLES) ** 2).astype(np.int64)
            yield rowcast.Batch(
                dense=random.normal(size=(SAMPLES, 4)).astype(np.float32),
                labels=(ids[:SAMPLES] % 2).astype(np.float32),
                ids=ids,
            )

    return batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    recorded_s: float  # a step
    walked: Walked
    waits: dict[str, float]  # recorded, as `Walked.waits`
    load: float


def run(forced: Forced, num_steps: int) -> Found:
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as folder:
        run_dir, config = Path(folder) / "run", Path(folder) / "job.toml"
        config.write_text("")
        options = {"num_batches": num_steps, **dict(forced.settings.get("data.options", {}))}  # type: ignore[call-overload]
        values = {**JOB, **forced.settings, "data.options": options, "job.run_dir": str(run_dir)}
        config.write_text("".join(sections(values)))
        programs = {"prefetcher": forced.prefetcher, "trainer": forced.trainer}
        started = {
            name: subprocess.Popen(
                [sys.executable, "-c", code + COMMAND.format(name=name), "run", f"--config={config}", "--timeline"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, code in programs.items()
        }
        terminate(started, TIMEOUT_S)
        load = os.getloadavg()[0]
        recordings = read_run(run_dir)
        recorded = recorded_run(recordings)
        measured = steady(recorded.ended)
        waits: dict[str, float] = {}
        for name, began_s, ended_s in waited(recordings):
            thread, _, reason = name.partition(": ")
            if thread in WHOSE:
                key = f"{WHOSE[thread]}: {reason}"
                waits[key] = waits.get(key, 0.0) + measured.share(began_s, ended_s)
        quick = {"data.options": {**options, "sleep_ms": 0}}
        config.write_text("".join(sections(values | quick)))
        plan, wiring, _ = plan_job(load_job(config))
        return Found(
            recorded_s=measured.step_s,
            walked=walk(plan, wiring, recorded, recorded.begins),
            waits=waits,
            load=load,
        )


def sections(values: Mapping[str, object]) -> Iterator[str]:
    """A job file: one line a key, with its section's name before it."""
    for key, value in values.items():
        yield f"{key} = {inline(value)}\n"


def inline(value: object) -> str:
    """A value of TOML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(own)}" for key, own in value.items()) + "}"
    return "[" + ", ".join(map(inline, value)) + "]" if isinstance(value, list) else json.dumps(value)


def row(name: str, forced: Forced, found: Found) -> str:
    walked = found.walked
    told = {name for name, _ in (*walked.bound_by[:1], *walked.through[:1])}
    return (
        f"| {name} | {1e3 * found.recorded_s:.1f} | {walked.step_s / found.recorded_s - 1:+.1%} | "
        f"{described(walked)} | "
        f"{shares(found.waits)} | {shares(walked.waits)} | {'yes' if told & forced.expected else 'no'} | "
        f"{found.load:.0f} |"
    )


def shares(waits: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in waits.items() if share >= 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", action="append", choices=list(FORCED), help="repeatable; all by default")
    parser.add_argument("--steps", type=int, default=320)
    options = parser.parse_args()
    print(machine())
    print(
        "| forced | ms a step | walked | critical path | waits, recorded | walked | named | load |\n" + "|---" * 8 + "|"
    )
    for name in options.job or FORCED:
        print(row(name, FORCED[name], run(FORCED[name], options.steps)), flush=True)


if __name__ == "__main__":
    main()
