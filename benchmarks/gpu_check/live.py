"""Both processes, started as a user starts them, over the same batches again and again.

The speed is that between the second epoch and the end, from the trainer's metrics: start, first epoch (in which the
rows are made) and last barrier are not part of it.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client.samples import Sample

from benchmarks.gpu_check.jobs import write_job, write_npy
from benchmarks.training import ours
from rowcast.job.schema import Job
from rowcast.protocol.batch import ScheduledBatch

SAMPLES, WAITS = "rowcast_samples_total", "rowcast_stall_seconds_total"
EPOCHS = 8
Reading = tuple[float, float]  # seconds, samples trained so far


def live(job: Job, batches: Sequence[ScheduledBatch], capacity: int) -> dict[str, Any]:
    """`capacity`: rows. Raises RuntimeError with a process's output if it fails."""
    readings: list[Reading] = []

    def watch(samples: Sequence[Sample]) -> None:
        trained = sum(sample.value for sample in samples if sample.name == SAMPLES)
        if trained:
            readings.append((time.perf_counter(), trained))

    with tempfile.TemporaryDirectory(prefix="rowcast-check-") as folder:
        write_npy(Path(folder), batches)
        config = Path(folder) / "job.json"
        write_job(config, job, data={"format": "criteo-npy", "path": folder, "epochs": EPOCHS})
        outcome = ours.run(config, [f'cache.capacity="{capacity} rows"'], None, watch)
    of_epoch = sum(scheduled.batch.size for scheduled in batches)
    samples_per_s = pace(readings, of_epoch, EPOCHS * of_epoch)
    return {
        "ms": None if samples_per_s is None else 1e3 * job.data.batch_size / samples_per_s,
        "ms_with_start_and_barrier": 1e3 * outcome.wall_s / outcome.steps,
        "waited_share": outcome.waited_share,
        "phases_ms": outcome.phases,
        "cores": outcome.cores,
        "device_bytes": outcome.device_bytes,
        "capacity": capacity,
        "steps": outcome.steps,
    }


def pace(readings: Sequence[Reading], first: float, last: float) -> float | None:
    """Samples per second between the first reading of at least `first` samples and the last one of less than `last`;
    None if there are no two such readings, because the run was too short.
    """
    steady = [reading for reading in readings if first <= reading[1] < last]
    if len(steady) < 2 or steady[0][1] == steady[-1][1]:
        return None
    (began_s, before), (ended_s, after) = steady[0], steady[-1]
    return (after - before) / (ended_s - began_s)
