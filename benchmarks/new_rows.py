"""What does a row cost when it is read and written for the first time, and when it is known?

    python -m benchmarks.new_rows [--rows 8000] [--apart 100] [--turns 9]

Processor time of a memory store over one table of a million rows with Adagrad, nanoseconds a row: quartiles of turns,
each with a new store. The first 8 rows of a store are read and written before. *Known*: the same rows again, which the
processor's caches may hold. Then all rows of a table of a gigabyte are written in random order, 8,000 at a time, twice:
the first time a virtual machine may have to ask its host for the memory.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from rowcast.job.file import parse_job
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import Ticket, finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore

AT_ONCE = 8_000
Quartiles = npt.NDArray[np.float64]


def table_of(num_rows: int, dim: int) -> GroupSpec:
    job = {
        "job": {"run_dir": "unused"},
        "data": {"format": "synthetic"},
        "tables": [{"name": "t", "num_embeddings": num_rows, "embedding_dim": dim, "features": ["f"]}],
        "model": {"kind": "examples.custom_model:build"},
        "optimizer": {"sparse": {"kind": "adagrad", "lr": 0.1}, "dense": {"kind": "sgd", "lr": 0.1}},
        "cache": {"capacity": "1GiB"},
    }
    return group_specs(parse_job(job))[0]


def timed(begin: Callable[[], Ticket]) -> float:
    began_s = time.thread_time()
    finish(begin())
    return time.thread_time() - began_s


def one_turn(group: GroupSpec, keys: npt.NDArray[np.int64]) -> list[float]:
    store, out = TrackedStore(MemoryStore(group), group, seed=1), np.ones((len(keys), group.record_bytes), np.uint8)
    for move in (store.read, store.write):
        finish(move(np.arange(8), out[:8]))
    seconds = [timed(partial(move, keys, out)) for move in 2 * (store.read, store.write)]
    store.close()
    return seconds


def every_row(group: GroupSpec) -> Iterator[float]:
    order = np.random.default_rng(0).permutation(group.num_rows)
    rows = np.ones((AT_ONCE, group.record_bytes), np.uint8)
    for _ in range(2):
        store, seconds = TrackedStore(MemoryStore(group), group, seed=1), 0.0
        for at in range(0, group.num_rows, AT_ONCE):
            keys = np.sort(order[at : at + AT_ONCE])
            seconds += timed(partial(store.write, keys, rows[: len(keys)]))
        store.close()
        yield seconds / group.num_rows * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=AT_ONCE)
    parser.add_argument("--apart", type=int, default=100)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    keys = np.arange(1, 1 + options.rows) * options.apart
    for dim in (16, 128):
        group = table_of(max(10**6, int(keys[-1]) + 1), dim)
        one_turn(group, keys)
        seconds = np.array([one_turn(group, keys) for _ in range(options.turns)]).T
        names = ("first read", "first write", "known read", "known write")
        for name, own in zip(names, seconds, strict=True):
            print(f"{group.record_bytes:6,} bytes  {name:12}", *(f"{ns:9.1f}" for ns in quartiles(own) / options.rows))
        for name, first, known in (("read", 0, 2), ("write", 1, 3)):
            ratio = quartiles(seconds[first] / seconds[known]) / 1e9
            print(f"{group.record_bytes:6,} bytes  {name}: first over known", *(f"{one:.2f}" for one in ratio))
        whole = table_of(2**30 // group.record_bytes, dim)
        print(f"{group.record_bytes:6,} bytes  all rows written", *(f"{ns:9.1f}" for ns in every_row(whole)))


def quartiles(seconds: Quartiles) -> Quartiles:
    return np.percentile(seconds * 1e9, [25, 50, 75])


if __name__ == "__main__":
    main()
