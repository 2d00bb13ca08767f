"""How long is the thread that issues a device's work busy with a step, and how often are a process's threads woken?

Method, by part:

issue       The trainer's engine, fed from recorded plans (`trainer/rates/replay.py`) on plain streams, where work runs
            as it is issued. In place of the model, a stand-in looks up and updates by kernels that compute nothing;
            the batch is so small that moving rows costs little. 26 tables of one width, then of six, hence one group
            and six; each group has a row that is looked up often enough to be cut into chunks. The time of a step
            is that of the calls of `TrainingLoop.advance` that did something between two steps' ends: of the thread's
            processor, and by the clock. Medians of the steps after the first third.
wake-ups    The demo, with two real processes: how often a thread that waited on its bell was woken by it.
bell        Four threads wait; one is woken, or all. Processor time of the process for a ring.

    make bench-issue
"""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from torch import Tensor

from benchmarks.machine import machine
from benchmarks.processes import terminate
from benchmarks.training.free_cores import free_cores
from benchmarks.training.recorded import record, slots_for, touched, train_batches
from rowcast.analysis.estimate.rates.replay import Replay
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec
from rowcast.runtime.stages import Doorbell
from rowcast.trainer.device.phases import Shown
from rowcast.trainer.device.streams import Streams
from rowcast.trainer.kernels import GroupLookup, RecordViews, Rule
from rowcast.trainer.models.embedding import Embeddings
from rowcast.trainer.models.evaluate import EvalCounts
from rowcast.trainer.models.model_state import Tensors
from rowcast.trainer.models.runner import step_lookups
from rowcast.trainer.report.report_json import read_report
from rowcast.trainer.step.cache import ArrivedStep

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"
PROCESSES = ("prefetcher", "trainer")
COUNT = "--count"  # with this option the file starts itself
TABLES, ROWS, FEW_ROWS = 26, 2_000, 1
FEW_ROWS_EVERY = 5  # one table in five has few rows; so has one of each group
WIDTHS = {1: (16,), 6: (16, 24, 32, 40, 48, 56)}
MODELS = {1: "dlrm", 6: "dcnv2"}  # a DLRM has one width
WARM_SHARE = 3  # one step in three is warm-up
WAITING_THREADS = 4


def job_of(num_groups: int, batch_size: int, steps: int) -> Job:
    widths = WIDTHS[num_groups]
    return parse_job(
        {
            "job": {"run_dir": "unused", "seed": 7},
            "data": {
                "format": "synthetic",
                "batch_size": batch_size,
                "synthetic": {"samples": batch_size * steps, "zipf": 1.05},
            },
            "tables": [
                {
                    "name": f"table_{number}",
                    "num_embeddings": ROWS if number % FEW_ROWS_EVERY else FEW_ROWS,
                    "embedding_dim": widths[number % len(widths)],
                    "features": [f"feature_{number}"],
                }
                for number in range(TABLES)
            ],
            "model": {"kind": MODELS[num_groups], "bottom_mlp": [widths[0]], "top_mlp": [1]},
            "optimizer": {"sparse": {"kind": "rowwise_adagrad", "lr": 0.02}, "dense": {"kind": "sgd", "lr": 0.1}},
            "cache": {"capacity": "1GiB"},
        }
    )


