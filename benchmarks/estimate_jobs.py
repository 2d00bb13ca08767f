"""How far is an estimate from the run, in processor time and in pace, and does it name the bottleneck?

Method: 24 jobs (DLRM and DCNv2, batches of 256 to 2,048, dimensions of 8 to 64, four row optimizers, caches of 3 to 50
% of the bytes; every third one in memory tiers, every sixth on two ranks). For each job in turn, its kernels are
measured, it is estimated as `rowcast estimate` does, and trained three times by `rowcast train --timeline`. Steps count
once the cache is full. Processor time is of the first trainer, all threads; medians of three runs. The run's bottleneck
is the longest task of the critical path of its recording. Overhead is measured once, before the first job.

Each job is one line, which depends on its number alone: `--jobs 8-15` goes on after `--jobs 0-7`. `--summary FILE` sums
up lines that were printed before.

    python -m benchmarks.estimate_jobs --jobs 0-7 | tee -a lines.md
    python -m benchmarks.estimate_jobs --summary lines.md
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks.machine import machine
from rowcast.analysis.estimate.estimate import estimated, host_rates, steady, walk
from rowcast.analysis.estimate.measure import Stopwatch, measured, measured_overheads, model_shapes, row_shapes
from rowcast.analysis.estimate.overheads import NUM_DENSE, exchange_kernels, processor_time
from rowcast.analysis.estimate.planned import plan_job
from rowcast.analysis.estimate.rates_file import RATES_VERSION, DeviceRates, KernelRates, model_fingerprint
from rowcast.analysis.estimate.recorded import recorded_run
from rowcast.analysis.timeline import ended, lives, read_pairs
from rowcast.job.file import load_job
from rowcast.job.optimizers import ROW_OPTIMIZERS
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.runtime.machine import keep_freed_memory, usable_cores
from rowcast.trainer.models.job_model import JobModel

JOBS, STEPS, RUNS = 24, 100, 3
CPU = torch.device("cpu")
OF_TRAINER = ("copy in", "fill", "exchange", "step", "copy out")
POLL_S = 0.05
JOB = """
job = {{ run_dir = "{folder}/run", seed = {number} }}
data.format = "synthetic"
data.batch_size = {batch}
data.synthetic = {{ preset = "criteo-kaggle", scale = 0.02, samples = {samples} }}
tables_from.embedding_dim = {dim}
model = {{ {model} }}
optimizer.sparse = {{ kind = "{sparse}", lr = 0.01 }}
optimizer.dense = {{ kind = "{dense}", lr = 0.01 }}
cache.capacity = {capacity}
lookahead.bundle = 1
checkpoint.every = 0
trainer.threads = 1
{more}
"""


class Measured(NamedTuple):
    """Of a step, once the cache is full."""

    processor_s: float  # of the first trainer
    pace_s: float
    bound_by: str


def write_job(number: int, seed: int, folder: Path) -> tuple[Path, str]:
    """The job file, and the job's name."""
    chance = random.Random(f"{seed} {number}")
    batch, dim = chance.choice((256, 512, 1024, 2048)), chance.choice((8, 16, 32, 64))
    kind, sparse = chance.choice(("dlrm", "dcnv2")), chance.choice(list(ROW_OPTIMIZERS))
    dense, share = chance.choice(("sgd", "adagrad", "adam")), chance.choice((0.03, 0.1, 0.25, 0.5))
    hidden = chance.choice((64, 128, 256, 512))
    model = f'kind = "{kind}", bottom_mlp = [{hidden}, {dim}], top_mlp = [{hidden}, {hidden // 2}, 1]'
    if kind == "dcnv2":
        model += f", cross_layers = {chance.choice((1, 2, 3))}, cross_rank = {chance.choice((16, 64, 128))}"
    tier, ranks = number % 3 == 2, 2 if number % 6 == 1 else 1
    more = 'store = { kind = "tiered", memory = "1250MiB" }\n' if tier else ""
    more += f"ranks.count = {ranks}\n"
    values: dict[str, Any] = {"folder": folder, "number": number, "batch": batch, "samples": batch * STEPS, "dim": dim}
    values |= {"model": model, "sparse": sparse, "dense": dense, "more": more}
    config = folder / "job.toml"
    config.write_text(JOB.format(**values, capacity='"64MiB"'))
    nbytes = sum(group.num_rows * group.record_bytes for group in group_specs(load_job(config)))
    # at least what a batch may touch, each row once
    least = 30 * batch * max(group.record_bytes for group in group_specs(load_job(config)))
    config.write_text(JOB.format(**values, capacity=max(int(share * nbytes), least)))
    where = "tiered" if tier else "memory"
    name = f"{kind} {hidden}, batch {batch}, dim {dim}, {sparse}, {dense}, cache {share:.0%}, {where}, {ranks} rank"
    return config, name + ("s" if ranks > 1 else "")


