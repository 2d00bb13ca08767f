"""Computes a capacity's cost: the time to move a step's rows.

    tables read | link to the device | link from the device | tables written      each in a separate thread, so that
    step p+5    | p+5                | p+4                  | p+4                 the slowest one is the limit

Up to `depth` steps are in flight, so the mean over depth + 1 consecutive steps counts: a stretch. A stretch that takes
as long with every row on the device does not count, for example at the start, when all rows are new.
Planning runs in parallel and takes the same time at any capacity.

Rates are measured here quickly, or given by the user. Rows are read, made and written by the store of training, in a
table larger than the processor's caches; planning is timed with the first batches of the run. The fastest of several
tries is the machine's best. Half of it is counted on, because training shares the machine with decoding, copies and
other programs.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from rowcast.analysis.advise.read import Observed
from rowcast.analysis.advise.trials import EstimatedMoves, stretches
from rowcast.analysis.simulate.moves import entries
from rowcast.job.tables import GroupSpec, make_keys
from rowcast.prefetcher.planner.planner import RowPlanner
from rowcast.prefetcher.readers.reader import Reader
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.protocol.parts import Belonging, Rank, arrays_of_samples, samples_of
from rowcast.protocol.plan import BarrierPlan, step_block
from rowcast.runtime.arrays import F64, I64

PROBE_BYTES = 128 * 2**20
ROWS_AT_ONCE = 16384
REPEATS = 9
PLAN_REPEATS = 3
DECODED_BATCHES = 5
COUNTED = 0.5  # share of a measured rate that the estimate relies on
Flags = npt.NDArray[np.bool_]
STAGES = (
    "reading rows from the tables",
    "the link to the device",
    "the link from the device",
    "writing rows to the tables",
)
NO_MORE = 0.01  # a stall below this share of the time with every row on the device counts as none


@dataclass(frozen=True, slots=True)
class RowRates:
    """Bytes of rows per second of one group."""

    read: float  # trained rows, from the tables
    first: float  # untrained rows: their first values are computed
    write: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates that the user gave, that are assumed, or a share of those measured on this machine."""

    rows: dict[str, RowRates]  # of each group
    decode_s: float  # per batch: its ids
    plan_s: float  # per batch
    plan_bytes: float  # bytes of a plan and its batch on the link, without rows
    link_gbs: float  # 10^9 bytes/s in each direction
    step_ms: float  # what a step takes to compute
    given: tuple[str, ...] = ()  # options that the user set


def probe_rows(group: GroupSpec, seed: int, share: float = 1.0) -> RowRates:
    """`share`: of the measured rates, that is counted on."""
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
            keys_at_once = everything[start : start + count]
            finish(store.write(keys_at_once, records[: len(keys_at_once)]))
        write = least_seconds(lambda keys: finish(store.write(keys, records)), chosen)
        read = least_seconds(lambda keys: finish(store.read(keys, records)), chosen)
    finally:
        store.close()
    counted = share * count * group.record_bytes
    return RowRates(read=counted / read, first=counted / fresh, write=counted / write)


def least_seconds(work: Callable[[I64], object], chosen: list[I64]) -> float:
    work(chosen[0])  # compiles, and touches the memory of the records
    times = []
    for keys in chosen:
        began_s = time.perf_counter()
        work(keys)
        times.append(time.perf_counter() - began_s)
    return min(times)


def probe_decoding(reader: Reader, rank: Rank) -> float:
    """Returns the seconds of a core to decode the ids of a rank's samples of a batch."""
    times = []
    for pending in islice(reader.pending("train", 0), DECODED_BATCHES):
        began_s = time.process_time()
        pending(rank)
        times.append(time.process_time() - began_s)
    return min(times) / COUNTED


def probe_planning(
    observed: Observed, belonging: Belonging, depth: int, slots: tuple[int, ...], num_threads: int
) -> tuple[float, float]:
    """Returns (seconds per batch, bytes of a plan's arrays), measured on whole plans of the first batches."""
    plan_first(observed, belonging, depth, slots, num_threads)  # compiles
    tries = [plan_first(observed, belonging, depth, slots, num_threads) for _ in range(PLAN_REPEATS)]
    return min(statistics.median(of_batches) for of_batches, _ in tries) / COUNTED, statistics.mean(tries[0][1])


def plan_first(
    observed: Observed, belonging: Belonging, depth: int, slots: tuple[int, ...], num_threads: int
) -> tuple[list[float], list[int]]:
    """Returns for each batch the seconds to plan it while another enters the horizon, and its arrays' bytes."""
    planner = RowPlanner(observed.groups, [slots], depth, depth, num_threads=num_threads, rank=observed.rank)
    of_batches, nbytes, began_s = list[float](), list[int](), time.perf_counter()
    for planned in entries(planner, ((scheduled, None) for scheduled in observed.measured), planner.plan):
        if isinstance(planned, BarrierPlan):
            break  # at the end
        of_batches.append(time.perf_counter() - began_s)
        batch, [plan] = observed.measured[len(nbytes)].batch, planned.steps
        samples = arrays_of_samples(batch, samples_of(batch.size, observed.rank), belonging)
        nbytes.append(step_block(batch.samples.within(samples), plan, 0).nbytes)
        began_s = time.perf_counter()
    return of_batches, nbytes


@dataclass(frozen=True, kw_only=True)
class Demand:
    seconds: F64  # [stages, stretches] per step, averaged over each stretch

    @property
    def stretch_s(self) -> F64:
        """[stretches] time of the slowest stage."""
        return np.asarray(self.seconds.max(axis=0))

    def fits(self, step_s: float) -> Flags:
        """Returns [stretches]: whether every stage takes at most the time of a step."""
        return np.asarray(self.stretch_s <= step_s)

    @property
    def travel_s(self) -> float:
        """Returns the mean seconds from the tables to the device and back."""
        return float(self.seconds.mean(axis=1).sum())


def demand(observed: Observed, moved: EstimatedMoves, rates: Rates, depth: int) -> Demand:
    fetched, written = moved.fetched, moved.written_back
    first = np.minimum(fetched, observed.first_touches / np.array(observed.shares))
    read_s, first_s, write_s = (  # of a row
        observed.record_bytes / np.array([getattr(rows, name) for rows in rates.rows.values()])
        for name in ("read", "first", "write")
    )
    link_bytes_s = 1e9 * rates.link_gbs
    seconds = [
        (fetched - first) @ read_s + first @ first_s,
        (fetched @ observed.record_bytes + rates.plan_bytes) / link_bytes_s,
        written @ observed.record_bytes / link_bytes_s,
        written @ write_s,
    ]
    return Demand(seconds=np.stack([stretches(of_stage, depth + 1) for of_stage in seconds]))


def least_step(here: Demand, everything: Demand) -> float:
    """Returns the seconds below which a step waits for rows that a larger cache would have kept; 0 if there are none.
    `everything`: with a cache for all rows."""
    more = here.stretch_s > (1 + NO_MORE) * everything.stretch_s
    return float(here.stretch_s[more].max(initial=0.0))


def cores_need(here: Demand, rates: Rates) -> dict[str, float]:
    """Returns the milliseconds of a core that a step takes of the host, besides the thread that issues steps. `here`:
    of the recommended capacity."""
    read_s, _, _, write_s = here.seconds.mean(axis=1).tolist()
    seconds = {
        "decoding ids": rates.decode_s,
        "planning": rates.plan_s,
        "reading rows": read_s,
        "writing rows": write_s,
    }
    return {name: 1e3 * own for name, own in seconds.items()}
