"""Chooses what the job file leaves open: the planner's threads, and the bytes of the rings and of staging.

Rings and staging are sized by a *typical plan*: the rows that the first batches need for the first time, per batch, and
the arrays that come with them. A plan that brings more, as the first one always does, is cut into more pieces.

    each ring      depth + 1 typical plans: all that may be in flight
    staging        the rows of two typical plans, each way: one is used while the next one comes
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rowcast.job.schema import MIN_RING_BYTES, Job
from rowcast.job.tables import GroupSpec, aligned
from rowcast.prefetcher.planner.capacity import measure
from rowcast.protocol.batch import Batch, ScheduledBatch
from rowcast.protocol.packing import ARRAY_ALIGNMENT
from rowcast.protocol.plan_layout import GROUP_ARRAYS, Counts
from rowcast.protocol.transport.ring import largest_payload
from rowcast.protocol.transport.ring_file import free_shared_memory
from rowcast.runtime.cores import usable_cores
from rowcast.runtime.errors import ConfigError

LEAST_RING_BYTES = 2 * 2**20
LEAST_STAGING_BYTES = 2**19
ARRAYS_SPARE = 1.25  # for dense features and labels, which are not known yet, and for larger batches
MOST_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Typical:
    """Bytes of a typical plan, estimated from the first batches."""

    rows: int
    arrays: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    ring_bytes: int  # of each ring
    staging_bytes: int  # on the device, each way


def automatic_threads() -> int:
    """Planner threads: a quarter of the cores that this process may use, leaving the rest to readers and trainer."""
    return max(1, min(MOST_THREADS, usable_cores() // 4))


def sizes(job: Job, groups: Sequence[GroupSpec], measured: Sequence[ScheduledBatch], depth: int) -> Sizes:
    """Sizes for a run of the job, from its first batches. Raises ConfigError if the smallest rings do not fit."""
    typical, transport = typical_plan(groups, measured), job.transport
    ring_bytes = (
        transport.mirror_bytes if transport.is_tcp else transport.ring_bytes or automatic_ring_bytes(typical, depth)
    )
    return Sizes(ring_bytes=ring_bytes, staging_bytes=staging_bytes(typical.rows, ring_bytes))


def typical_plan(groups: Sequence[GroupSpec], measured: Sequence[ScheduledBatch]) -> Typical:
    """`measured`: at most the first MEASURED_BATCHES of the run."""
    if not measured:
        return Typical(rows=0, arrays=0)
    touched = measure(tuple(groups), measured)
    new_rows = sum(rows * group.record_bytes for rows, group in zip(touched.distinct_rows, groups, strict=True))
    most_rows = sum(touched.largest_batch_rows)
    most_arrays = max(group_arrays_bytes(scheduled.batch, most_rows) for scheduled in measured)
    return Typical(rows=new_rows // len(measured), arrays=int(ARRAYS_SPARE * most_arrays))


def group_arrays_bytes(batch: Batch, num_rows: int) -> int:
    present = {name for name in ("offsets", "weights") if getattr(batch, name) is not None}
    counts = Counts(
        samples=batch.size,
        lookups=len(batch.ids),
        unique=num_rows,
        bags=len(batch.ids) if batch.offsets is None else len(batch.offsets) - 1,
        fetch=num_rows,
        present=frozenset(present),
    )
    return sum(layout.nbytes_of(counts) for layout in GROUP_ARRAYS.values())


def automatic_ring_bytes(typical: Typical, depth: int) -> int:
    """Uses at most a quarter of the free shared memory."""
    needed = max(LEAST_RING_BYTES, (depth + 1) * (typical.rows + typical.arrays))
    allowed = free_shared_memory() // 4
    if allowed < MIN_RING_BYTES:
        raise ConfigError(
            f"/dev/shm has {4 * allowed} bytes free, and two rings need at least {8 * MIN_RING_BYTES}; "
            "enlarge it or free space in it"
        )
    return min(aligned(needed, 4096), allowed // 4096 * 4096)


def staging_bytes(typical_rows: int, ring_bytes: int) -> int:
    """A piece takes at most half a ring, so more staging would not be used."""
    return min(largest_payload(ring_bytes), aligned(max(LEAST_STAGING_BYTES, 2 * typical_rows), ARRAY_ALIGNMENT))


def check_shared_memory(ring_bytes: int) -> None:
    """Raises ConfigError if the two rings do not fit, before anything is allocated."""
    free = free_shared_memory()
    if 2 * ring_bytes > free:
        raise ConfigError(
            f"two rings of {ring_bytes} bytes need {2 * ring_bytes} bytes of /dev/shm, where {free} are free; "
            f"make transport.ring smaller or enlarge /dev/shm"
        )
