"""Bits: runs that move rows, compared with the loop that holds every row on the device.

resident            `benchmarks.training.resident`: the plain loop of a GPU
resident again      two runs of the same loop
deterministic       the same under torch.use_deterministic_algorithms(True), compared with the replay of a cache that
                    holds all rows
both processes      at several capacities and depths: losses of every step, and the export of every row
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from benchmarks.gpu_check.jobs import Size, make_job, write_job
from benchmarks.training.recorded import slots_for, touched, train_batches
from benchmarks.training.replay import Replay
from benchmarks.training.resident import ResidentRun, wait_for
from rowcast.job.schema import Job
from rowcast.protocol.batch import ScheduledBatch

Losses = npt.NDArray[np.float32]
WAYS = (  # (share of the rows that the run touches, depth)
    (1.0, 1),
    (0.2, 1),
    (0.2, 4),
    (0.0, 4),  # one batch
)


def resident_losses(job: Job, batches: Sequence[ScheduledBatch], device: torch.device) -> Losses:
    run = ResidentRun(job, batches, device)
    for _ in run.issue():
        pass
    wait_for(run.records[0])
    return np.array([loss.item() for loss in run.losses], np.float32)


def replayed_losses(job: Job, batches: Sequence[ScheduledBatch], device: torch.device) -> Losses:
    """Through staging and streams, in a cache that no row leaves."""
    with Replay(job, batches, slots_for(job, batches, touched(job, batches).rows), device) as replay:
        replay.run()
        return np.array(replay.results.losses, np.float32)


def processes(job: Job, capacity: int, depth: int) -> tuple[Losses, str]:
    """Losses, and a checksum of the export."""
    with tempfile.TemporaryDirectory(prefix="rowcast-check-") as folder:
        config, run_dir, out = (Path(folder) / name for name in ("job.json", "run", "model.safetensors"))
        write_job(
            config,
            job,
            job={"run_dir": str(run_dir)},
            cache={"capacity": f"{capacity} rows"},
            lookahead={"depth": depth},
            metrics={"prefetcher": "127.0.0.1:0", "trainer": "127.0.0.1:0"},
        )
        command(["-m", "rowcast.deploy.local", "--config", str(config)])
        command(["-m", "rowcast.prefetcher", "export", "--run", str(run_dir), "--out", str(out)])
        return np.fromfile(run_dir / "losses.f32", np.float32), xxhash.xxh3_128_hexdigest(out.read_bytes())


def command(arguments: Sequence[str]) -> None:
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} ended with code {ended.returncode}: {ended.stderr.strip()[-1500:]}")


def check_equality(size: Size, device: torch.device) -> dict[str, Any]:
    job = make_job(size, device)
    batches = train_batches(job, None)
    known = touched(job, batches)
    expected = resident_losses(job, batches, device)
    found = {
        "resident, twice": equal(resident_losses(job, batches, device), expected),
        "replay, all rows": equal(replayed_losses(job, batches, device), expected),
        "deterministic algorithms": deterministic(
            lambda: replayed_losses(job, batches, device), expected, job, batches, device
        ),
    }
    exports = set()
    for share, depth in WAYS:
        capacity = max(int(known.rows * share), known.largest_batch)
        losses, export = processes(job, capacity, depth)
        exports.add(export)
        found[f"two processes, {capacity} of {known.rows} rows, depth {depth}"] = equal(losses, expected)
    found["exports of all capacities and depths"] = len(exports) == 1
    return {"steps": len(expected), "equal": found, "passed": all(found.values())}


def deterministic(
    replayed: Callable[[], Losses], expected: Losses, job: Job, batches: Sequence[ScheduledBatch], device: torch.device
) -> bool:
    torch.use_deterministic_algorithms(True)
    try:
        return equal(replayed(), resident_losses(job, batches, device))
    finally:
        torch.use_deterministic_algorithms(False)


def equal(losses: Losses, expected: Losses) -> bool:
    return np.array_equal(losses.view(np.int32), expected.view(np.int32))
