"""How many cores does each stage of the prefetcher need to keep up with a large GPU?

Question: one batch of 65,536 samples x 26 look-ups every 4.5 ms, rows of dimension 128 (512 bytes, SGD). Method: the
stages' own code, one thread each, on the synthetic stream with Criteo Kaggle cardinalities, Zipf 1.05, a cache of 5 %
of the rows that the batches touch, once it is full, and a store that holds all rows; medians of the rounds. Rows are
read to and written from memory that is in use already, as a ring's is, and what is written differs from what is there.
Cores needed = time of a batch over 4.5 ms. The floor of a stage on this machine is its bytes moved over the bandwidth
of a plain copy.

    make bench-budget
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import xxhash

from benchmarks.planner import job, seconds
from rowcast.job.schema import CRITEO_KAGGLE_CARDINALITIES
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.planner.planner import RowPlanner, groupers_of
from rowcast.prefetcher.readers.reader import open_reader
from rowcast.prefetcher.readers.schedule import schedule
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.packing import plan_block
from rowcast.protocol.plan import StepPlan
from rowcast.runtime.arrays import I64, Bytes

STEP_MS = 4.5
HORIZON, DEPTH, DIM = 8, 4, 128


Stage = tuple[int, float]  # bytes moved, milliseconds


class Rings:
    """Memory as the two rings have it: every page was written before the clock starts."""

    def __init__(self, largest: int, record_bytes: int) -> None:
        """`largest`: the rows of a plan, at most."""
        self.arrays: Bytes = np.ones(2**26, np.uint8)
        self.fetched: Bytes = np.ones((largest, record_bytes), np.uint8)
        self.back: Bytes = np.random.default_rng(7).integers(0, 256, (largest, record_bytes), np.uint8)


def measure(batch_size: int, rounds: int) -> dict[str, Stage]:
    wide = job(batch_size, HORIZON + 8 + rounds, CRITEO_KAGGLE_CARDINALITIES, DIM)
    groups = group_specs(wide)
    began = time.perf_counter()
    batches = list(schedule(wide, open_reader(wide)))
    decode_ms = 1e3 * (time.perf_counter() - began) / len(batches)
    touched, largest = rows_of(batches, groups)
    planner = RowPlanner(groups, (max(len(touched) // 20, largest),), DEPTH, HORIZON)
    store = TrackedStore(MemoryStore(groups[0]), groups[0], seed=0)
    write_all(store, touched, groups[0].record_bytes)
    rings = Rings(largest, groups[0].record_bytes)
    times: dict[str, list[Stage]] = {}
    for scheduled in batches:
        began = time.perf_counter()
        planner.add(scheduled)
        if not planner.ready():
            continue
        planned, plan = planner.plan()
        note(times, "plan", len(scheduled.batch.ids) * 8, time.perf_counter() - began)
        move(times, store, planned, plan, rings)
    store.close()
    made = {
        name: (int(statistics.median(n for n, _ in own[-rounds:])), statistics.median(ms for _, ms in own[-rounds:]))
        for name, own in times.items()
    }
    return {"make the samples (synthetic)": (batches[-1].batch.ids.nbytes, decode_ms), **made}


def move(
    times: dict[str, list[Stage]],
    store: TrackedStore,
    scheduled: ScheduledBatch,
    plan: StepPlan,
    rings: Rings,
) -> None:
    rows = plan.groups[0]
    arrays = plan_block(scheduled.batch, plan)
    timed(times, "pack the plan's arrays", arrays.nbytes, lambda: arrays.write(0, rings.arrays[: arrays.nbytes]))
    fetched = rings.fetched[: len(rows.fetch)]
    timed(times, "read rows from the store", fetched.nbytes, lambda: finish(store.read(rows.fetch.keys, fetched)))
    timed(
        times,
        "checksum of rows (one piece in 64 is sampled)",
        fetched.nbytes,
        lambda: xxhash.xxh3_64_intdigest(fetched.data),
    )
    dirty = rings.back[: rows.num_dirty]
    timed(
        times,
        "write rows to the store",
        dirty.nbytes,
        lambda: finish(store.write(rows.evict.keys[: rows.num_dirty], dirty)),
    )


def timed(times: dict[str, list[Stage]], name: str, nbytes: int, work: Callable[[], object]) -> None:
    began = time.perf_counter()
    work()
    note(times, name, nbytes, time.perf_counter() - began)


def note(times: dict[str, list[Stage]], name: str, nbytes: int, seconds: float) -> None:
    times.setdefault(name, []).append((nbytes, 1e3 * seconds))


def rows_of(batches: Sequence[ScheduledBatch], groups: tuple[GroupSpec, ...]) -> tuple[I64, int]:
    """The keys that the batches touch, ascending, and the distinct rows of the largest batch."""
    (grouper,) = groupers_of(groups)
    keys = [grouper.group(grouper.lookups(scheduled.batch)).keys for scheduled in batches]
    return np.unique(np.concatenate(keys)), max(map(len, keys))


def write_all(store: TrackedStore, keys: I64, record_bytes: int) -> None:
    """Rows are then read and written as in the middle of a run: the first write of a row makes the system allocate
    memory for it.
    """
    for part in np.array_split(keys, 64):
        finish(store.write(part, np.zeros((len(part), record_bytes), np.uint8)))


def copy_bandwidth() -> float:
    """Bytes per second."""
    source, target = np.ones(2**27, np.uint8), np.empty(2**27, np.uint8)
    return len(source) / min(seconds(lambda: np.copyto(target, source)) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stages = measure(arguments.batch_size, arguments.rounds)
    print(
        "| stage | bytes moved | ms a batch, one core | floor ms | cores for a batch each 4.5 ms "
        "|\n|---|---|---|---|---|"
    )
    bandwidth = copy_bandwidth()
    for name, (nbytes, ms) in stages.items():
        print(f"| {name} | {nbytes:,} | {ms:.1f} | {1e3 * nbytes / bandwidth:.1f} | {ms / STEP_MS:.1f} |")
    print(f"\na plain copy moves {bandwidth / 1e9:.1f} GB/s on one core, read and write counted once")


if __name__ == "__main__":
    main()
