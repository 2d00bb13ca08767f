"""What a step's rows cost on this machine and on the way to the device: measured here in a moment, or as the user says.

Rows are read, made and written by the store of training, in a table large enough to lie outside the processor's caches. Planning is timed
with the first batches of the run. The fastest of several tries is what the machine can do; half of that is counted on, because in training
decoding, copies and whatever else runs here take their part.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np

from rowcast.analysis.advise.observed import Observed
from rowcast.job.tables import GroupSpec, make_keys
from rowcast.prefetcher.planner.grouping import I64
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.packing import plan_block

PROBE_BYTES = 128 * 2**20
ROWS_AT_ONCE = 16384
REPEATS = 9
PLAN_REPEATS = 3
COUNTED = 0.5  # of a measured rate


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRates:
    """Rows a second of one group."""

    read: float  # rows that were trained, from the tables
    first: float  # rows that were not: their first values are computed
    write: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    rows: tuple[RowRates, ...]  # of each group
    plan_s: float  # a batch
    plan_bytes: float  # what a plan and its batch take on the link, without rows
    link_bytes_s: float  # each way


def given_rates(group: GroupSpec, bytes_s: float) -> RowRates:
    rows_s = bytes_s / group.record_bytes
    return RowRates(read=rows_s, first=rows_s, write=rows_s)


def probe_rows(group: GroupSpec, seed: int) -> RowRates:
    """Takes a moment and up to PROBE_BYTES of memory."""
    first = group.tables[0]
    num_rows = max(1, PROBE_BYTES // group.record_bytes)
    probed = replace(group, tables=(replace(first, num_embeddings=num_rows),))
    store = TrackedStore(MemoryStore(probed), probed, seed)
    random = np.random.default_rng(seed)
    count = min(num_rows, ROWS_AT_ONCE)
    chosen = [make_keys(first.index, np.sort(random.choice(num_rows, count, replace=False))) for _ in range(REPEATS)]
    records = np.zeros((count, group.record_bytes), np.uint8)
    try:
        fresh = least_seconds(lambda keys: finish(store.read(keys, records)), chosen)
        everything = make_keys(first.index, np.arange(num_rows))
        for start in range(0, num_rows, count):  # so that each row has memory, as after its first write-back
            own = everything[start : start + count]
            finish(store.write(own, records[: len(own)]))
        write = least_seconds(lambda keys: finish(store.write(keys, records)), chosen)
        read = least_seconds(lambda keys: finish(store.read(keys, records)), chosen)
    finally:
        store.close()
    return RowRates(read=COUNTED * count / read, first=COUNTED * count / fresh, write=COUNTED * count / write)


def least_seconds(work: Callable[[I64], object], chosen: list[I64]) -> float:
    work(chosen[0])  # compiled, and the memory of the records is there
    return min(seconds(partial(work, keys)) for keys in chosen)


def seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def probe_planning(observed: Observed, depth: int, slots: tuple[int, ...], num_threads: int) -> tuple[float, float]:
    """(seconds a batch; bytes of a plan's arrays), from whole plans of the first batches."""
    plan_first(observed, depth, slots, num_threads)  # compiles
    found = [plan_first(observed, depth, slots, num_threads) for _ in range(PLAN_REPEATS)]
    return min(statistics.median(of_batches) for of_batches, _ in found) / COUNTED, statistics.mean(found[0][1])


def plan_first(
    observed: Observed, depth: int, slots: tuple[int, ...], num_threads: int
) -> tuple[list[float], list[int]]:
    """Of each batch: seconds to plan one as one enters, and bytes of the plan's arrays."""
    planner = RowPlanner(observed.groups, slots, depth, depth, num_threads=num_threads)
    of_batches, nbytes = list[float](), list[int]()
    left = iter(observed.measured)
    while True:
        began_s = time.perf_counter()
        for scheduled in islice(left, planner.wants_batch):
            planner.add(scheduled)
        if planner.wants_batch:
            planner.end()
        if not planner.ready():
            return of_batches, nbytes
        scheduled, plan = planner.plan()
        of_batches.append(time.perf_counter() - began_s)
        nbytes.append(plan_block(scheduled.batch, plan).nbytes)
