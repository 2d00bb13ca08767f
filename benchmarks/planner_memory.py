"""What does planning take of the host's memory where slots are many, and how long does a barrier look for dirty rows?

Method: one group planner, without decoding, grouping or arrays of plans. Batches of `--rows` rows, drawn from 11 rows
for every 8 slots by a skewed law, so that rows in frequent use leave gaps in the line of idle ones; horizon 16. The run
ends when three times the plans are made that filled the slots. Processor time of the one thread; bytes as allocated,
copies made while something grows included. Then one barrier over all of it.

    python -m benchmarks.planner_memory [--slots 4000000] [--rows 90000]
"""

import argparse
import time
import tracemalloc

import numpy as np

from rowcast.job.tables import GroupSpec, RecordPart, TableSpec
from rowcast.prefetcher.planner.eviction import new_policy
from rowcast.prefetcher.planner.group_planner import GroupPlanner, planner_bytes
from rowcast.runtime.arrays import I64

HORIZON = 16


def new_planner(num_slots: int, num_rows: int) -> GroupPlanner:
    table = TableSpec(
        index=0, name="t", num_embeddings=num_rows, embedding_dim=4, features=("f",), pooling="sum", init="uniform"
    )
    part = RecordPart(name="weight", dtype="fp32", offset=0, width=4, initial=None)
    group = GroupSpec(
        index=0, name="g", tables=(table,), embedding_dim=4, parts=(part,), record_bytes=16, feature_positions=(0,)
    )
    return GroupPlanner(group, num_slots, new_policy("lookahead", ()), np.zeros(0, np.int64))


def drawn(random: np.random.Generator, num_rows: int, count: int) -> I64:
    return np.unique((num_rows * random.random(count) ** 3).astype(np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=4_000_000)
    parser.add_argument("--rows", type=int, default=90_000)
    options = parser.parse_args()
    num_rows, random = options.slots * 11 // 8, np.random.default_rng(3)
    compiles = new_planner(10, 10)
    compiles.enter(np.arange(3), 0)
    compiles.move(3, 0, 0, True)
    compiles.clean()
    planner, known = new_planner(options.slots, num_rows), list[int]()
    planned, filled, used_s, moved = 0, 0, 0.0, 0
    tracemalloc.start()
    while not filled or planned < 3 * filled:
        keys = drawn(random, num_rows, options.rows)
        began_s = time.thread_time()
        planner.enter(keys, planned + len(known))
        known.append(len(keys))
        if len(known) > HORIZON:
            planner.move(known.pop(0), planned, planned + len(known), True)
            planned += 1
            used_s, moved = used_s + time.thread_time() - began_s, moved + len(keys)
            filled = filled or (0 if planner.occupancy.num_free else planned)
    _, most = tracemalloc.get_traced_memory()
    said = planner_bytes(options.slots, sum(known))
    print(
        f"{planned} plans, {1e9 * used_s / moved:.0f} ns a row; a slot: {planner.nbytes / options.slots:.1f} bytes "
        f"held, {most / options.slots:.1f} at the most, {said / options.slots:.1f} said"
    )
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    began_s = time.thread_time()
    dirty = planner.clean()
    used_s = time.thread_time() - began_s
    _, most = tracemalloc.get_traced_memory()
    print(f"barrier: {len(dirty)} dirty rows, {used_s:.3f} s, {(most - before) / len(dirty):.1f} bytes a dirty row")


if __name__ == "__main__":
    main()
