"""How far is a run that was estimated from a rates file off what both processes take, for jobs never measured?

Method: random jobs, each run by both processes as a user starts them, with `--timeline`, for 300 steps. Each is
estimated as `prefetcher estimate --rates` does it, before it runs. Measured and estimated are the pace of steady steps:
without the first quarter and the last few. No job was used to fit anything. Other programs count in the pace: the load
of the machine stands beside each job, and the processor time that the trainer took for a step, which is its pace where
nothing else wants its cores and it waits for nothing.

With `--ranks`, each job is shared by as many trainers of this host, each with its prefetcher, and rank 0 is measured.
With `--sleep-us`, a model sleeps so long for each sample of a forward pass, as a host does while a device computes, and
leaves the cores to the rest; then the device is measured before each job, with its model as a whole.

    python -m benchmarks.estimate_jobs [--rates rates.json] [--jobs 24] [--seed 1] [--ranks 2] [--hidden 512 1024]
    python -m benchmarks.estimate_jobs --jobs 6 --ranks 2 --sleep-us 100
"""

import argparse
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor, nn

from benchmarks.machine import machine
from benchmarks.processes import terminate
from benchmarks.training.free_cores import free_cores
from benchmarks.training.recorded import touched, train_batches
from rowcast.analysis.estimate.estimate import estimate_jobs
from rowcast.analysis.estimate.recorded import recorded_run
from rowcast.analysis.estimate.walk import described, steady
from rowcast.analysis.timeline.pairs import read_pairs
from rowcast.job.file import load_job
from rowcast.job.row_optimizers import ROW_OPTIMIZERS
from rowcast.job.schema import Job

