"""Bits: runs that move rows, compared with the loop that holds every row on the device.

resident       `benchmarks.training.resident`: the plain loop of a GPU, run twice
deterministic  the same under torch.use_deterministic_algorithms(True), compared with a cache that holds all rows
two processes  at three capacities, and one of them twice: losses of every step, and the export of every row
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.gpu_check.differences import Losses, loss_difference, state_difference
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.jobs import Size, batches_of, capacity_of, make_job, write_job
from benchmarks.training.recorded import record, slots_for, touched
from benchmarks.training.replay import Replay
from benchmarks.training.resident import ResidentRun, wait_for
from rowcast.job.schema import Job

SIZE = Size(batch_size=1024, steps=16, dim=16, scale=0.01, bottom_mlp=(64, 16), top_mlp=(64, 1))
# (share of the rows that the run touches, and at least one batch; depth), the most valuable first
WAYS = ((1.0, 1), (0.2, 4), (0.0, 1), (0.2, 4))
MOST_WAYS = {"cuda": 4, "cpu": 2}
CORES_A_RUN = 4
GUESS_S = 30.0  # of a run and its export, on a bare machine


class Equality:
    def __init__(self, findings: Findings, device: torch.device, folder: Path) -> None:
        self._findings, self._device, self._folder = findings, device, folder
        self._job, self._batches = make_job(SIZE, device), batches_of(SIZE, device)
        self._known = touched(self._job, self._batches)
        self.expected = self.resident()
        self._export = folder / "expected.safetensors"

    def resident(self) -> Losses:
        run = ResidentRun(self._job, self._batches, self._device)
        for _ in run.issue():
            pass
        wait_for(run.records[0])
        return np.array([loss.item() for loss in run.losses], np.float32)

    def again(self) -> dict[str, Any]:
        return self._compared(self.resident())

    def replayed(self) -> dict[str, Any]:
        """Through staging and streams, in a cache that no row leaves."""
        slots = slots_for(self._job, self._batches, self._known.rows)
        with record(self._job, self._batches, slots, self._device) as recording:
            replay = Replay(recording, self._job)
            replay.run()
            return self._compared(np.array(replay.results.losses, np.float32))

    def deterministic(self) -> dict[str, Any]:
        torch.use_deterministic_algorithms(True)
        try:
            return {**self.replayed(), "same_as_without": not loss_difference(self.resident(), self.expected)}
        finally:
            torch.use_deterministic_algorithms(False)

    def processes(self, share: float, depth: int, name: str) -> dict[str, Any]:
        """The first of these calls has the cache that holds all rows; later exports are compared with its own."""
        capacity, run = capacity_of(self._known, share), self._folder / name
        losses = two_processes(self._job, capacity, depth, max(30.0, self._findings.left_s), run)
        export = run / "model.safetensors"
        if not self._export.exists():
            export.rename(self._export)
            export = self._export
        rows = state_difference(load_file(export), load_file(self._export))
        facts = {"capacity": capacity, "rows": self._known.rows, "depth": depth, **({"export": rows} if rows else {})}
        found = self._compared(losses)
        return {**found, **facts, "passed": found["passed"] and not rows}

    def _compared(self, losses: Losses) -> dict[str, Any]:
        differs = loss_difference(losses, self.expected)
        return {"steps": len(losses), **({"losses": differs} if differs else {}), "passed": not differs}


def two_processes(job: Job, capacity: int, depth: int, limit_s: float, folder: Path) -> Losses:
    """Losses; the export is `model.safetensors` in `folder`, which is made."""
    folder.mkdir()
    config, run_dir, out = (folder / name for name in ("job.json", "run", "model.safetensors"))
    write_job(
        config,
        job,
        job={"run_dir": str(run_dir)},
        cache={"capacity": f"{capacity} rows"},
        lookahead={"depth": depth},
        metrics={"prefetcher": "127.0.0.1:0", "trainer": "127.0.0.1:0"},
    )
    command(["-m", "rowcast.deploy.local", "--config", str(config)], limit_s)
    command(["-m", "rowcast.prefetcher", "export", "--run", str(run_dir), "--out", str(out)], limit_s)
    return np.fromfile(run_dir / "losses.f32", np.float32)


def command(arguments: Sequence[str], limit_s: float) -> None:
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=limit_s, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} ended with code {ended.returncode}: {ended.stderr.strip()[-1500:]}")


def check_equality(findings: Findings, device: torch.device, folder: Path) -> None:
    equality = Equality(findings, device, folder)
    findings.item("every row on the device, twice", equality.again)
    findings.item("replay of a cache that holds all rows", equality.replayed)
    ways = [
        (
            name := f"two processes {number}, {share:.0%} of the rows, depth {depth}",
            partial(equality.processes, share, depth, name),
        )
        for number, (share, depth) in enumerate(WAYS[: MOST_WAYS[device.type]], start=1)
    ]
    findings.item(*ways[0], "processes", GUESS_S)  # compiles what the others then find compiled
    workers = max(1, len(os.sched_getaffinity(0)) // CORES_A_RUN)
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(findings.item, *way, "processes", GUESS_S) for way in ways[1:]]:
            done.result()
    findings.item("deterministic algorithms", equality.deterministic)
