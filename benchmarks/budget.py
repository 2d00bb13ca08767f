"""How many cores does each stage of the prefetcher need to keep up with a large GPU?

Question: one batch of 65,536 samples x 26 look-ups every 4.5 ms, rows of dimension 128 with the records of the job's
row optimizer (row-wise Adagrad as in MLPerf: 528 bytes). Method: the stages' own code, one after another in one
process, on the synthetic stream with Criteo Kaggle cardinalities, Zipf 1.05, a cache of 5 % of the rows that the
batches touch, once it is full, and a store that holds all rows. A time is the process's processor time with all its
threads, the median of the rounds; so other programs disturb it little. Rows are read to and written from memory that is
in use already, as a ring's is, and what is written differs from what is there. The passes over rows are compared with a
plain copy of the same bytes, from ring to ring, in the same round.
Cores needed = time of a batch over 4.5 ms. The floor of a stage on this machine is its bytes moved over the bandwidth
of a plain copy. Lines that begin with "-" are parts of the line above; the trainer's look at a plan is the mail
thread's. The parent of a decoding process receives, the child sends.

The last table is computed, not measured: the shortest step if all stages share the cores perfectly. It is the larger of
two times: all stages over the cores, and the longest stage, the plan, over its threads.

    make bench-budget
    python -m benchmarks.budget --optimizer sgd      # records of 512 bytes
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from benchmarks.planner import job, job_over, seconds
from rowcast.job.optimizers import ROW_OPTIMIZERS
from rowcast.job.schema import CRITEO_KAGGLE_CARDINALITIES, Job
from rowcast.job.tables import GroupSpec, group_specs
from rowcast.prefetcher.planner.planner import RowPlanner, groupers_of
from rowcast.prefetcher.readers.reader import open_reader, schedule
from rowcast.prefetcher.readers.shared_arrays import ArrayReceiver, ArraySender
from rowcast.prefetcher.run.sizing import MOST_THREADS, automatic_threads
from rowcast.prefetcher.stores import tracked_store
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.records import FiniteRows
from rowcast.prefetcher.stores.store import finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.messages import PlanReady
from rowcast.protocol.parts import UNDIVIDED, batch_specs
from rowcast.protocol.plan import ARRAY_ALIGNMENT, StepPlan, step_block, step_header
from rowcast.runtime.arrays import I64, Bytes
from rowcast.trainer.step.memory import derive
from rowcast.trainer.step.plan_check import PlanCheck

STEP_MS = 4.5
HORIZON, DEPTH, DIM = 8, 4, 128
WARM_UP = 3  # batches that are decoded before the clock counts
COPY, FINITE, SCATTER = "copy of the rows to write", "- finite or not", "- scatter"
SERIAL_MS = 2.4  # a plan of 65,536 samples keeps one thread busy this long, however many parts it has
CORES = (2, 4, 8, 12, 16, 32)
THREADS: dict[str, Callable[[int], int]] = {
    '`threads = "auto"`': partial(automatic_threads, is_on_device=True),
    "as many threads as cores, at most 8": lambda cores: min(cores, MOST_THREADS),
}


class Clocks:
    """Processor milliseconds and bytes of each stage and part, in the order in which they first ran."""

    def __init__(self) -> None:
        self.times: dict[str, list[tuple[int, float]]] = {}

    def note(self, name: str, nbytes: int, ms: float) -> None:
        self.times.setdefault(name, []).append((nbytes, ms))

    @contextmanager
    def timed(self, name: str, nbytes: int, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
        self.times.setdefault(name, [])  # before its parts
        began = clock()
        yield
        self.note(name, nbytes, 1e3 * (clock() - began))

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Counts what each call of `owner.method` takes."""
        whole = getattr(owner, method)

        def call(*arguments: Any) -> Any:
            with self.timed(name, 0):
                return whole(*arguments)

        setattr(owner, method, call)

    def medians(self, rounds: int) -> dict[str, tuple[int, float]]:
        """Of the last `rounds` entries of each."""
        return {
            name: (
                int(statistics.median(n for n, _ in own[-rounds:])),
                statistics.median(ms for _, ms in own[-rounds:]),
            )
            for name, own in self.times.items()
        }


