"""How fast are look-up and update of a step's rows, compared with stock PyTorch and FBGEMM?

Method: 26 tables of dimension 32 with Criteo Kaggle cardinalities, each cut at 1,000,000 rows, batches of 2,048
single-hot samples with ids by Zipf 1.05, another batch every step. The gradient of the pooled rows is one fixed random
tensor. Only the embedding layers' part of a train step is timed:

    rowcast    each look-up's slot and bag made from the plan, then the layer's forward and backward, which updates,
               over a cache of 5 % of the rows that the run touches (at least a batch's), with plans by the planner.
               Rows move between cache and table between steps, untimed: in a run other threads move them
    torch_ops  the same with the plain torch operations that define rowcast's bits
    stock      one nn.EmbeddingBag(sparse=True) per table: forward, backward, step of the torch.optim optimizer; all
               rows in memory
    fbgemm     SplitTableBatchedEmbeddingBagsCodegen on the CPU: forward, backward with its fused optimizer; all rows in
               memory

Each contestant is a process of its own. They take turns, one step each, in rotating order, while the others sleep.
Before its clock starts each one multiplies a few matrices, as a model would between two steps. A ratio is the median
over the ratios of the steps. FBGEMM runs with all threads and with one, and the faster of the two is compared. After
the last step all contestants look up the next batch's rows, and the largest difference to rowcast's is printed, to show
that they did equal work.

    make bench-env        # FBGEMM's environment; without it that contestant is omitted
    make bench-embedding
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.machine import write_result
from benchmarks.peers.turns import Seconds, Terms, initial_rows
from benchmarks.planner import job
from rowcast.job.schema import CRITEO_KAGGLE_CARDINALITIES
from rowcast.prefetcher.readers.reader import open_reader, schedule

ROOT = Path(__file__).parent.parent
PEER_PYTHON = Path(".venv-bench") / "bin" / "python"
OPTIMIZERS = {"sgd": 0.05, "adagrad": 0.02, "rowwise_adagrad": 0.02}  # learning rates
MOST_ROWS, DIM, CACHE_SHARE = 1_000_000, 32, 0.05
EPS = 1e-10
WARM_UP_STEPS = 40


class Process:
    def __init__(self, name: str, python: Path | str, folder: Path, threads: int, *arguments: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [
                str(python),
                "-m",
                f"benchmarks.peers.{name.partition(' ')[0]}_embedding",
                str(folder),
                str(threads),
                *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_WAIT_POLICY": "passive", "PYTHONWARNINGS": "ignore"},
        )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ready(self) -> None:
        self._answer()

    def step(self, step: int) -> Seconds:
        return self._ask(f"step {step}")

    def look_up(self, step: int, path: Path) -> npt.NDArray[np.float32]:
        self._ask(f"look_up {step} {path}")
        pooled: npt.NDArray[np.float32] = np.load(path)
        return pooled

    def _ask(self, line: str) -> Seconds:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Seconds:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"contestant {self.name} ended with code {self._process.wait()}")
        seconds: Seconds = json.loads(line)
        return seconds


Pooled = npt.NDArray[np.float32]  # [F * B, D]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One contestant with one optimizer; medians over steps."""

    optimizer: str
    name: str
    phases_ms: dict[str, float]
    total_ms: float
    ratio: float  # rowcast's time over this contestant's, step by step
    difference: float  # largest, over the rows that all look up after the last step
    change: float  # largest change of these rows by training


def cardinalities() -> list[int]:
    return [min(rows, MOST_ROWS) for rows in CRITEO_KAGGLE_CARDINALITIES]


def stream(batch_size: int, num_steps: int) -> npt.NDArray[np.int64]:
    """i64 [num_steps, F * B]"""
    own = job(batch_size, num_steps, cardinalities(), DIM)
    return np.stack([scheduled.batch.ids for scheduled in schedule(own, open_reader(own))])


def cache_slots(ids: npt.NDArray[np.int64], share: float) -> tuple[int, int]:
    """Slots of the cache, and the distinct rows of the run."""
    tables = np.repeat(
        np.arange(len(CRITEO_KAGGLE_CARDINALITIES), dtype=np.int64) << 32,
        ids.shape[1] // len(CRITEO_KAGGLE_CARDINALITIES),
    )
    keys = ids | tables
    touched = len(np.unique(keys))
    return max(int(share * touched), *(len(np.unique(of_step)) for of_step in keys)), touched


def first_look_up(terms: Terms, ids: npt.NDArray[np.int64]) -> Pooled:
    return np.concatenate(
        [initial_rows(table, terms)[own] for table, own in enumerate(ids.reshape(-1, terms.batch_size))]
    )


