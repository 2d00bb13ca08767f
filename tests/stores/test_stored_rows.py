"""Records of any size, in any kind of store, leave it as they were written: to a ring, a checkpoint and a new store."""

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rowcast.job.schema import Job
from rowcast.job.stores import Redis, Tiered
from rowcast.job.tables import GroupSpec, make_keys
from rowcast.prefetcher.checkpoints.restore import restore_rows
from rowcast.prefetcher.checkpoints.row_files import RowFiles
from rowcast.prefetcher.stores.memory_store import MemoryStore, StoredRows
from rowcast.prefetcher.stores.row_loops import stored_bytes
from rowcast.prefetcher.stores.store import Keys, Records, RowStore, finish
from rowcast.prefetcher.stores.tiered_store import TieredStore
from rowcast.prefetcher.stores.tracked_store import TrackedStore, open_row_store
from rowcast.runtime.stages import ThreadPool
from tests.checkpoints.fake_run import FakeRun, UnsyncedDisk, as_dict, small_job
from tests.stores.every_store import in_threads
from tests.support.redis_server import shared_server
from tests.support.repeats import count
from tests.support.tiers import Restless, tiered

SEED = 3
TABLES = (("a", 40), ("b", 30))


def begun(job: Job, group: GroupSpec) -> TieredStore:
    store = open_row_store(job, group)
    assert isinstance(store, TieredStore)
    store.begin(25)
    return store


def all_keys(group: GroupSpec) -> Keys:
    return np.concatenate([make_keys(table.index, np.arange(table.num_embeddings)) for table in group.tables])


KINDS: dict[str, Callable[[Job, GroupSpec], RowStore]] = {
    "memory": lambda job, group: MemoryStore(group),
    "memory, in threads": lambda job, group: in_threads(MemoryStore(group), ThreadPool(3)),
    "tiered, in memory": lambda job, group: Restless(tiered(group, 100), all_keys(group), SEED),
    "tiered, in threads": lambda job, group: Restless(
        in_threads(tiered(group, 25), ThreadPool(3)), all_keys(group), SEED
    ),
    "tiered, in files": lambda job, group: Restless(
        begun(replace(job, store=Tiered(kind="tiered", memory="1GiB")), group), all_keys(group), SEED
    ),
    "redis": lambda job, group: Restless(
        begun(replace(job, store=Redis(kind="redis", memory="1GiB", url=shared_server().url_text)), group),
        all_keys(group),
        SEED,
    ),
}


def written(run: FakeRun, store: TrackedStore, rng: np.random.Generator, share: float) -> None:
    """Writes random rows to the run's dictionary and to the store."""
    (group,) = run.groups
    keys = all_keys(group)[rng.random(70) < share]
    records = rng.integers(0, 256, (len(keys), group.record_bytes), np.uint8)
    run.stores[0].write(keys, records)
    finish(store.write(keys, records))


def content(store: TrackedStore, group: GroupSpec) -> Records:
    records = np.full((70, group.record_bytes), 0xCD, np.uint8)
    finish(store.read(all_keys(group), records))
    return records


def saved(folder: Path, group: GroupSpec, blocks: Iterable[tuple[Keys, Records]]) -> list[bytes]:
    """The files of a checkpoint with these rows."""
    folder.mkdir()
    files = RowFiles(UnsyncedDisk(), folder)
    for keys, records in blocks:
        list(files.add(group, keys, records))
    list(files.flush())
    return [(folder.parent / file.file).read_bytes() for file in files.files]


@pytest.mark.parametrize("kind", KINDS)
@given(dim=st.integers(1, 275), seed=st.integers(0, 2**32))
@example(dim=48, seed=0)  # records of 192 bytes
@example(dim=49, seed=0)
@example(dim=132, seed=0)  # of 528 bytes, as row-wise Adagrad with 128 columns
@settings(max_examples=count(8, 100))
def test_rows_of_any_size_are_read_saved_and_restored_as_they_were_written(kind: str, dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with TemporaryDirectory() as folder:
        run = FakeRun(small_job(Path(folder, "run"), "sgd", tuple((name, rows, dim) for name, rows in TABLES)))
        (group,) = run.groups
        with closing(TrackedStore(KINDS[kind](run.job, group), group, SEED)) as store:
            untrained = as_dict(all_keys(group), content(store, group))
            written(run, store, rng, 0.6)
            manifest = run.checkpoint()
            expected = untrained | run.rows()
            assert as_dict(all_keys(group), content(store, group)) == expected
            store.settle()
            written(run, store, rng, 0.3)
            changed = list(run.stores[0].blocks(9))
            frozen = store.freeze(1.0)
            written(run, store, rng, 0.3)
            blocks = list(frozen.blocks(9 * group.record_bytes))
            store.thaw()
            assert saved(Path(folder, f"step-{1:012}"), group, blocks) == saved(
                Path(folder, f"step-{2:012}"), group, changed
            )
            assert as_dict(all_keys(group), content(store, group)) == untrained | run.rows()
        with closing(TrackedStore(KINDS[kind](run.job, group), group, SEED)) as again:
            restore_rows(run.checkpoints.root, manifest, run.groups, [again])
            assert as_dict(all_keys(group), content(again, group)) == expected


@given(record_bytes=st.integers(1, 275).map(lambda words: 4 * words))
def test_only_long_records_begin_at_a_cache_line(record_bytes: int) -> None:
    stored = stored_bytes(record_bytes)
    if record_bytes <= 192:
        assert stored == record_bytes
    else:
        assert record_bytes <= stored < record_bytes + 64
        assert stored % 64 == 0


@pytest.mark.parametrize(("record_bytes", "stored"), [(192, 192), (208, 256), (528, 576), (576, 576), (1040, 1088)])
def test_a_row_that_is_passed_over_and_the_rest_of_a_line_stay_as_they_were(record_bytes: int, stored: int) -> None:
    rows = StoredRows(5, record_bytes)
    rows.write(np.array([3, -1, 0]), np.full((3, record_bytes), 7, np.uint8), ThreadPool())
    content = rows.words.view(np.uint8).reshape(5, stored)
    assert (content[[0, 3], :record_bytes] == 7).all()
    assert not content[[1, 2, 4]].any()
    assert not content[:, record_bytes:].any()
    out = np.full((3, record_bytes), 1, np.uint8)
    assert rows.read(np.array([-1, 3, 0]), out, ThreadPool()) == 1
    assert np.array_equal(out[:, 0], [1, 7, 7])