class Rings:
    """Memory as the two rings have it: every page was written before the clock starts."""

    def __init__(self, largest: int, record_bytes: int) -> None:
        """`largest`: the rows of a plan, at most."""
        self.arrays: Bytes = np.ones(2**26, np.uint8)
        fetched = np.ones(largest * record_bytes + ARRAY_ALIGNMENT, np.uint8)
        start = -fetched.ctypes.data % ARRAY_ALIGNMENT  # as rows in a ring
        self.fetched: Bytes = fetched[start : start + largest * record_bytes].reshape(largest, record_bytes)
        values = np.random.default_rng(7).standard_normal((largest, record_bytes // 4), np.float32)
        self.back: Bytes = values.view(np.uint8)
        self.copied: Bytes = np.ones_like(self.back)


def measure(batch_size: int, rounds: int, optimizer: str) -> dict[str, tuple[int, float]]:
    clocks, wide = Clocks(), job(batch_size, HORIZON + 8 + rounds, CRITEO_KAGGLE_CARDINALITIES, DIM)
    sparse = msgspec.structs.replace(wide.optimizer.sparse, kind=optimizer)
    wide = msgspec.structs.replace(wide, optimizer=msgspec.structs.replace(wide.optimizer, sparse=sparse))
    groups = group_specs(wide)
    batches = list(schedule(wide, open_reader(wide)))
    decode(clocks, wide, batches[: WARM_UP + rounds])
    hand_over(clocks, batches[: WARM_UP + rounds])
    touched, largest = rows_of(batches, groups)
    slots = (max(len(touched) // 20, largest),)
    planner = RowPlanner(groups, (slots,), DEPTH, HORIZON)
    memory = MemoryStore(groups[0])
    store = TrackedStore(memory, groups[0], seed=0)
    write_all(store, touched, groups[0].record_bytes)
    check = PlanCheck(groups, slots, batch_specs(batches[0].batch, {}), 0, 2**40, is_tcp=False)
    rings, finite = Rings(largest, groups[0].record_bytes), FiniteRows(groups[0])
    for scheduled in batches:
        with clocks.timed("plan: group", scheduled.batch.ids.nbytes):
            grouped = planner.group(scheduled.batch)
        with clocks.timed("plan: enter the horizon", 0):
            planner.add(scheduled, grouped)
        if not planner.ready():
            continue
        if not clocks.times.get("plan: move and arrange"):
            clocks.times["plan: move and arrange"] = []
            clocks.watch(planner, "move", "- victims, fill, use")
            clocks.watch(memory.numbers, "of", "- find")
            clocks.watch(memory.rows, "read", "- gather")
            clocks.watch(finite, "fault", FINITE)
            clocks.watch(memory.numbers, "added", "- find to write")
            clocks.watch(tracked_store, "set_bits", "- mark as changed")
            clocks.watch(memory.rows, "write", SCATTER)
        with clocks.timed("plan: move and arrange", 0):
            [plan] = planner.plan().steps
        planned = batches[plan.step - batches[0].step]
        move(clocks, store, finite, planned, plan, rings)
        look(clocks, check, planned, plan, rings)
    store.close()
    return clocks.medians(rounds)


def decode(clocks: Clocks, wide: Job, batches: Sequence[ScheduledBatch]) -> None:
    """From files of npy."""
    with tempfile.TemporaryDirectory() as folder:
        ids = np.concatenate([own.batch.ids.reshape(len(wide.features), -1).T for own in batches]).astype(np.int32)
        np.save(Path(folder, "day_0_sparse.npy"), ids)
        np.save(Path(folder, "day_0_dense.npy"), np.concatenate([own.batch.dense for own in batches]))
        np.save(Path(folder, "day_0_labels.npy"), np.concatenate([own.batch.labels for own in batches]))
        data = {"format": "criteo-npy", "path": folder, "batch_size": wide.data.batch_size}
        npy = job_over(data, [table.num_embeddings for table in wide.tables], DIM)
        for columns, name in (("all", "decode npy"), ("ids", "- ids")):
            reader = open_reader(npy, columns)  # type: ignore[arg-type]
            for pending in islice(reader.pending("train", 0), len(batches)):
                with clocks.timed(name, batches[0].batch.ids.nbytes):
                    pending(UNDIVIDED)


def hand_over(clocks: Clocks, batches: Sequence[ScheduledBatch]) -> None:
    parents, childs = Pipe()
    sender, receiver = ArraySender(childs), ArrayReceiver(parents)

    def send() -> None:
        for scheduled in batches:
            with clocks.timed("decoder to planner: child", scheduled.batch.ids.nbytes, time.thread_time):
                sender.send(scheduled.batch)

    child = threading.Thread(target=send)
    child.start()
    for scheduled in batches:
        with clocks.timed("decoder to planner: parent", scheduled.batch.ids.nbytes, time.thread_time):
            receiver.receive()
    child.join()
    parents.close()
    childs.close()


def move(
    clocks: Clocks, store: TrackedStore, finite: FiniteRows, scheduled: ScheduledBatch, plan: StepPlan, rings: Rings
) -> None:
    rows = plan.groups[0]
    arrays = step_block(scheduled.batch, plan, 0)
    with clocks.timed("pack the plan's arrays", arrays.nbytes):
        arrays.write(0, rings.arrays[: arrays.nbytes])
    fetched = rings.fetched[: len(rows.fetch_keys)]
    with clocks.timed("read rows from the store", fetched.nbytes):
        finish(store.read(rows.fetch_keys, fetched))
    with clocks.timed("checksum of rows (one piece in 64 is sampled)", fetched.nbytes):
        xxhash.xxh3_64_intdigest(fetched.data)
    dirty, keys = rings.back[: rows.num_dirty], rows.evict_keys[: rows.num_dirty]
    with clocks.timed(COPY, dirty.nbytes):
        np.copyto(rings.copied[: len(dirty)], dirty)
    with clocks.timed("write rows to the store", dirty.nbytes):
        assert not finite.fault(keys, dirty)
        finish(store.write(keys, dirty))


def look(clocks: Clocks, check: PlanCheck, scheduled: ScheduledBatch, plan: StepPlan, rings: Rings) -> None:
    block = step_block(scheduled.batch, plan, 0)
    header = step_header(scheduled.batch, plan, block)
    message = PlanReady(plan=plan.step, piece=0, num_pieces=1, steps=(header,), payload=None, arrays=None, rows=())
    with clocks.timed("the trainer looks at a plan", block.nbytes):
        check.message(message)
        check.arrays(plan.step, rings.arrays[: block.nbytes])
        derive((header,), rings.arrays[: block.nbytes])


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
    parser.add_argument("--optimizer", choices=tuple(ROW_OPTIMIZERS), default="rowwise_adagrad")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stages = measure(arguments.batch_size, arguments.rounds, arguments.optimizer)
    print(
        "| stage | bytes moved | ms of a core per batch | floor ms | cores for a batch each 4.5 ms |\n"
        "|---|---|---|---|---|"
    )
    bandwidth = copy_bandwidth()
    for name, (nbytes, ms) in stages.items():
        print(f"| {name} | {nbytes:,} | {ms:.1f} | {1e3 * nbytes / bandwidth:.1f} | {ms / STEP_MS:.1f} |")
    whole = sum(ms for name, (_, ms) in stages.items() if not name.startswith(("-", "checksum", COPY)))
    print(f"| all but the checksum and the copy | | {whole:.1f} | | {whole / STEP_MS:.1f} |")
    (_, copy), (_, finite), (_, scatter) = (stages[name] for name in (COPY, FINITE, SCATTER))
    print(
        f"\nscatter over the copy: {scatter / copy:.2f}; with the look for finite rows: {(finite + scatter) / copy:.2f}"
    )
    print(f"\na plain copy moves {bandwidth / 1e9:.1f} GB/s on one core, read and write counted once\n")
    print(f"| computed step, ms, with cores | {' | '.join(map(str, CORES))} |\n|{'---|' * (1 + len(CORES))}")
    plan = sum(ms for name, (_, ms) in stages.items() if name.startswith("plan:"))
    for name, threads in THREADS.items():
        steps = [max(whole / cores, SERIAL_MS + (plan - SERIAL_MS) / threads(cores)) for cores in CORES]
        print(f"| {name} | {' | '.join(f'{ms:.2g}' for ms in steps)} |")


if __name__ == "__main__":
    main()
