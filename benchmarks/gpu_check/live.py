"""Both processes, started as a user starts them, over the same batches again and again.

The speed is that between the second epoch and the end, from the trainer's metrics: start, first epoch (in which the
rows are made) and last barrier are not part of it. The report, the last metrics and the ends of both logs are kept:
they say where the time went, and whether rings were page-locked.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.samples import Sample

from benchmarks.gpu_check.jobs import write_job, write_npy
from benchmarks.training import ours
from rowcast.job.schema import Job
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.transport.ring_file import shared_memory
from rowcast.trainer.device.cuda import choose_device

SAMPLES, WAITS = "rowcast_samples_total", "rowcast_stall_seconds_total"
EPOCHS = {"cuda": 8, "cpu": 3}
LAST_LINES = 200  # kept from each log
Reading = tuple[float, float]  # seconds, samples trained so far


def live(job: Job, batches: Sequence[ScheduledBatch], capacity: int) -> dict[str, Any]:
    """`capacity`: rows. Raises RuntimeError with a process's output if it fails."""
    readings: list[Reading] = []
    epochs = EPOCHS[choose_device(job.trainer.device).type]

    def watch(samples: Sequence[Sample]) -> None:
        trained = sum(sample.value for sample in samples if sample.name == SAMPLES)
        if trained:
            readings.append((time.perf_counter(), trained))

    with tempfile.TemporaryDirectory(prefix="rowcast-check-") as folder:
        write_npy(Path(folder), batches)
        config = Path(folder) / "job.json"
        write_job(config, job, data={"format": "criteo-npy", "path": folder, "epochs": epochs})
        observed = ours.observed(config, [f'cache.capacity="{capacity} rows"'], None, watch)
        shared = dict(zip(("bytes", "free"), shared_memory(), strict=True))
    outcome = ours.outcome(observed)
    of_epoch = sum(scheduled.batch.size for scheduled in batches)
    samples_per_s = pace(readings, of_epoch, epochs * of_epoch)
    return {
        "ms": None if samples_per_s is None else 1e3 * job.data.batch_size / samples_per_s,
        "ms_with_start_and_barrier": 1e3 * outcome.wall_s / outcome.steps,
        "waited_share": outcome.waited_share,
        "phases_ms": outcome.phases,
        "cores": outcome.cores,
        "device_bytes": outcome.device_bytes,
        "capacity": capacity,
        "steps": outcome.steps,
        "shared_memory": shared,
        "report": json.loads(msgspec.json.encode(observed.report)),
        "metrics": {
            role: {named(sample): sample.value for sample in samples if not sample.name.endswith("_bucket")}
            for role, samples in observed.samples.items()
        },
        "logs": {role: log.splitlines()[-LAST_LINES:] for role, log in observed.logs.items()},
    }


def named(sample: Sample) -> str:
    return f"{sample.name}{sample.labels or ''}"


def pace(readings: Sequence[Reading], first: float, last: float) -> float | None:
    """Samples per second between the first reading of at least `first` samples and the last one of less than `last`;
    None if there are no two such readings, because the run was too short.
    """
    steady = [reading for reading in readings if first <= reading[1] < last]
    if len(steady) < 2 or steady[0][1] == steady[-1][1]:
        return None
    (began_s, before), (ended_s, after) = steady[0], steady[-1]
    return (after - before) / (ended_s - began_s)
