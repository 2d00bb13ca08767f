"""Step times of one batch size: every row on the device, replay, both processes, and tables in host memory.

resident     our kernels, every row that the run touches on the device, nothing read or moved
replay       the trainer, a thread a stage, with a cache of 20 % of those rows, or of one batch; plans and rows already
             in the ring
live         both processes on this machine (live.py)
host tables  stock PyTorch with tables in host memory (host_tables.py)
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.findings import NO_DEVICE, Findings
from benchmarks.gpu_check.host_tables import HostTables
from benchmarks.gpu_check.jobs import Size, batches_of, capacity_of, make_job, with_touched_rows
from benchmarks.gpu_check.live import live
from benchmarks.gpu_check.timed import WARM, timed
from benchmarks.training.recorded import record, slots_for, touched
from benchmarks.training.replay import Recording, Replay
from benchmarks.training.resident import ResidentRun, wait_for
from rowcast.job.schema import Job
from rowcast.trainer.models.runner import StepRunner

# of the rows that the run touches, and at least one batch, which is 6 % of those of 48 batches of 16,384 and 10 % of
# those of 24 batches of 65,536
USUAL, TIGHT = 0.2, 0.0
ROUNDS = {"cuda": 3, "cpu": 1}
GUESSES_S = {"replay": 25.0, "live": 30.0, "host": 20.0}  # of the first of each kind
PRECISIONS = ("bf16", "tf32", "fp32")  # matrix products in fp32 take so long that they hide every copy


Measure = Callable[["Speed", str], dict[str, Any]]  # in that precision


class Speed:
    def __init__(self, size: Size, device: torch.device, stack: ExitStack) -> None:
        self._size, self._device, self._stack = size, device, stack
        self._batches = batches_of(size, device)
        self._known = touched(self.job("fp32"), self._batches)
        self._warm = int(len(self._batches) * WARM)
        self._recording = cache(self._record)

    def batch(self) -> dict[str, Any]:
        return {
            "batch_size": self._size.batch_size,
            "dimension": self._size.dim,
            "steps": len(self._batches),
            "rows_touched": self._known.rows,
            "rows_of_largest_batch": self._known.largest_batch,
        }

    def job(self, precision: str) -> Job:
        return make_job(self._size, self._device, precision)

    def replay(self, precision: str, share: float) -> dict[str, Any]:
        """In turn with every row on the device; `to_resident` is the median of the ratios within a round."""
        job, recording = self.job(precision), self._recording(share)
        resident_ms, replays = [], []
        resident = self._resident(job)
        for _ in range(ROUNDS[self._device.type]):
            resident_ms.append(self._resident_ms(resident))
            gc.collect()  # the engine of the last replay is part of reference cycles, and holds device memory
            replays.append(self._replay_ms(Replay(recording, job)))
        ratio = statistics.median(own["ms"] / alone for own, alone in zip(replays, resident_ms, strict=True))
        last = {**replays[-1], "ms": statistics.median(own["ms"] for own in replays)}
        each = {"resident_ms_each": resident_ms, "ms_each": [own["ms"] for own in replays]}
        return {"resident_ms": statistics.median(resident_ms), **last, "to_resident": ratio, **each}

    def live(self, precision: str, share: float) -> dict[str, Any]:
        return live(self.job(precision), self._batches, capacity_of(self._known, share))

    def host_tables(self, precision: str) -> dict[str, Any]:
        job, batches = with_touched_rows(self.job(precision), self._batches)
        found = timed(HostTables(job, batches, self._device), len(batches))
        return {**found, "threads": torch.get_num_threads()}

    def _record(self, share: float) -> Recording:
        job = self.job("fp32")  # plans do not depend on the precision
        slots = slots_for(job, self._batches, capacity_of(self._known, share))
        return self._stack.enter_context(record(job, self._batches, slots, self._device))

    def _resident(self, job: Job) -> ResidentRun:
        run = self._all_rows
        run.runner = StepRunner(job, run.records, self._batches[0].batch.dense.shape[1])
        return run

    @cached_property
    def _all_rows(self) -> ResidentRun:
        return ResidentRun(self.job("fp32"), self._batches, self._device)

    def _resident_ms(self, run: ResidentRun) -> float:
        """Per step, after the warm-up steps, which also compile kernels."""
        began_s = 0.0
        for number, _ in enumerate(run.issue(), start=1):
            if number == self._warm:
                wait_for(run.records[0])
                began_s = time.perf_counter()
        wait_for(run.records[0])
        return 1e3 * (time.perf_counter() - began_s) / (len(run.steps) - self._warm)

    def _replay_ms(self, replay: Replay) -> dict[str, Any]:
        replay.run(self._warm)
        warm, before = len(replay.peer.done_s), dict(replay.counters.phases)
        threads_s = replay.in_threads()
        between_s = np.diff(replay.peer.done_s)[warm - 1 :]
        phases = {phase: seconds - before[phase] for phase, seconds in replay.counters.phases.items()}
        groups = replay.counters.groups.values()
        return {
            "ms": 1e3 * float(np.mean(between_s)),
            "phases_ms": {str(phase): 1e3 * seconds / len(between_s) for phase, seconds in phases.items()},
            "threads_ms": {name: 1e3 * seconds / len(between_s) for name, seconds in threads_s.items()},
            "rows_a_step": sum(group.rows_fetched for group in groups) / replay.num_steps,
            "bytes_to_device_a_step": sum(group.row_bytes_to_device for group in groups) / replay.num_steps,
            "cache_bytes": sum(records.nbytes for records in replay.records),
            "staging_bytes": replay.engine.cache.staging_bytes,
            "plans_bytes": replay.engine.cache.plans_bytes,
        }


def check_speed(findings: Findings, device: torch.device, size: Size) -> None:
    replays: list[tuple[str, str, Measure]] = [
        (own, "replay 20 %", partial(Speed.replay, share=USUAL)) for own in PRECISIONS
    ]
    check(findings, device, size, [*replays, ("bf16", "replay one batch", partial(Speed.replay, share=TIGHT))])


def check_live(findings: Findings, device: torch.device, size: Size) -> None:
    lives: list[tuple[str, str, Measure]] = [(own, "live 20 %", partial(Speed.live, share=USUAL)) for own in PRECISIONS]
    hosts: list[tuple[str, str, Measure]] = [(own, "host tables", Speed.host_tables) for own in PRECISIONS]
    tight: list[tuple[str, str, Measure]] = [("bf16", "live one batch", partial(Speed.live, share=TIGHT))]
    rest = [*tight, *lives[1:], *hosts[1:]] if device.type == "cuda" else []
    check(findings, device, size, [lives[0], hosts[0], *rest])


def check(findings: Findings, device: torch.device, size: Size, in_order: Sequence[tuple[str, str, Measure]]) -> None:
    """`in_order`: precision, name and measurement, the most valuable first."""
    with ExitStack() as stack:
        speed = Speed(size, device, stack)
        findings.item("batches", speed.batch)
        for precision, name, measure in in_order:
            kind = name.split()[0]
            if precision == "tf32" and device.type != "cuda":
                findings.not_here(f"{precision}, {name}", NO_DEVICE)
            else:
                findings.item(f"{precision}, {name}", partial(measure, speed, precision), kind, GUESSES_S[kind])