STEPS, TIMEOUT_S = 300, 300
MEASURED_EVERY = 8
STEPS_COUNTED, PROCESSOR = "rowcast_train_steps", "process_cpu_seconds"  # metrics
LOOK_S = 0.2
EXCHANGING: dict[str, object] = {  # its exchanges are measured; no random job has its model
    "job.run_dir": "unused",
    "data.format": "synthetic",
    "data.synthetic": {"preset": "criteo-kaggle", "scale": 0.02},
    "tables_from.embedding_dim": 4,
    "model": {"kind": "dlrm", "bottom_mlp": [4], "top_mlp": [1]},
    "optimizer.sparse": {"kind": "sgd", "lr": 0.01},
    "optimizer.dense": {"kind": "sgd", "lr": 0.01},
    "cache.capacity": "1MiB",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    name: str
    measured_s: float  # a step
    processor_s: float  # a step, of all threads of the trainer
    estimated_s: float
    margin: float
    bound_by: str
    load: float

    @property
    def error(self) -> float:
        return self.estimated_s / self.measured_s - 1

    @property
    def processor_error(self) -> float:
        return self.estimated_s / self.processor_s - 1


def random_settings(chance: random.Random, widths: list[int]) -> tuple[dict[str, object], str, float]:
    """Settings of a job file, its name, and its cache as a share of the rows touched."""
    batch, dim = chance.choice((256, 512, 1024, 2048)), chance.choice((8, 16, 32))
    kind, sparse = chance.choice(("dlrm", "dcnv2")), chance.choice(list(ROW_OPTIMIZERS))
    dense, share = chance.choice(("sgd", "adagrad", "adam")), chance.choice((0.03, 0.1, 0.25, 0.5))
    hidden, depth = chance.choice(widths), chance.choice((1, 2, 4))
    model: dict[str, object] = {"kind": kind, "bottom_mlp": [hidden, dim], "top_mlp": [hidden, hidden // 2, 1]}
    if kind == "dcnv2":
        model |= {"cross_layers": chance.choice((1, 2)), "cross_rank": chance.choice((16, 64))}
    settings: dict[str, object] = {
        "job.name": "random",
        "job.seed": chance.randrange(1000),
        "data.format": "synthetic",
        "data.batch_size": batch,
        "data.synthetic": {"preset": "criteo-kaggle", "scale": 0.02, "samples": batch * STEPS},
        "tables_from.embedding_dim": dim,
        "model": model,
        "optimizer.sparse": {"kind": sparse, "lr": 0.01},
        "optimizer.dense": {"kind": dense, "lr": 0.01},
        "lookahead.depth": depth,
        "checkpoint.every": 0,
        "prefetcher.threads": 1,
        "trainer.threads": 1,
        "metrics.prefetcher": "127.0.0.1:0",
        "metrics.trainer": f"127.0.0.1:{free_port()}",
    }
    name = f"{kind} {hidden}, batch {batch}, dim {dim}, {sparse}, {dense}, cache {share:.0%}, depth {depth}"
    return settings, name, share


def sleeping(job: Job, num_dense: int, sleep_us: float) -> nn.Module:
    """A small model whose forward pass sleeps."""

    class Sleeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(num_dense + sum(table.width * len(table.features) for table in job.tables), 1)

        def forward(self, dense: Tensor, embeddings: list[Tensor]) -> Tensor:
            time.sleep(sleep_us / 1e6 * len(dense))
            logits: Tensor = self.layer(torch.cat([dense, *embeddings], dim=1))
            return logits.squeeze(1)

    return Sleeping()


def measure(rates: Path, config: Path | None, threads: int = 1) -> None:
    """Writes the rates file, for the job as a whole where it is given."""
    command = [sys.executable, "-m", "rowcast.trainer", "rates", f"--out={rates}", f"--threads={threads}"]
    subprocess.run([*command, *([f"--config={config}"] if config else [])], check=True, stdout=subprocess.DEVNULL)


def held_out(settings: Mapping[str, object], name: str, share: float, rates: Path, *, as_a_whole: bool) -> Found:
    """`as_a_whole`: the job's own model is measured before."""
    with tempfile.TemporaryDirectory(prefix="rowcast-bench-") as folder:
        config, run_dir = Path(folder) / "job.toml", Path(folder) / "run"

        def write(capacity: str) -> None:
            values = {**settings, "cache.capacity": capacity, "job.run_dir": str(run_dir)}
            config.write_text("".join(sections(values)))

        write("1MiB")
        job = load_job(config)
        seen = touched(job, train_batches(job, STEPS))
        write(f"{max(int(2.5 * seen.largest_batch), int(share * seen.rows))} rows")
        if as_a_whole:
            measure(rates, config, threads=2)  # by the wall clock, in which a sleep counts
        (estimated,) = estimate_jobs(lambda changes: load_job(config, tuple(changes)), [rates], [])
        commands = {process: [f"rowcast.{process}", "run"] for process in ("prefetcher", "trainer")}
        if job.ranks.count > 1:
            commands = {"run": ["rowcast.deploy.local"]}
        started = {
            process: subprocess.Popen(
                [sys.executable, "-m", *command, f"--config={config}", "--timeline"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for process, command in commands.items()
        }
        processor_s = processor_seconds([*started.values()][-1], str(settings["metrics.trainer"]))
        terminate(started, TIMEOUT_S)
        return Found(
            name=name,
            measured_s=steady(recorded_run(read_pairs(run_dir)[0]).ended).step_s,
            processor_s=processor_s,
            estimated_s=estimated.walked.step_s,
            margin=estimated.margin,
            bound_by=described(estimated.walked),
            load=os.getloadavg()[0],
        )


def processor_seconds(trainer: "subprocess.Popen[str]", address: str) -> float:
    """What a step takes of the processor, from a quarter of the steps on until the last look at the trainer."""
    seen: list[tuple[float, float]] = []  # steps, seconds
    while trainer.poll() is None:
        with suppress(OSError):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            values = {
                family.name: sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
                for family in text_string_to_metric_families(text)
                if family.name in (STEPS_COUNTED, PROCESSOR)
            }
            seen.append((values[STEPS_COUNTED], values[PROCESSOR]))
        time.sleep(LOOK_S)
    steady_ones = [own for own in seen if own[0] >= STEPS / 4]
    if len(steady_ones) < 2:
        return math.nan  # it failed
    (first, first_s), (last, last_s) = steady_ones[0], steady_ones[-1]
    return (last_s - first_s) / (last - first)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def said(found: list[Found], name: str, errors: list[float]) -> str:
    errors = sorted(map(abs, errors))
    return (
        f"{name}, {len(found)} jobs: mean error {statistics.mean(errors):.1%}, geometric mean "
        f"{statistics.geometric_mean([max(1e-4, error) for error in errors]):.1%}, nine of ten within "
        f"{errors[int(0.9 * len(errors)) - 1]:.1%}, worst {errors[-1]:.1%}"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=Path, help="if not given, the device is measured before every eighth job")
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sleep-us", type=int, default=0, help="microseconds that a model sleeps for each sample")
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 128, 256], help="widths of the models")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    print(f"{machine()}, {free_cores():.1f} cores free")
    print(
        "| job | pace, ms | processor ms | estimated ms | pace off by | processor off by | margin | bound by | load |\n"
        + "|---" * 9
        + "|"
    )
    found = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rowcast-bench-")))
        rates, config = options.rates or folder / "rates.json", folder / "job.toml"
        config.write_text("".join(sections(EXCHANGING | {"ranks.count": options.ranks})))
        for number in range(options.jobs):
            if options.rates is None and not options.sleep_us and number % MEASURED_EVERY == 0:
                measure(rates, config if options.ranks > 1 else None)
            settings, name, share = random_settings(chance, options.hidden)
            if options.sleep_us:
                model = {"kind": "benchmarks.estimate_jobs:sleeping", "options": {"sleep_us": options.sleep_us}}
                settings |= {"model": model}
                name = f"sleeping {options.sleep_us} us a sample{name[name.index(', batch') :]}"
            ranks = {"ranks.count": options.ranks}
            own = held_out(settings | ranks, name, share, rates, as_a_whole=bool(options.sleep_us))
            found.append(own)
            print(
                f"| {own.name} | {1e3 * own.measured_s:.2f} | {1e3 * own.processor_s:.2f} | "
                f"{1e3 * own.estimated_s:.2f} | {own.error:+.0%} | {own.processor_error:+.0%} | {own.margin:.0%} | "
                f"{own.bound_by} | {own.load:.1f} |",
                flush=True,
            )
    print(said(found, "pace", [own.error for own in found]))
    if not options.sleep_us:
        print(said(found, "processor time", [own.processor_error for own in found]))


if __name__ == "__main__":
    main()
