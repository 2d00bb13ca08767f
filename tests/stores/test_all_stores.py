"""Rows of several groups, read and written in one call, are those of each store's own calls."""

from typing import Any

import numpy as np
import pytest

from rowcast.job.tables import GroupSpec, group_specs, make_keys
from rowcast.prefetcher.stores import memory_store
from rowcast.prefetcher.stores.memory_store import AllStores, MemoryStore, Rows
from rowcast.prefetcher.stores.store import finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.runtime.stages import ThreadPool
from tests.support.full_capacity import make_job

WIDTHS = (3, 8, 16, 5)
TABLES: list[dict[str, Any]] = [
    {"name": f"t{n}", "num_embeddings": 40 + n, "embedding_dim": width, "features": [f"f{n}"]}
    for n, width in enumerate((*WIDTHS, 8))
]
GROUPS = group_specs(make_job(TABLES, "adagrad", {"kind": "tests.support.full_capacity:Concatenated"}))


def random_rows(rng: np.random.Generator) -> list[Rows]:
    chosen = rng.permutation(len(GROUPS))[: rng.integers(0, len(GROUPS) + 1)]
    return [(int(g), keys, records_of(rng, GROUPS[g], len(keys))) for g in chosen for keys in [random_keys(rng, g)]]


def random_keys(rng: np.random.Generator, group: int) -> "np.typing.NDArray[np.int64]":
    of_tables = [
        make_keys(table.index, np.flatnonzero(rng.random(table.num_embeddings) < 0.3)) for table in GROUPS[group].tables
    ]
    return np.concatenate(of_tables)


def records_of(rng: np.random.Generator, group: GroupSpec, count: int) -> "np.typing.NDArray[np.uint8]":
    return rng.integers(0, 256, (count, group.record_bytes), np.uint8)


def new_stores() -> list[TrackedStore]:
    return [TrackedStore(MemoryStore(group), group, seed=3) for group in GROUPS]


@pytest.mark.parametrize(("seed", "num_threads", "most"), [(0, 1, 2**25), (1, 1, 2**25), (2, 3, 2**25), (3, 1, 64)])
def test_any_rows_in_one_call_are_those_of_each_stores_own_calls(
    seed: int, num_threads: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_store, "LEAST_TO_PASS", most)
    rng, own, theirs = np.random.default_rng(seed), new_stores(), new_stores()
    for store in own:
        store.numbers.pool = ThreadPool(num_threads, least=4)
    together = AllStores(own)
    frozen: list[Any] = []
    for step in range(40):
        rows = random_rows(rng)
        if step in (15, 30):
            frozen = [(one.freeze(1.0), other.freeze(1.0)) for one, other in zip(own, theirs, strict=True)]
        if step % 2:
            for ticket in together.write(rows):
                finish(ticket)
            for group, keys, records in rows:
                finish(theirs[group].write(keys, records))
        else:
            expected = [np.empty_like(records) for *_, records in rows]
            for ticket in together.read(rows):
                finish(ticket)
            for (group, keys, found), records in zip(rows, expected, strict=True):
                finish(theirs[group].read(keys, records))
                assert np.array_equal(found, records)
        if step in (20, 35):
            for one, other in frozen:
                blocks = zip(one.blocks(2**20), other.blocks(2**20), strict=True)
                assert all(np.array_equal(a, b) for ours, others in blocks for a, b in zip(ours, others, strict=True))
            for store in (*own, *theirs):
                store.thaw()
    for one, other in zip(own, theirs, strict=True):
        assert one.num_changed == other.num_changed
