"""How fast does a mapped store read rows whose pages are not in memory, with reading ahead and without?

Method: a file of random rows, of the layout that a job gives it. In each round the file leaves the page cache, and a
batch of 8,000 random rows is read: by page faults in one turn; staged, then read in the other, with the time that the
staging thread takes counted as if nothing lay beside it. Then the same batch is staged again, as it is when all tables
fit in memory. "written" is the same with `write`: a write to a part of a page reads the page first.

    python -m benchmarks.mapped_ahead --folder FOLDER      # on the disk to be measured; takes --gib of it
"""

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.machine import machine
from rowcast.job.tables import GroupSpec, RecordPart, TableSpec, make_keys
from rowcast.prefetcher.stores import mapped_store
from rowcast.prefetcher.stores.mapped_store import MappedStore
from rowcast.prefetcher.stores.pages_ahead import ask_for
from rowcast.prefetcher.stores.store import Keys
from rowcast.protocol.plan import GroupPlan
from rowcast.runtime.arrays import I32, I64

BATCH, BLOCK = 8_000, 2**16
NO_KEYS: I64 = np.empty(0, np.int64)
NO_SLOTS: I32 = np.empty(0, np.int32)
NO_PLAN = GroupPlan(
    slots=NO_SLOTS,
    unique_slots=NO_SLOTS,
    segment_offsets=NO_SLOTS,
    bag_order=NO_SLOTS,
    lookup_order=None,
    offsets=None,
    weights=None,
    sequence_offsets=None,
    fetch_slots=NO_SLOTS,
    fetch_keys=NO_KEYS,
    evict_keys=NO_KEYS,
    num_dirty=0,
    fill_after=None,
    load_keys=NO_KEYS,
    spill_keys=NO_KEYS,
)


def make_group(record_bytes: int, num_rows: int) -> GroupSpec:
    dim = record_bytes // 4
    return GroupSpec(
        index=0,
        name=f"rows_of_{record_bytes}",
        tables=(
            TableSpec(
                index=0,
                name="t",
                num_embeddings=num_rows,
                embedding_dim=dim,
                features=("f",),
                pooling="sum",
                init="constant:0",
            ),
        ),
        embedding_dim=dim,
        parts=(RecordPart(name="weight", dtype="fp32", offset=0, width=dim, initial=None),),
        record_bytes=record_bytes,
        feature_positions=(0,),
    )


class ColdFile:
    """A store with every row written, whose file can leave the page cache."""

    def __init__(self, folder: Path, group: GroupSpec) -> None:
        self.store = MappedStore.open(group, 0, folder, incarnation=1, checkpoint=None)
        self.path = folder / f"{group.name}.rows"
        random = np.random.default_rng(0)
        rows = random.integers(0, 256, (BLOCK, group.record_bytes), np.uint8)
        for start in range(0, group.num_rows, BLOCK):
            keys = make_keys(0, np.arange(start, min(group.num_rows, start + BLOCK)))
            self.store.write(keys, rows[: len(keys)])

    def drop(self) -> None:
        assert self.store._memory is not None, "the store is open"
        self.store._memory.flush()
        self.store._memory.madvise(mmap.MADV_DONTNEED)  # a page that is mapped cannot be dropped
        with self.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, record_bytes: int, nbytes: int, rounds: int) -> str:
    group = make_group(record_bytes, nbytes // record_bytes)
    file, random = ColdFile(folder, group), np.random.default_rng(1)
    store, out = file.store, np.empty((BATCH, record_bytes), np.uint8)

    def batch() -> Keys:
        return make_keys(0, np.sort(random.choice(group.num_rows, BATCH, replace=False)))

    def staged(keys: Keys, *, written: bool = False) -> None:
        change = {"evict_keys": keys, "num_dirty": len(keys)} if written else {"fetch_keys": keys}
        store.stage(0, replace(NO_PLAN, **change))
        store.advance(None)

    def ask_anyway(keys: Keys) -> None:
        ask_for(store._bytes, store._first_record, record_bytes, store.numbers.of(keys))

    staged(batch())
    ask_anyway(batch())  # both compile
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        began_s = time.perf_counter()
        work()
        times.setdefault(name, []).append(time.perf_counter() - began_s)

    for _ in range(rounds):
        for kind, move in (("read", store.read), ("written", store.write)):
            keys = batch()
            file.drop()
            timed(f"{kind} by faults", lambda keys=keys, move=move: move(keys, out))  # type: ignore[misc]
            keys = batch()
            file.drop()
            written = kind == "written"
            timed(f"{kind}, staged", lambda keys=keys, written=written: staged(keys, written=written))  # type: ignore[misc]
            timed(f"{kind} then", lambda keys=keys, move=move: move(keys, out))  # type: ignore[misc]
        timed("staged again", lambda keys=keys: staged(keys))  # type: ignore[misc]
        timed("asked anyway", lambda keys=keys: ask_anyway(keys))  # type: ignore[misc]
    store.close()
    file.path.unlink()
    return row(record_bytes, times)


def row(record_bytes: int, times: dict[str, list[float]]) -> str:
    cells = [str(record_bytes)]
    for kind in ("read", "written"):
        ahead = [sum(pair) for pair in zip(times[f"{kind}, staged"], times[f"{kind} then"], strict=True)]
        faults = times[f"{kind} by faults"]
        ratios = sorted(slow / fast for slow, fast in zip(faults, ahead, strict=True))
        cells += [f"{BATCH / statistics.median(seconds):,.0f}" for seconds in (faults, ahead)]
        cells.append(f"**{statistics.median(ratios):.1f}** ({ratios[0]:.1f} to {ratios[-1]:.1f})")
    again, asked = (1e3 * statistics.median(times[name]) for name in ("staged again", "asked anyway"))
    cells += [f"{1e3 * statistics.median(times['read then']):.2f}", f"{again:.2f}", f"{asked:.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bytes", type=int, nargs="+", default=[80, 272, 528])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    # files beyond half of the memory are opened without the kernel's own reading ahead; this one stands for such a file
    setattr(mapped_store, "memory_limit", lambda: 0)  # noqa: B010 - mypy: an import is no attribute
    print(machine())
    print(
        "| bytes a row | read by page faults, rows/s | staged and read | ratio | written by page faults, rows/s "
        "| staged and written | ratio | ms to read a staged batch | to stage it again | to ask for it anyway |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for record_bytes in options.bytes:
            print(measure(Path(folder), record_bytes, int(options.gib * 2**30), options.rounds), flush=True)


if __name__ == "__main__":
    main()
