"""What a run takes of its machine where the job file leaves it open: planner threads, and bytes of the two rings."""

import statistics
from collections.abc import Sequence

from prefetcher.planner.capacity import measure
from protocol.batch import ScheduledBatch
from protocol.cores import usable_cores
from protocol.errors import ConfigError
from protocol.job import MIN_RING_BYTES
from protocol.tables import GroupSpec
from protocol.transport.ring_file import free_shared_memory

AUTO_RING_BYTES = 64 * 2**20
MOST_THREADS = 8


def automatic_threads() -> int:
    """For the planner: a quarter of the cores that this process may use; the rest is for reading, moving rows, and the trainer."""
    return max(1, min(MOST_THREADS, usable_cores() // 4))


def automatic_ring_bytes(groups: Sequence[GroupSpec], measured: Sequence[ScheduledBatch], depth: int) -> int:
    """max(64 MiB, (depth + 1) x the rows of a typical batch), at most a quarter of what is free in shared memory."""
    typical = statistics.median([touched_bytes(groups, batch) for batch in measured]) if measured else 0
    wanted = max(AUTO_RING_BYTES, int((depth + 1) * typical))
    allowed = free_shared_memory() // 4
    if allowed < MIN_RING_BYTES:
        raise ConfigError(
            f"/dev/shm has {4 * allowed} bytes free, and two rings need at least {8 * MIN_RING_BYTES}; enlarge it or free space in it"
        )
    return min(wanted, allowed) // 4096 * 4096


def check_shared_memory(ring_bytes: int) -> None:
    """Raises ConfigError where the two rings do not both fit, before anything is allocated."""
    free = free_shared_memory()
    if 2 * ring_bytes > free:
        raise ConfigError(
            f"two rings of {ring_bytes} bytes need {2 * ring_bytes} bytes of /dev/shm, where {free} are free; "
            f"make transport.ring smaller or enlarge /dev/shm"
        )


def touched_bytes(groups: Sequence[GroupSpec], batch: ScheduledBatch) -> int:
    rows = measure(tuple(groups), [batch]).largest_batch_rows
    return sum(n * group.record_bytes for n, group in zip(rows, groups, strict=True))
