"""How much processor time passes between the start of `rowcast train` and its first steps, in which process and part?

Method: the DLRM of examples/retail.toml over small npy files that this program writes, batches of 64. A run is stopped
at its first line of progress, six steps after its start; the kernel's processor time of each of its processes is read
there. numba's cache is a folder of its own:

    cold       it is empty; `loops` are the files that the run adds to it
    warm       it is what the cold run has left
    prepared   it is what `rowcast prepare` has left in an empty one, for a job that this has not seen: a tiered store,
               bags, tables of three widths; over the same run once more (--prepare)

Each round also runs `import torch` alone, and the parts of both processes alone (`start_parts.py`). What a process
takes besides these parts is connecting, rows and batches. With --against, another checkout with an environment of its
own takes turns with this one. Medians over rounds, quartiles in brackets; a ratio is one of two runs of a round.

    python -m benchmarks.start                                     # make bench-start
    python -m benchmarks.start --against ../before --rounds 9
    python -m benchmarks.start --prepare --rounds 3
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.machine import write_result
from benchmarks.processes import processor_s, turns
from benchmarks.training.free_cores import free_cores
from rowcast.job.file import load_job

ROOT = Path(__file__).parents[1]
PARTS = ROOT / "benchmarks" / "start_parts.py"
SAMPLES, BATCH = 2**16, 64
WIDTHS, BAG = (8, 16, 24), 4  # `rowcast prepare` has not seen the job that has these
IMPORT_TORCH = "import torch, time; print(time.process_time())"

Figures = dict[str, list[float]]  # what -> its values, round by round


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """A checkout with its own environment."""

    name: str
    folder: Path

    @property
    def python(self) -> str:
        return sys.executable if self.folder == ROOT else str(self.folder / ".venv" / "bin" / "python")

    def start(self, arguments: Sequence[str], cache: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.python, *arguments],
            cwd=self.folder,
            env=os.environ | {"NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def output(self, arguments: Sequence[str], cache: Path) -> str:
        process = self.start(arguments, cache)
        output, _ = process.communicate(timeout=1200)
        if process.returncode != 0:
            raise SystemExit(f"{self.name}: {' '.join(arguments)} ended with {process.returncode}: {output[-2000:]}")
        return output


def write_npy(folder: Path) -> Path:
    """A job over these files: examples/retail.toml as npy."""
    rng, text = np.random.default_rng(1), (ROOT / "examples" / "retail.toml").read_text()
    rows = [table.num_embeddings for table in load_job(ROOT / "examples" / "retail.toml").tables]
    np.save(folder / "day_0_dense.npy", rng.random((SAMPLES, 13), np.float32))
    np.save(folder / "day_0_sparse.npy", rng.integers(0, rows, (SAMPLES, len(rows)), np.int32))
    np.save(folder / "day_0_labels.npy", rng.integers(0, 2, (SAMPLES, 1), np.int32))
    for old, new in (
        ('"criteo-tsv"', '"criteo-npy"'),
        ('"data/retail/train.tsv"', f'"{folder}"'),
        ("batch_size = 2048", f"batch_size = {BATCH}"),
        ("eval_fraction = 0.1", "epochs = 100"),
        ('run_dir = "runs/retail"', f'run_dir = "{folder / "run"}"'),
    ):
        assert old in text, f"{old} is not in examples/retail.toml"
        text = text.replace(old, new)
    job = folder / "job.toml"
    job.write_text(text + "\n[trainer]\nthreads = 1\n")
    return job


def write_bags(folder: Path) -> Path:
    """A job over a Parquet file: bags in tables of three widths, in a tiered store."""
    rng = np.random.default_rng(2)
    offsets = np.arange(0, SAMPLES * BAG + 1, BAG, dtype=np.int32)
    bags = {f"f{n}": pa.ListArray.from_arrays(offsets, rng.integers(0, 10_000, SAMPLES * BAG)) for n in WIDTHS}
    dense = {f"int_{n}": rng.random(SAMPLES, np.float32) for n in range(2)}
    pq.write_table(pa.table({"label": rng.integers(0, 2, SAMPLES), **dense, **bags}), folder / "bags.parquet")
    tables = "\n".join(
        f'[[tables]]\nname = "t{n}"\nnum_embeddings = 10_000\nembedding_dim = {n}\nfeatures = ["f{n}"]' for n in WIDTHS
    )
    job = folder / "job.toml"
    job.write_text(
        f"""
