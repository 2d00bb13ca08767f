"""Stores of every kind over one small group, and what their tests ask of them."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from rowcast.job.schema import Job
from rowcast.job.stores import STORES as REGISTERED
from rowcast.job.stores import Redis, StoreWithTier
from rowcast.job.tables import ROW_MASK, GroupSpec, group_specs, make_keys
from rowcast.prefetcher.stores import touched_rows
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.store import Keys, Records, RowStore, Ticket
from rowcast.prefetcher.stores.tiered_store import TieredStore
from rowcast.prefetcher.stores.tracked_store import TrackedStore, open_row_store
from rowcast.protocol.first_values import initial_rows
from rowcast.protocol.transport.ring_file import in_memory_buffer
from rowcast.runtime.stages import ThreadPool
from tests.support import jobs
from tests.support.late_store import LateStore
from tests.support.redis_server import shared_server
from tests.support.tiers import Restless, tiered

MadeStore = TypeVar("MadeStore", bound=RowStore)

SEED = 5
INITIAL_SUM = 0.25
MAX_POLLS, QUICK_POLLS, POLL_S = 1000, 100, 0.01
TABLES = (("first", 40, 6), ("other_group", 9, 8), ("second", 300, 6), ("third", 7, 6))


def make_job(scale: int = 1, **sections: object) -> Job:
    """Adagrad rows of 6 values: a record with padding behind both parts. Tables 0, 2 and 3 share the first group."""
    tables = [jobs.table(name, rows * scale, dim, init="normal:0.1") for name, rows, dim in TABLES]
    sparse = {"kind": "adagrad", "lr": 0.1, "initial_accumulator": INITIAL_SUM}
    return jobs.job(
        **jobs.laid_over({"job": {"seed": SEED}, "tables": tables, "optimizer": {"sparse": sparse}}, sections)
    )


def groups(scale: int = 1) -> tuple[GroupSpec, ...]:
    return group_specs(make_job(scale))


GROUP = groups()[0]


def open_kind(kind: str, folder: Path) -> RowStore:
    settings = REGISTERED[kind].settings
    memory = {"memory": "1GiB"} if issubclass(settings, StoreWithTier) else {}
    url = {"url": shared_server().url_text} if settings is Redis else {}
    job = make_job(job={"run_dir": str(folder), "seed": SEED}, store={"kind": kind, **memory, **url})
    return open_row_store(job, GROUP)


def open_numbered_as_touched() -> MemoryStore:
    """As MemoryStore keeps groups of more rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(touched_rows, "MOST_INDEXED", 0)
        return in_threads(MemoryStore(GROUP), ThreadPool(3))


def in_threads(store: MadeStore, pool: ThreadPool) -> MadeStore:
    """Every read and write of two rows is divided."""
    assert store.numbers is not None
    store.numbers.pool = pool
    return store


def restless(num_slots: int, seed: int) -> Restless:
    return Restless(tiered(GROUP, num_slots), all_keys(), seed)


def restless_in_cold_tier(kind: str, folder: Path) -> Restless:
    store = open_kind(kind, folder)
    assert isinstance(store, TieredStore)
    store.begin(60)
    return Restless(store, all_keys(), seed=4)


MakeStore = Callable[[Path], RowStore]
STORES: dict[str, MakeStore] = {kind: partial(open_kind, kind) for kind in REGISTERED}
STORES["memory, in threads"] = lambda folder: in_threads(open_kind("memory", folder), ThreadPool(3))
STORES["memory, numbered as touched"] = lambda folder: open_numbered_as_touched()
STORES |= {f"late {kind}": lambda folder, kind=kind: LateStore(open_kind(kind, folder), 1) for kind in REGISTERED}  # type: ignore[misc]
STORES["tiered, 7 rows in memory"] = lambda folder: restless(7, 1)
STORES["tiered, 200 rows in memory"] = lambda folder: restless(200, 2)
STORES["tiered, in segments"] = partial(restless_in_cold_tier, "tiered")
STORES["redis, 60 rows in memory"] = partial(restless_in_cold_tier, "redis")
STORES["late tiered, 60 rows in memory"] = lambda folder: LateStore(restless(60, 3), 1)


@contextmanager
def opened(kind: str) -> Iterator[RowStore]:
    """A new store of a kind, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, closing(STORES[kind](Path(folder))) as store:
        yield store


def tracked(store: RowStore) -> TrackedStore:
    return TrackedStore(store, GROUP, SEED)


def finish(ticket: Ticket) -> None:
    for poll in range(MAX_POLLS):
        if ticket.done():
            assert ticket.done(), "a ticket that was done is done ever after"
            return
        time.sleep(0 if poll < QUICK_POLLS else POLL_S)  # another thread may have to do it
    pytest.fail(f"a ticket was not done after {MAX_POLLS} polls")


def read(store: RowStore | TrackedStore, keys: Keys) -> Records:
    """Reads into the middle of a ring, as the fetcher does; nothing beside the rows may change."""
    nbytes = len(keys) * GROUP.record_bytes
    ring = in_memory_buffer(nbytes + 128)
    ring[:] = 0xCD
    out = ring[64 : 64 + nbytes].reshape(len(keys), GROUP.record_bytes)
    finish(store.read(keys, out))
    assert (ring[:64] == 0xCD).all()
    assert (ring[64 + nbytes :] == 0xCD).all()
    return out


def keys_of(*rows_by_table: tuple[int, list[int]]) -> Keys:
    return np.concatenate([make_keys(table, np.array(rows, np.int64)) for table, rows in rows_by_table])


def all_keys() -> Keys:
    return keys_of(*((table.index, list(range(table.num_embeddings))) for table in GROUP.tables))


def random_records(num_rows: int, seed: int = 0) -> Records:
    return np.random.default_rng(seed).integers(0, 256, (num_rows, GROUP.record_bytes), np.uint8)


def present(store: RowStore) -> dict[int, bytes]:
    """Every row that the store has."""
    keys = all_keys()
    records = np.empty((len(keys), GROUP.record_bytes), np.uint8)
    ticket = store.read(keys, records)
    finish(ticket)
    absent = set(ticket.absent)
    return {
        int(key): record.tobytes() for i, (key, record) in enumerate(zip(keys, records, strict=True)) if i not in absent
    }


def changed_rows(store: TrackedStore) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for table in GROUP.tables:
        keys = store.changed_keys(table.index)
        found |= {int(key): record.tobytes() for key, record in zip(keys, read(store, keys), strict=True)}
    return found


def first_floats(keys: Keys) -> npt.NDArray[np.float32]:
    """The documented first value of each row: initial weights, the initial accumulator, zero padding."""
    floats = np.zeros((len(keys), GROUP.record_floats), np.float32)
    for table in GROUP.tables:
        chosen = (keys >> 48) == table.index
        floats[chosen, :6] = initial_rows(SEED, table, keys[chosen] & ROW_MASK)
    floats[:, 8:14] = INITIAL_SUM
    return floats
