"""What a run takes with a recommendation: memory of the host and of the device."""

from dataclasses import dataclass

from rowcast.analysis.advise.observed import Observed
from rowcast.analysis.check.memory import DECODED_AHEAD
from rowcast.job.schema import Job

PLAN_SPARE = 1.25  # memory of a plan's arrays is taken with so much room to grow (trainer/execute/plan_memory.py)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    tables_bytes: int  # rows with optimizer state, where every row of every table is trained
    touched_bytes: int  # of those that the run touches: about what the tables take at its end
    rings_bytes: int  # both
    ids_bytes: int  # of the batches known ahead
    decoded_bytes: int  # of batches that are decoded and wait


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Beside the dense model. Of the host where the trainer runs on the CPU."""

    capacity_bytes: int
    staging_bytes: int  # both ways
    plans_bytes: int  # arrays of depth + 2 plans


def host_memory(observed: Observed, job: Job, ring_bytes: int, known_bytes: int) -> HostMemory:
    touched = sum(
        rows * group.record_bytes for rows, group in zip(observed.distinct_rows, observed.groups, strict=True)
    )
    num_rows = sum(group.num_rows for group in observed.groups)
    return HostMemory(
        tables_bytes=sum(group.num_rows * group.record_bytes for group in observed.groups) + num_rows,
        touched_bytes=int(touched) + num_rows,  # a byte a row says whether it was trained
        rings_bytes=2 * ring_bytes,
        ids_bytes=known_bytes,
        decoded_bytes=int(DECODED_AHEAD * job.prefetcher.workers * observed.id_bytes),
    )


def device_memory(capacity_bytes: int, staging_bytes: int, depth: int, plan_bytes: float) -> DeviceMemory:
    """`staging_bytes` each way."""
    return DeviceMemory(
        capacity_bytes=capacity_bytes,
        staging_bytes=2 * staging_bytes,
        plans_bytes=int((depth + 2) * PLAN_SPARE * plan_bytes),
    )
