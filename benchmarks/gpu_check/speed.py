"""Step times: every row on the device, the replay of a recorded stream, both processes, and tables in host memory.

resident    our kernels, every row that the run touches on the device, nothing read or moved
replay      the trainer with a cache of 1 or 5 % of those rows, plans and rows already in the ring
live        both processes on this machine
host tables stock PyTorch with tables in host memory and the dense part on the device
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.gpu_check.jobs import Size, make_job, write_job
from benchmarks.training import ours, stock
from benchmarks.training.recorded import Touched, slots_for, touched, train_batches
from benchmarks.training.replay import Replay
from benchmarks.training.resident import ResidentRun, wait_for
from rowcast.job.schema import Job
from rowcast.protocol.batch import ScheduledBatch

CAPACITIES = (0.01, 0.05)
WARM = 1 / 4  # of the steps, before timing begins
ROUNDS = 3


def resident_ms(job: Job, batches: Sequence[ScheduledBatch], device: torch.device) -> float:
    """Per step, after the warm-up steps, which also compile kernels."""
    run = ResidentRun(job, batches, device)
    warm = int(len(batches) * WARM)
    began_s = 0.0
    for number, _ in enumerate(run.issue(), start=1):
        if number == warm:
            wait_for(run.records[0])
            began_s = time.perf_counter()
    wait_for(run.records[0])
    return 1e3 * (time.perf_counter() - began_s) / (len(batches) - warm)


def replay_ms(
    job: Job, batches: Sequence[ScheduledBatch], slots: tuple[int, ...], device: torch.device
) -> dict[str, Any]:
    with Replay(job, batches, slots, device) as replay:
        between_s = replay.run()
        warm = int(len(between_s) * WARM)
        rows, groups = replay.rows_moved / replay.num_steps, replay.groups
        return {
            "ms": 1e3 * float(np.mean(between_s[warm:])),
            "rows_a_step": rows,
            "bytes_a_step": rows * groups[0].record_bytes,
            "cache_bytes": sum(records.nbytes for records in replay.records),
            "staging_bytes": replay.engine.cache.staging_bytes,
            "plans_bytes": replay.engine.cache.plans_bytes,
            "pinned": replay.is_pinned,
        }


def live(job: Job, known: Touched, share: float) -> dict[str, Any]:
    """Both processes, started as a user starts them."""
    with tempfile.TemporaryDirectory(prefix="rowcast-check-") as folder:
        config = Path(folder) / "job.json"
        write_job(config, job)
        capacity = f'cache.capacity="{max(int(known.rows * share), known.largest_batch)} rows"'
        found = ours.run(config, [capacity], None)
        return {"ms": 1e3 * found.wall_s / found.steps, **msgspec.to_builtins(found)}


def host_tables_ms(job: Job, device: torch.device) -> float:
    found = stock.run(job, None, torch.device("cpu"), device)
    return 1e3 * found.wall_s / found.steps


def check_speed(
    size: Size, device: torch.device, precision: str, batches: Sequence[ScheduledBatch], *, whole: bool
) -> dict[str, Any]:
    """`whole`: also both processes and host tables, which take longer."""
    job = make_job(size, device, precision)
    known = touched(job, batches)
    found: dict[str, Any] = {"batch_size": size.batch_size, "precision": precision, "rows_touched": known.rows}
    ways = {share: slots_for(job, batches, max(int(known.rows * share), known.largest_batch)) for share in CAPACITIES}
    resident: list[float] = []
    replays: dict[float, list[dict[str, Any]]] = {share: [] for share in CAPACITIES}
    for _ in range(ROUNDS):
        resident.append(resident_ms(job, batches, device))
        for share, slots in ways.items():
            replays[share].append(replay_ms(job, batches, slots, device))
    found["resident_ms"] = resident
    for share, each in replays.items():
        ratio = statistics.median(own["ms"] / alone for own, alone in zip(each, resident, strict=True))
        found[f"replay_{share:.0%}"] = {"ms": [own["ms"] for own in each], "to_resident": ratio, **each[-1]}
    if whole:
        alone = statistics.median(resident)
        for share in CAPACITIES:
            found[f"live_{share:.0%}"] = {**(run := live(job, known, share)), "to_resident": run["ms"] / alone}
        found["host_tables_ms"] = host_tables_ms(job, device)
        found["host_tables_to_live"] = found["host_tables_ms"] / found[f"live_{CAPACITIES[-1]:.0%}"]["ms"]
    return found


def batches_of(size: Size, device: torch.device) -> list[ScheduledBatch]:
    return train_batches(make_job(size, device), None)
