"""Contestant: one process, our kernels, every row that the run touches on the device, plans made and copied there in
advance.

Nothing is read, planned or moved while it is timed. The step itself remains, and no system that trains these batches
with these operations can be faster. On a GPU this is the plain loop with which exactness is compared.

    python -m benchmarks.training.resident --config job.toml [--set ...] --steps 141
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.training.outcome import LOSSES, Outcome, tell
from benchmarks.training.recorded import recorded_plans, slots_for, touched, train_batches
from benchmarks.training.replay import RecordedPlan
from rowcast.job.file import load_job
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.stores.records import first_records
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.plan import step_block, step_header
from rowcast.runtime.machine import usable_cores
from rowcast.trainer.device.cuda import choose_device
from rowcast.trainer.kernels import Chunks, cut_long_rows
from rowcast.trainer.kernels.choose import arranged
from rowcast.trainer.models.runner import PlanArrays, StepInputs, StepRunner


class ResidentRows:
    """A cache that holds every row of the run: what the plans fetch, once each."""

    def __init__(self, job: Job, slots: tuple[int, ...], device: torch.device) -> None:
        self._job = job
        self._groups = group_specs(job)
        self.records = [
            torch.zeros(n, group.record_floats, device=device) for n, group in zip(slots, self._groups, strict=True)
        ]

    def fill(self, recorded: RecordedPlan) -> None:
        for group, own, records in zip(self._groups, recorded.plan.groups, self.records, strict=True):
            assert not len(own.evict_keys), f"{len(own.evict_keys)} rows would leave a cache that holds all rows"
            rows = first_records(group, self._job.job.seed, own.fetch_keys).view(np.float32)
            records[torch.from_numpy(own.fetch_slots).long().to(records.device)] = torch.from_numpy(rows).to(
                records.device
            )


def step_inputs(recorded: RecordedPlan, groups: Sequence[GroupSpec], device: torch.device) -> StepInputs:
    plan = replace(recorded.plan, groups=tuple(map(arranged, recorded.plan.groups, groups)))
    block = step_block(recorded.batch, plan, 0)
    content = np.empty(block.nbytes, np.uint8)
    block.write(0, content)
    header = step_header(recorded.batch, plan, block)
    chunks = {
        f"{index}.{name}": array
        for index, group in enumerate(plan.groups)
        for name, array in zip(Chunks._fields, cut_long_rows(group.segment_offsets), strict=True)
    }
    inputs = StepInputs(header=header)
    inputs.arrays = PlanArrays(torch.from_numpy(content).to(device), block.specs)
    inputs.arrays.made |= {name: torch.from_numpy(array).to(device) for name, array in chunks.items()}
    return inputs


class ResidentRun:
    def __init__(self, job: Job, batches: Sequence[ScheduledBatch], device: torch.device) -> None:
        slots = slots_for(job, batches, touched(job, batches).rows)
        rows, groups = ResidentRows(job, slots, device), group_specs(job)
        self.steps: list[StepInputs] = []
        for recorded in recorded_plans(job, batches, slots):
            rows.fill(recorded)
            self.steps.append(step_inputs(recorded, groups, device))
        self.records = rows.records
        self.runner = StepRunner(job, rows.records, batches[0].batch.dense.shape[1])
        self.losses = [torch.zeros((), pin_memory=device.type == "cuda") for _ in self.steps]

    def issue(self) -> Iterator[StepInputs]:
        for step, loss in zip(self.steps, self.losses, strict=True):
            self.runner.train(step, loss)
            yield step


def run(job: Job, steps: int | None, device: torch.device) -> Outcome:
    resident = ResidentRun(job, train_batches(job, steps), device)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    samples = sum(step.header.batch_size for step in resident.issue())
    wait_for(resident.records[0])
    wall_s = time.perf_counter() - began_s
    last = torch.stack(resident.losses[-LOSSES:]).mean().item()
    cores = {"process": (time.process_time() - began_cpu_s) / wall_s}
    return Outcome(samples=samples, steps=len(resident.steps), wall_s=wall_s, loss=last, cores=cores)


def wait_for(tensor: Tensor) -> None:
    """Waits until all work issued on the current stream of the tensor's device is done."""
    tensor.flatten()[:1].sum().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    job = load_job(options.config, tuple(options.overrides))
    torch.set_num_threads(job.first_threads(usable_cores()))
    tell(run(job, options.steps, choose_device(job.trainer.device)))


if __name__ == "__main__":
    main()