def device_rates(job: Job, overhead: dict[str, KernelRates]) -> DeviceRates:
    rows, model = row_shapes(Stopwatch(CPU, 1), job), model_shapes(Stopwatch(CPU, 1, cold=False), job, NUM_DENSE)
    kernels = measured([*rows, *model])
    if job.ranks.num_parts > 1:
        kernels |= exchange_kernels(CPU, job, None)
    weights = JobModel(job, NUM_DENSE, CPU).model.parameters()
    return DeviceRates(
        version=RATES_VERSION, machine="", device="cpu", clock="cpu", torch="", threads=1,
        model=model_fingerprint(job), parameters=sum(weight.numel() for weight in weights), kernels=kernels | overhead,
    )  # fmt: skip


def first_trainer(config: Path, ranks: int) -> int | None:
    """The process, once it has begun."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            is_trainer = b"rowcast.trainer" in words and b"torch.distributed" not in words
            is_first = is_trainer and (ranks == 1 or b"RANK=0" in (entry / "environ").read_bytes().split(b"\0"))
            if is_first and str(config).encode() in words:
                return int(entry.name)
    return None


def train(config: Path, job: Job) -> Measured:
    command = [sys.executable, "-m", "rowcast", "train", "--config", str(config), "--timeline", "--fresh"]
    log = config.with_name("log")
    seen: list[tuple[float, float]] = []  # moments, and the trainer's processor time then
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        pid = None
        while process.poll() is None:
            pid = pid or first_trainer(config, job.ranks.count)
            seen.extend(processor_time(pid) if pid else ())
            time.sleep(POLL_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{log.read_text()[-2000:]}")
    pair = read_pairs(job.run_dir)[0]
    recorded, ends = recorded_run(pair), np.array([ended(life.step) for life in lives(pair)]) / 1e6
    steps, used = steady(recorded.ended), np.interp(ends, *np.transpose(seen))
    plan, wiring = plan_job(job)
    return Measured(
        processor_s=float(used[steps.last] - used[steps.first]) / (steps.last - steps.first),
        pace_s=steps.step_s,
        bound_by=walk(plan, wiring, recorded, recorded.begins).bound_by[0][0],
    )


def line_of(number: int, seed: int, overhead: dict[str, KernelRates]) -> str:
    with tempfile.TemporaryDirectory(prefix="rowcast-estimate-") as folder:
        config, name = write_job(number, seed, Path(folder))
        job = load_job(config)
        plan, wiring = plan_job(job)
        result = estimated(job, plan, device_rates(job, overhead), host_rates(job))
        walked = walk(plan, wiring, result.durations, {}, usable_cores() / job.ranks.on_host)
        steps = range(len(plan) // 4, len(plan))
        own_s = statistics.mean(sum(result.durations(task, step) for task in OF_TRAINER) for step in steps)
        runs = [train(config, job) for _ in range(RUNS)]
    load = os.getloadavg()[0]
    processor_s, pace_s = (statistics.median(own) for own in ([r.processor_s for r in runs], [r.pace_s for r in runs]))
    bounds = [run.bound_by for run in runs]
    cells = (
        number,
        name,
        f"{load:.0f}",
        f"{1e3 * own_s:.2f}",
        f"{1e3 * processor_s:.2f}",
        f"{own_s / processor_s - 1:+.1%}",
        f"{result.margin:.0%}",
        f"{1e3 * walked.step_s:.1f}",
        f"{1e3 * pace_s:.1f}",
        walked.bound_by[0][0],
        max(bounds, key=bounds.count),
    )
    return f"| {' | '.join(map(str, cells))} |"


def summary(lines: Sequence[str]) -> str:
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines if line[2:3].isdigit()]
    away = sorted(abs(float(row[5].strip("%"))) for row in rows)
    right = sum(row[9] == row[10] for row in rows)
    loads = sorted(float(row[2]) for row in rows)
    errors = f"{statistics.mean(away):.1f} % on average, {away[-1]:.1f} % at worst"
    seen = f"{len(rows)} jobs, load {loads[0]:.0f} to {loads[-1]:.0f}"
    return f"{seen}: processor time off by {errors}; the bottleneck was right in {right}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=f"0-{JOBS - 1}", help="numbers, such as 0-7")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--overhead", type=Path, help="a file that keeps the overhead for later commands")
    parser.add_argument("--summary", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.summary:
        print(summary(options.summary.read_text().splitlines()))
        return
    torch.set_num_threads(1)
    keep_freed_memory()  # as a trainer on a CPU does
    print(machine(), flush=True)
    if options.overhead and options.overhead.exists():
        overhead = msgspec.json.decode(options.overhead.read_bytes(), type=dict[str, KernelRates])
    else:
        overhead = measured_overheads(CPU, 1)
    if options.overhead:
        options.overhead.write_bytes(msgspec.json.encode(overhead))
    ms = ", ".join(f"{name} {1e3 * own.terms.get('1', 0.0):.2f}" for name, own in overhead.items())
    print(f"ms of overhead a step: {ms}")
    print(
        "| | job | load | processor ms, estimated | measured | off by | margin | ms a step, estimated | measured "
        "| bound by, estimated | measured |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    first, _, last = options.jobs.partition("-")
    for number in range(int(first), int(last or first) + 1):
        print(line_of(number, options.seed, overhead), flush=True)


if __name__ == "__main__":
    main()