class NoKernels:
    """Implements `Kernels` without computing anything."""

    def lookup(self, rows: RecordViews, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        num_bags = len(group.slots) if group.offsets is None else len(group.offsets) - 1
        return torch.empty(num_bags, rows.weight.shape[1])

    def reduce(self, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
        raise AssertionError("a step updates rows in one pass")

    def apply(self, rows: RecordViews, unique_slots: Tensor, row_grads: Tensor, rule: Rule) -> None:
        raise AssertionError("a step updates rows in one pass")

    def update(
        self, rows: RecordViews, pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None, rule: Rule
    ) -> None: ...


class NoModel:
    """Looks up and updates the rows of a step; there is nothing between the two."""

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings

    def issue_train(self, streams: Streams, step: ArrivedStep, loss: Tensor) -> None:
        streams.compute.run(lambda: self._train(step))

    def _train(self, step: ArrivedStep) -> None:
        lookups = step_lookups(step)
        pooled = self._embeddings.pool(lookups)
        update = self._embeddings.expect_update(lookups, step.header.train_step)
        self._embeddings.by_feature(pooled, lookups)
        update.apply(pooled)

    def issue_evaluate(self, streams: Streams, step: ArrivedStep, shown: Shown) -> None:
        raise AssertionError("the stream has train steps only")

    def issue_close(self, streams: Streams, closed: list[EvalCounts]) -> None:
        raise AssertionError("the stream has train steps only")

    def completed(self, step: int) -> None:
        pass

    def issue_state(self, streams: Streams) -> None:
        pass

    def state(self) -> Tensors:
        return {}

    def restore(self, tensors: Tensors) -> bool:
        return False


@contextmanager
def replay_of(num_groups: int, batch_size: int, steps: int) -> Iterator[Replay]:
    """A cache of twice the rows that a batch touches, so that rows leave in every step."""
    job = job_of(num_groups, batch_size, steps)
    batches = train_batches(job, steps)
    slots = slots_for(job, batches, 2 * touched(job, batches).largest_batch)

    def make_runner(groups: tuple[GroupSpec, ...], records: list[Tensor], num_dense: int) -> NoModel:
        return NoModel(Embeddings(groups, job.optimizer.sparse, records, NoKernels()))

    with record(job, batches, slots, torch.device("cpu")) as recording:
        yield Replay(recording, job, make_runner)


# issue


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """Milliseconds of the issuing thread for each step."""

    cpu_ms: list[float]
    wall_ms: list[float]


def issue(num_groups: int, batch_size: int, steps: int) -> Issued:
    with replay_of(num_groups, batch_size, steps) as replay:
        loop, peer = replay.engine.loop, replay.peer
        others = [stage.advance for name, stage in replay.engine.stages.items() if name != "loop"] + [peer.advance]
        cpu_ms, wall_ms, spent_s, passed_s = [], [], 0.0, 0.0
        while len(peer.done_s) < replay.num_steps:
            for advance in others:
                advance()
            done = loop.step_done
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            if loop.advance():
                spent_s += time.thread_time() - began_cpu_s
                passed_s += time.perf_counter() - began_s
            if loop.step_done != done:
                cpu_ms.append(1e3 * spent_s)
                wall_ms.append(1e3 * passed_s)
                spent_s = passed_s = 0.0
    return Issued(cpu_ms=cpu_ms[steps // WARM_SHARE :], wall_ms=wall_ms[steps // WARM_SHARE :])


def issue_table(batch_size: int, steps: int, rounds: int) -> list[str]:
    lines = ["| groups | processor ms a step | by the clock | fastest tenth |", "|---|---|---|---|"]
    for num_groups in WIDTHS:
        measured = [issue(num_groups, batch_size, steps) for _ in range(rounds)]
        cpu_ms = sorted(ms for one in measured for ms in one.cpu_ms)
        wall_ms = statistics.median(ms for one in measured for ms in one.wall_ms)
        tenth = cpu_ms[len(cpu_ms) // 10]
        lines.append(f"| {num_groups} | {statistics.median(cpu_ms):.3f} | {wall_ms:.3f} | {tenth:.3f} |")
    return lines


# wake-ups


def run_counted(process: str, out: Path, arguments: list[str]) -> None:
    """In a process of its own: runs a command and counts how its threads' waits ended."""
    waits: Counter[str] = Counter()  # each key is written by one thread
    wait = Doorbell.wait

    def counted(self: Doorbell, timeout_s: float) -> bool:
        rung = wait(self, timeout_s)
        waits[f"{threading.current_thread().name} {'rung' if rung else 'time-out'}"] += 1
        return rung

    Doorbell.wait = counted  # type: ignore[method-assign]
    if process == "prefetcher":
        from rowcast.command_line.prefetcher import app
    else:
        from rowcast.command_line.trainer import app
    try:
        app(arguments)
    finally:
        out.write_text(json.dumps(waits))


def start_counted(process: str, out: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.issue", COUNT, process, str(out), "run", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wake_table(samples: int) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as path:
        folder = Path(path)
        arguments = ["--config", str(DEMO), f'--set=job.run_dir="{folder / "run"}"']
        arguments += [f"--set=data.synthetic.samples={samples}"]
        arguments += [f"--set=metrics.{name}=127.0.0.1:0" for name in PROCESSES]
        started = {name: start_counted(name, folder / f"{name}.json", arguments) for name in reversed(PROCESSES)}
        terminate(started, 1800)
        report = read_report(folder / "run" / "report.json")
        steps = report.steps + report.eval_steps
        waits = {name: Counter(json.loads((folder / f"{name}.json").read_text())) for name in PROCESSES}
    lines = ["| process | wake-ups a step, by a bell | of which | time-outs in the run |", "|---|---|---|---|"]
    for name, own in waits.items():
        rung = {key.removesuffix(" rung"): count / steps for key, count in own.items() if key.endswith(" rung")}
        shares = ", ".join(f"{thread} {each:.1f}" for thread, each in sorted(rung.items(), key=lambda one: -one[1]))
        silent = ", ".join(f"{key.removesuffix(' time-out')} {n}" for key, n in own.items() if key.endswith("time-out"))
        lines.append(f"| {name} | {sum(rung.values()):.1f} | {shares} | {silent} |")
    return [*lines, "", f"{steps} steps of {1e3 * report.wall_s / steps:.1f} ms"]


# bell


def ring_us(num_rung: int, rings: int) -> float:
    """Processor time of the process for waking `num_rung` of WAITING_THREADS threads, which then wait again."""
    bells = [Doorbell() for _ in range(WAITING_THREADS)]
    answers = threading.Semaphore(0)
    over = False

    def wait_again(bell: Doorbell) -> None:
        while True:
            bell.wait(60.0)
            if over:
                return
            answers.release()

    threads = [threading.Thread(target=wait_again, args=(bell,)) for bell in bells]
    for thread in threads:
        thread.start()
    began_s = time.process_time()
    for _ in range(rings):
        for bell in bells[:num_rung]:
            bell.ring()
        for _ in range(num_rung):
            answers.acquire()
    spent_s = time.process_time() - began_s
    over = True
    for bell, thread in zip(bells, threads, strict=True):
        bell.ring()
        thread.join()
    return 1e6 * spent_s / rings


def bell_table(rings: int) -> list[str]:
    rounds: list[Callable[[], tuple[float, float]]] = [lambda: (ring_us(1, rings), ring_us(WAITING_THREADS, rings))] * 5
    one, every = (statistics.median(times) for times in zip(*(measure() for measure in rounds), strict=True))
    return [
        "| who is woken | processor us a ring |",
        "|---|---|",
        f"| one of {WAITING_THREADS} | {one:.1f} |",
        f"| all {WAITING_THREADS} | {every:.1f} |",
    ]


def main(batch_size: int = 132, steps: int = 300, rounds: int = 5, samples: int = 409_600, rings: int = 2000) -> None:
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], list[str]]] = {
        "issue": lambda: issue_table(batch_size, steps, rounds),
        "wake-ups": lambda: wake_table(samples),
        "bell": lambda: bell_table(rings),
    }
    for name, part in parts.items():
        typer.echo("\n".join([f"{name}, with {free_cores():.1f} cores free", "", *part(), ""]))
    typer.echo(" ".join(f"{name}={value}" for name, value in machine().items()))


def dispatch(arguments: Sequence[str]) -> None:
    if arguments[:1] == [COUNT]:
        run_counted(arguments[1], Path(arguments[2]), list(arguments[3:]))
    else:
        typer.run(main)


if __name__ == "__main__":
    dispatch(sys.argv[1:])
