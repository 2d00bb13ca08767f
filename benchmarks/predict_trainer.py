"""How far is a step that was foretold from a rates file off what the trainer takes, for jobs that were never measured?

Method: random jobs (DLRM and DCNv2, batches of 256 to 4,096, dimensions of 8 to 64, four row optimizers, caches of 3 to
50 % of the rows that the job touches), each through the trainer's side alone: its plans and rows lie in a ring before
the clock starts (`trainer/rates/replay.py`). Processor time of its threads, so that other programs hardly count, steps
of the second half, once the cache is full. Foretold is what `prefetcher predict` takes for the main thread: the step's
kernels and the host's share. No job was used to fit anything. The probe, one matrix product, is timed beside each job:
where it differs from that of the rates file, the machine runs at another speed now.

    python -m benchmarks.predict_trainer --rates rates.json [--jobs 24] [--seed 1]
"""

import argparse
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.training.free_cores import free_cores
from benchmarks.training.recorded import record, recorded_plans, slots_for, touched, train_batches
from rowcast.analysis.predict.planned import count
from rowcast.job.device_rates import DeviceRates, read_rates
from rowcast.job.file import parse_job
from rowcast.job.row_optimizers import ROW_OPTIMIZERS
from rowcast.job.schema import Job
from rowcast.job.step_kernels import step_seconds
from rowcast.job.tables import group_specs
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.memory import keep_freed_memory
from rowcast.trainer.rates.replay import Replay
from rowcast.trainer.rates.stopwatch import Stopwatch, probe_seconds

STEPS = 24
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    name: str
    measured_s: float  # a step
    foretold_s: float
    probe: float  # over that of the rates file
    outside: frozenset[str]

    @property
    def error(self) -> float:
        return self.foretold_s / self.measured_s - 1


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


def foretold_seconds(
    job: Job, batches: list[ScheduledBatch], slots: tuple[int, ...], device: DeviceRates
) -> tuple[list[float], frozenset[str]]:
    """Seconds of each step, and the kernels that were not measured at such counts."""
    groups, found, outside = group_specs(job), list[float](), set[str]()
    for scheduled, recorded in zip(batches, recorded_plans(job, batches, slots), strict=True):
        counted = count(scheduled.batch, recorded.plan, [set() for _ in groups], 0.0, 0.0, job.ranks)
        own = step_seconds(device, job, groups, recorded.batch.dense.shape[1], counted.counts)
        found.append(own.on_one_thread)
        outside |= own.outside
    return found, frozenset(outside)


def held_out(job: Job, name: str, share: float, device: DeviceRates) -> Found:
    batches = train_batches(job, STEPS)
    seen = touched(job, batches)
    slots = slots_for(job, batches, max(int(1.05 * seen.largest_batch) + 64, int(share * seen.rows)))
    half = len(batches) // 2
    foretold, outside = foretold_seconds(job, batches, slots, device)
    watch = Stopwatch(CPU, 1)
    before = probe_seconds(watch)
    with record(job, batches, slots, CPU) as recording:
        replay = Replay(recording, job)
        replay.run(half)
        measured_s = sum(replay.in_threads().values()) / (len(batches) - half)
    probe = statistics.mean((before, probe_seconds(watch))) / device.probe
    return Found(
        name=name,
        measured_s=measured_s,
        foretold_s=statistics.mean(foretold[half:]),
        probe=probe,
        outside=outside,
    )


def said(found: list[Found]) -> str:
    errors = [abs(own.error) for own in found]
    return (
        f"{len(found)} jobs: mean error {statistics.mean(errors):.1%}, geometric mean "
        f"{statistics.geometric_mean([max(1e-4, error) for error in errors]):.1%}, nine of ten within "
        f"{sorted(errors)[int(0.9 * len(errors)) - 1]:.1%}, worst {max(errors):.1%}; in the right order "
        f"{right_order(found):.0%} of the pairs that differ by more than 10 %"
    )


def right_order(found: list[Found]) -> float:
    pairs = [(a, b) for i, a in enumerate(found) for b in found[:i] if not 1 / 1.1 < a.measured_s / b.measured_s < 1.1]
    right = sum((a.measured_s < b.measured_s) == (a.foretold_s < b.foretold_s) for a, b in pairs)
    return right / max(1, len(pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as a trainer on a CPU does
    device, chance = read_rates(options.rates), random.Random(options.seed)
    print(f"{machine()}, {free_cores():.1f} cores free")
    print("| job | measured ms | foretold ms | off by | probe | outside what was measured |\n|---|---|---|---|---|---|")
    found = []
    for _ in range(options.jobs):
        found.append(held_out(*random_job(chance), device))
        own = found[-1]
        print(
            f"| {own.name} | {1e3 * own.measured_s:.2f} | {1e3 * own.foretold_s:.2f} | {own.error:+.0%} | "
            f"{own.probe:.2f} | {', '.join(sorted(own.outside))} |",
            flush=True,
        )
    print(said(found))


if __name__ == "__main__":
    main()