def contestants(terms: Terms, folder: Path, peer_python: Path, threads: int) -> list[Process]:
    """The first is rowcast."""
    running = [
        Process("rowcast", sys.executable, folder, threads, "compiled_ops"),
        Process("rowcast torch_ops", sys.executable, folder, threads, "torch_ops"),
    ]
    if terms.optimizer != "rowwise_adagrad":
        running.append(Process("stock", sys.executable, folder, threads))
    if peer_python.exists():
        running += [Process(f"fbgemm {n}", peer_python, folder, n) for n in sorted({1, threads}, reverse=True)]
    return running


def measure(terms: Terms, ids: npt.NDArray[np.int64], rounds: int, peer_python: Path, threads: int) -> list[Result]:
    with tempfile.TemporaryDirectory() as path, ExitStack() as stack:
        folder = Path(path)
        np.save(folder / "ids.npy", ids)
        gradient = np.random.default_rng(1).standard_normal((ids.shape[1], terms.dim), np.float32) / np.float32(
            terms.batch_size
        )
        np.save(folder / "gradient.npy", gradient)
        (folder / "terms.json").write_text(json.dumps(asdict(terms)))
        running = [stack.enter_context(process) for process in contestants(terms, folder, peer_python, threads)]
        for process in running:
            process.ready()
        times = compete(running, WARM_UP_STEPS + rounds)
        found = [process.look_up(WARM_UP_STEPS + rounds, folder / "rows.npy") for process in running]
    untrained = first_look_up(terms, ids[-1])
    return [
        result(terms.optimizer, process.name, own, times[0], pooled, found[0], untrained)
        for process, own, pooled in zip(running, times, found, strict=True)
    ]


def compete(running: list[Process], num_steps: int) -> list[list[Seconds]]:
    times: list[list[Seconds]] = [[] for _ in running]
    for step in range(num_steps):
        for turn in range(len(running)):
            index = (step + turn) % len(running)
            seconds = running[index].step(step)
            if step >= WARM_UP_STEPS:
                times[index].append(seconds)
    return times


def result(
    optimizer: str,
    name: str,
    own: list[Seconds],
    rowcast: list[Seconds],
    pooled: Pooled,
    expected: Pooled,
    untrained: Pooled,
) -> Result:
    totals, reference = ([sum(seconds.values()) for seconds in times] for times in (own, rowcast))
    return Result(
        optimizer=optimizer,
        name=name,
        phases_ms={phase: 1e3 * statistics.median(seconds[phase] for seconds in own) for phase in own[0]},
        total_ms=1e3 * statistics.median(totals),
        ratio=statistics.median(ours / theirs for ours, theirs in zip(reference, totals, strict=True)),
        difference=float(np.abs(pooled - expected).max()),
        change=float(np.abs(pooled - untrained).max()),
    )


def report(results: list[Result]) -> Iterator[str]:
    yield (
        "| optimizer | contestant | ms a step | of which | rowcast's time over its | largest difference "
        "| largest change by training |"
    )
    yield "|---|---|---|---|---|---|---|"
    for own in results:
        phases = ", ".join(f"{phase} {ms:.2f}" for phase, ms in own.phases_ms.items())
        agreement = f"{own.difference:.1e} | {own.change:.1e}"
        yield f"| {own.optimizer} | {own.name} | {own.total_ms:.2f} | {phases} | {own.ratio:.2f} | {agreement} |"
    yield ""
    for optimizer in dict.fromkeys(own.optimizer for own in results):
        for peer in ("stock", "fbgemm"):
            others = [own for own in results if own.optimizer == optimizer and own.name.startswith(peer)]
            if others:
                worst = max(own.ratio for own in others)
                yield f"{optimizer}: rowcast takes {worst:.2f} of {peer}'s time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--share", type=float, default=CACHE_SHARE, help="of the rows touched that the cache holds")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer-python", type=Path, default=ROOT / PEER_PYTHON)
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    arguments = parser.parse_args()
    ids = stream(arguments.batch_size, WARM_UP_STEPS + arguments.rounds + 1)
    slots, touched = cache_slots(ids, arguments.share)
    print(
        f"{len(ids)} steps touch {touched:,} of {sum(cardinalities()):,} rows; the cache holds {slots:,}; "
        f"{arguments.threads} threads"
    )
    print("rows that move between cache and table are not timed: in a run other threads move them")
    if not arguments.peer_python.exists():
        print(f"without FBGEMM: {arguments.peer_python} is missing; make bench-env builds it")
    results: list[Result] = []
    for optimizer in arguments.optimizers:
        terms = Terms(
            cardinalities=cardinalities(),
            dim=DIM,
            batch_size=arguments.batch_size,
            optimizer=optimizer,
            lr=OPTIMIZERS[optimizer],
            eps=EPS,
            slots=slots,
        )
        results += measure(terms, ids, arguments.rounds, arguments.peer_python, arguments.threads)
    print("\n".join(report(results)))
    facts = {name: getattr(arguments, name) for name in ("batch_size", "threads", "rounds")}
    write_result("embedding", touched=touched, slots=slots, **facts, results=[asdict(own) for own in results])


if __name__ == "__main__":
    main()