[job]
run_dir = "{folder / "run"}"
[data]
format = "parquet"
path = "{folder / "bags.parquet"}"
batch_size = {BATCH}
epochs = 100
{tables}
[model]
kind = "examples.custom_model:build"
[optimizer]
sparse = {{ kind = "adagrad", lr = 0.02 }}
dense = {{ kind = "adam", lr = 0.001 }}
[cache]
capacity = "1MiB"
[store]
kind = "tiered"
memory = "1GiB"
[trainer]
threads = 1
"""
    )
    return job


def started(tree: Tree, job: Path, cache: Path) -> tuple[dict[str, float], int]:
    """Processor time by process at the first line of progress, and the loops that were compiled for it."""
    loops = num_loops(cache)
    process = tree.start(["-m", "rowcast", "train", "--config", str(job), "--fresh"], cache)
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step "):
                return processor_s(process.pid), num_loops(cache) - loops
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    raise SystemExit(f"{tree.name} has not trained: {''.join(lines)[-2000:]}")


def num_loops(cache: Path) -> int:
    return sum(1 for _ in cache.rglob("*.nbc"))


def parts_of(tree: Tree, process: str, job: Path, cache: Path) -> dict[str, Any]:
    output = tree.output([str(PARTS), process, str(job)], cache)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def warm_round(tree: Tree, job: Path, cache: Path) -> Iterator[tuple[str, float]]:
    """What -> its value."""
    torch_s = float(tree.output(["-c", IMPORT_TORCH], cache))
    seconds, compiled = started(tree, job, cache)
    yield from seconds.items()
    yield "all processes", sum(seconds.values())
    yield "import torch alone", torch_s
    yield "trainer over import torch", seconds["trainer"] / torch_s
    yield "loops compiled", compiled
    for process in ("trainer", "prefetcher"):
        alone = parts_of(tree, process, job, cache)
        if process == "trainer":
            yield "modules of torch._dynamo and sympy", alone["spared"]
        for part, own_s in alone["seconds"].items():
            yield f"{process}: {part}", own_s
        yield f"{process}: connecting, rows, batches", seconds[process] - sum(alone["seconds"].values())


def cold_round(tree: Tree, job: Path, cache: Path) -> Iterator[tuple[str, float]]:
    seconds, compiled = started(tree, job, cache)
    yield from seconds.items()
    yield "all processes", sum(seconds.values())
    yield "loops compiled", compiled


def prepared_round(tree: Tree, job: Path, cache: Path) -> Iterator[tuple[str, float]]:
    first, compiled = started(tree, job, cache)
    second, _ = started(tree, job, cache)
    yield "both processes, prepared", both(first)
    yield "both processes, once more", both(second)
    yield "prepared over once more", both(first) / both(second)
    yield "loops compiled", compiled


def both(seconds: Mapping[str, float]) -> float:
    return seconds["trainer"] + seconds["prefetcher"]


Round = Callable[[Tree, Path, Path], Iterator[tuple[str, float]]]


def rounds_of(
    of: Round, trees: Sequence[Tree], rounds: int, job: Path, cache_of: Callable[[Tree, int], Path]
) -> dict[str, Figures]:
    """The trees take turns."""
    found: dict[str, Figures] = {tree.name: {} for tree in trees}
    by_name = {tree.name: tree for tree in trees}
    for number, name in turns(list(by_name), rounds):
        for what, value in of(by_name[name], job, cache_of(by_name[name], number)):
            found[name].setdefault(what, []).append(value)
        print(f"round {number} of {rounds}: {name}", file=sys.stderr, flush=True)
    return found


def with_quartiles(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def table(title: str, found: Mapping[str, Figures]) -> str:
    """A column per tree, and one of the ratios if there are two."""
    names = list(found)
    over = [f"{names[0]} over {names[1]}"] if len(names) == 2 else []
    lines = [f"| {title} | {' | '.join([*names, *over])} |", "|---" * (1 + len(names) + len(over)) + "|"]
    for what in found[names[0]]:
        values = [found[name].get(what, [0.0]) for name in names]
        cells = [with_quartiles(own) for own in values]
        if over:
            pairs = [own / other for own, other in zip(*values, strict=False) if other]
            cells.append(with_quartiles(pairs) if pairs else "")
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", type=int, default=1, help="rounds with an empty cache")
    parser.add_argument("--against", type=Path, help="another checkout, with .venv")
    parser.add_argument("--prepare", action="store_true", help="only what `rowcast prepare` spares")
    options = parser.parse_args()
    trees = [Tree(name="here", folder=ROOT)]
    if options.against is not None:
        trees.append(Tree(name=options.against.name, folder=options.against.resolve()))
    free = [free_cores()]
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as path:
        scratch = Path(path)
        found = prepared(trees, options.rounds, scratch) if options.prepare else both_caches(trees, options, scratch)
    for title, figures in found.items():
        print(table(f"{title}: processor time, s", figures) + "\n")
    free.append(free_cores())
    print(f"{options.rounds} rounds, free cores {free[0]:.2f} before and {free[1]:.2f} after")
    write_result("start", rounds=options.rounds, free_cores=free, figures=found)


def both_caches(trees: Sequence[Tree], options: argparse.Namespace, scratch: Path) -> dict[str, dict[str, Figures]]:
    job = write_npy(scratch)

    def fresh(tree: Tree, number: int) -> Path:
        shutil.rmtree(scratch / tree.name, ignore_errors=True)
        (scratch / tree.name).mkdir()
        return scratch / tree.name

    cold = rounds_of(cold_round, trees, options.cold, job, fresh)
    for tree in trees:  # the parts may need more loops than the run
        warm_all(tree, job, scratch / tree.name)
    warm = rounds_of(warm_round, trees, options.rounds, job, lambda tree, number: scratch / tree.name)
    return {"cold": cold, "warm": warm}


def warm_all(tree: Tree, job: Path, cache: Path) -> None:
    for process in ("trainer", "prefetcher"):
        parts_of(tree, process, job, cache)


def prepared(trees: Sequence[Tree], rounds: int, scratch: Path) -> dict[str, dict[str, Figures]]:
    job = write_bags(scratch)
    for tree in trees:
        print(tree.output(["-m", "rowcast", "prepare"], scratch / f"{tree.name}-prepared"), file=sys.stderr)

    def copied(tree: Tree, number: int) -> Path:
        cache = scratch / f"{tree.name}-{number}"
        shutil.copytree(scratch / f"{tree.name}-prepared", cache)
        return cache

    return {"prepared": rounds_of(prepared_round, trees, rounds, job, copied)}


if __name__ == "__main__":
    main()
