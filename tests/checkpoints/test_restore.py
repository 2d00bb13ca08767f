"""What is restored is what was there: over any changes, deltas, merges and returns to an earlier checkpoint."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowcast.job.tables import GroupSpec, make_keys
from rowcast.prefetcher.checkpoints import row_files
from rowcast.prefetcher.checkpoints.restore import restore_changed, restore_rows
from rowcast.prefetcher.stores.memory_store import MemoryStore
from rowcast.prefetcher.stores.records import first_records
from rowcast.prefetcher.stores.store import Finished, Keys, Records, RowStore, finish
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.runtime.checkpoint_manifest import Manifest
from rowcast.runtime.errors import DataError
from tests.checkpoints.fake_run import (
    TABLES,
    DictStore,
    FakeRun,
    Rows,
    as_dict,
    assert_holds,
    restored,
    small_job,
    values,
)
from tests.support.late_store import LateStore
from tests.support.repeats import count

SEED = 9

pytestmark = pytest.mark.usefixtures("small_files")

rows_of_a_table = [st.lists(st.integers(0, rows - 1), max_size=rows // 2) for _, rows, _ in TABLES]
changes = st.tuples(*rows_of_a_table).map(lambda lists: dict(enumerate(lists)))
dense_changes = st.just({table: list(range(rows)) for table, (_, rows, _) in enumerate(TABLES)})


@given(
    history=st.lists(st.one_of(changes, dense_changes), min_size=1, max_size=9), after=changes, keep=st.integers(1, 3)
)
@settings(max_examples=count(40, 400), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_is_restored_and_any_further_changes_are_taken_back(
    history: list[dict[int, list[int]]], after: dict[int, list[int]], keep: int
) -> None:
    with TemporaryDirectory() as folder:
        run = FakeRun(small_job(Path(folder)), keep=keep)
        for change in history:
            run.train(change)
            manifest = run.checkpoint()
        expected = run.rows()
        assert_holds(run.job.run_dir, run.job, manifest, expected)
        for name in run.checkpoints.candidates():
            older = run.checkpoints.load(name)
            assert_holds(run.job.run_dir, run.job, older, run.states[older.position.step])
        run.train(after)
        take_back(run, manifest)
        assert run.rows() == expected


def take_back(run: FakeRun, manifest: Manifest) -> int:
    """Returns how many rows were written for it."""
    before = sum(store.written for store in run.stores)
    restore_changed(run.checkpoints.root, manifest, run.groups, run.stores)
    assert not any(store.changed for store in run.stores)
    return sum(store.written for store in run.stores) - before


def test_only_rows_that_changed_are_written_and_new_ones_forgotten(tmp_path: Path) -> None:
    run = FakeRun(small_job(tmp_path / "run"))
    run.train({0: list(range(30)), 1: [1, 2], 2: [7]})
    manifest = run.checkpoint()
    expected = run.rows()
    run.train({0: [29, 30, 31], 2: [7, 8]})
    assert take_back(run, manifest) == 2, "rows 29 and 7 were in the checkpoint; 30, 31 and 8 were not"
    assert run.rows() == expected


def test_nothing_is_read_where_nothing_changed(tmp_path: Path) -> None:
    run = FakeRun(small_job(tmp_path / "run"))
    run.train({0: list(range(30))})
    manifest = run.checkpoint()
    for file in manifest.files:
        (run.checkpoints.root / file.file).unlink()
    assert take_back(run, manifest) == 0


def test_a_damaged_file_is_not_taken_back_to(tmp_path: Path) -> None:
    run = FakeRun(small_job(tmp_path / "run"))
    run.train({0: list(range(30))})
    manifest = run.checkpoint()
    path = run.checkpoints.root / manifest.layers[0].files[0].file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    run.train({0: [0]})
    with pytest.raises(DataError, match=path.name):
        restore_changed(run.checkpoints.root, manifest, run.groups, run.stores)


def every_row(groups: tuple[GroupSpec, ...], read: Callable[[int, Keys], Records]) -> Rows:
    """What `read` gives for all keys of each group."""
    found: Rows = {}
    for index, group in enumerate(groups):
        for table in group.tables:
            keys = make_keys(table.index, np.arange(table.num_embeddings))
            found |= as_dict(keys, read(index, keys))
    return found


def content(groups: tuple[GroupSpec, ...], stores: list[TrackedStore]) -> Rows:
    def read(index: int, keys: Keys) -> Records:
        records = np.empty((len(keys), groups[index].record_bytes), np.uint8)
        finish(stores[index].read(keys, records))
        return records

    return every_row(groups, read)


MAKERS: dict[str, Callable[[GroupSpec], RowStore]] = {
    "memory": MemoryStore,
    "late": lambda group: LateStore(MemoryStore(group), seed=3),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_real_stores_are_filled_and_taken_back(make: Callable[[GroupSpec], RowStore], tmp_path: Path) -> None:
    run = FakeRun(small_job(tmp_path / "run"))
    rng = np.random.default_rng(0)
    for share in (0.5, 0.2, 0.2):
        run.train_at_random(rng, share)
        manifest = run.checkpoint()
    expected = every_row(run.groups, lambda index, keys: first_records(run.groups[index], SEED, keys)) | run.rows()
    stores = [TrackedStore(make(group), group, SEED) for group in run.groups]
    restore_rows(run.checkpoints.root, manifest, run.groups, stores)
    assert content(run.groups, stores) == expected
    assert [store.num_changed for store in stores] == [0, 0]
    for group, store in zip(run.groups, stores, strict=True):
        keys = np.arange(0, 20, dtype=np.int64) | group.tables[0].index << 48
        finish(store.write(keys, values(group, keys, 99)))
    assert content(run.groups, stores) != expected
    restore_changed(run.checkpoints.root, manifest, run.groups, stores)
    assert content(run.groups, stores) == expected
    assert [store.num_changed for store in stores] == [0, 0]


class NoRows(DictStore):
    """Takes rows and keeps none."""

    def write(self, keys: Keys, rows: Records) -> Finished:
        return super().write(keys[:0], rows[:0])


def test_one_file_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job(tmp_path / "run", tables=(("a", 400_000, 4), ("b", 10, 8)))
    monkeypatch.setattr(row_files, "ROW_FILE_BYTES", 2**20)
    run = FakeRun(job, block=5000)
    run.train({0: list(range(200_000))})
    manifest = run.checkpoint()
    assert manifest.nbytes > 7 * 2**20

    tracemalloc.start()
    restore_rows(run.checkpoints.root, manifest, run.groups, [NoRows(group) for group in run.groups])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * 2**20


def test_a_checkpoint_of_nothing_restores_nothing(tmp_path: Path) -> None:
    run = FakeRun(small_job(tmp_path / "run"))
    assert restored(run.job.run_dir, run.job, run.checkpoint()) == {}
