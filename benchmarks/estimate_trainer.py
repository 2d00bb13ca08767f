"""How far is a step that was estimated from rates off the processor time that the trainer takes for it?

Method: random jobs (DLRM and DCNv2, batches of 256 to 4,096, dimensions of 8 to 64, four row optimizers, caches of 3 to
50 % of the rows touched), each through the trainer's side alone: its plans and rows lie in a ring before the clock
starts. The rates of each job are measured before it, overhead before every eighth. Processor time of all threads in the
second half of the steps, once the cache is full.

    python -m benchmarks.estimate_trainer [--jobs 24] [--seed 1]
"""

import argparse
import random
import statistics
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.training.recorded import record, recorded_plans, slots_for, touched, train_batches
from benchmarks.training.replay import Replay
from rowcast.analysis.estimate.measure import Stopwatch, measured, measured_overheads, model_shapes, row_shapes
from rowcast.analysis.estimate.overheads import NUM_DENSE
from rowcast.analysis.estimate.planned import step_calls
from rowcast.analysis.estimate.rates_file import (
    OF_MAIN,
    RATES_VERSION,
    DeviceRates,
    KernelRates,
    model_fingerprint,
)
from rowcast.job.file import parse_job
from rowcast.job.optimizers import ROW_OPTIMIZERS
from rowcast.job.schema import Job
from rowcast.job.tables import group_specs
from rowcast.runtime.machine import keep_freed_memory

STEPS = 24
OVERHEAD_EVERY = 8  # jobs
CPU = torch.device("cpu")


def random_job(chance: random.Random) -> tuple[Job, str, float]:
    """The job, its name, and its cache as a share of the rows touched."""
    batch, dim = chance.choice((256, 512, 1024, 2048, 4096)), chance.choice((8, 16, 32, 64))
    kind, sparse = chance.choice(("dlrm", "dcnv2")), chance.choice(list(ROW_OPTIMIZERS))
    dense, share = chance.choice(("sgd", "adagrad", "adam")), chance.choice((0.03, 0.1, 0.25, 0.5))
    hidden = chance.choice((64, 128, 256, 512))
    model: dict[str, Any] = {"kind": kind, "bottom_mlp": [hidden, dim], "top_mlp": [hidden, hidden // 2, 1]}
    if kind == "dcnv2":
        model |= {"cross_layers": chance.choice((1, 2, 3)), "cross_rank": chance.choice((16, 64, 128))}
    job = parse_job(
        {
            "job": {"run_dir": "unused", "seed": chance.randrange(1000)},
            "data": {
                "format": "synthetic",
                "batch_size": batch,
                "synthetic": {"preset": "criteo-kaggle", "scale": 0.02, "samples": batch * STEPS},
            },
            "tables_from": {"embedding_dim": dim},
            "model": model,
            "optimizer": {"sparse": {"kind": sparse, "lr": 0.01}, "dense": {"kind": dense, "lr": 0.01}},
            "cache": {"capacity": "1MiB"},  # the slots are given
            "trainer": {"threads": 1},
        }
    )
    return job, f"{kind} {hidden}, batch {batch}, dim {dim}, {sparse}, {dense}, cache {share:.0%}", share


def found(job: Job, share: float, overhead: dict[str, KernelRates]) -> tuple[float, float]:
    """Seconds of a step, estimated and measured."""
    rows, model = row_shapes(Stopwatch(CPU, 1), job), model_shapes(Stopwatch(CPU, 1, cold=False), job, NUM_DENSE)
    rates = DeviceRates(
        version=RATES_VERSION, machine="", device="cpu", clock="cpu", torch="", threads=1,
        model=model_fingerprint(job), parameters=0, kernels=measured([*rows, *model]) | overhead,
    )  # fmt: skip
    batches, groups = train_batches(job, STEPS), group_specs(job)
    seen, half = touched(job, batches), STEPS // 2
    slots = slots_for(job, batches, max(int(1.05 * seen.largest_batch) + 64, int(share * seen.rows)))
    estimated = []
    for scheduled, recorded in zip(batches, recorded_plans(job, batches, slots), strict=True):
        calls = [*step_calls(job, groups, recorded.plan, scheduled.batch.samples)]
        lookups = sum(call.counts["lookups"] for call in calls if call.kernel == "lookup")
        of_kernels = sum(call.calls * rates.seconds(call.kernel, **call.counts) for call in calls)
        estimated.append(of_kernels + sum(rates.seconds(name, lookups=lookups) for name in OF_MAIN))
    with record(job, batches, slots, CPU) as recording:
        replay = Replay(recording, job)
        replay.run(half)
        measured_s = sum(replay.in_threads().values()) / (len(batches) - half)
    return statistics.mean(estimated[half:]), measured_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as a trainer on a CPU does
    chance, away = random.Random(options.seed), list[float]()
    print(f"{machine()}\n| job | estimated ms | measured ms | off by |\n|---|---|---|---|")
    overhead: dict[str, KernelRates] = {}
    for number in range(options.jobs):
        overhead = overhead if number % OVERHEAD_EVERY else measured_overheads(CPU, 1)
        job, name, share = random_job(chance)
        estimated_s, measured_s = found(job, share, overhead)
        away.append(abs(estimated_s / measured_s - 1))
        off = f"{estimated_s / measured_s - 1:+.0%}"
        print(f"| {name} | {1e3 * estimated_s:.2f} | {1e3 * measured_s:.2f} | {off} |", flush=True)
    print(
        f"{len(away)} jobs: mean error {statistics.mean(away):.1%}, geometric mean "
        f"{statistics.geometric_mean([max(1e-4, own) for own in away]):.1%}, nine of ten within "
        f"{sorted(away)[max(0, int(0.9 * len(away)) - 1)]:.1%}, worst {max(away):.1%}"
    )


if __name__ == "__main__":
    main()
