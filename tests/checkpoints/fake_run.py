"""A run without training: rows that change, checkpoints of them, and a dict of what each checkpoint must hold."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import xxhash
from structlog.testing import capture_logs

from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, group_specs, make_keys
from rowcast.prefetcher.checkpoints import row_files
from rowcast.prefetcher.checkpoints.folder import Checkpoints
from rowcast.prefetcher.checkpoints.restore import ALONE, OwnShard, dense_content, restore_rows
from rowcast.prefetcher.checkpoints.writer import CheckpointWriter, RowBlock
from rowcast.prefetcher.stores.store import FINISHED, Finished, Keys, Records
from rowcast.prefetcher.stores.tracked_store import TrackedStore
from rowcast.runtime.checkpoint_manifest import Manifest, Position, TrainingData
from rowcast.runtime.disk import Disk, FileWrite
from tests.support import jobs

Rows = dict[int, bytes]  # key -> record
TABLES = (("narrow_a", 40, 4), ("wide", 30, 8), ("narrow_b", 60, 4))
MAX_ADVANCES = 1_000_000
NO_FILES = TrainingData(files=())


def small_job(run_dir: Path, optimizer: str = "adagrad", tables: tuple[tuple[str, int, int], ...] = TABLES) -> Job:
    """Two groups, one of two tables whose keys lie on both sides of the other's."""
    return jobs.job(
        job={"run_dir": str(run_dir), "seed": 9},
        data={"synthetic": {"samples": 1000}},
        tables=[jobs.table(name, rows, dim, f"f_{name}", init="normal:0.1") for name, rows, dim in tables],
        optimizer={"sparse": {"kind": optimizer, "lr": 0.1}},
    )


class UnsyncedWriting(FileWrite):
    def sync(self) -> None:
        pass


class UnsyncedDisk(Disk):
    """For tests that lose no power: they need not wait for the disk."""

    def create(self, path: Path) -> FileWrite:
        return UnsyncedWriting(path)

    def sync_folder(self, path: Path) -> None:
        pass


class DictStore(TrackedStore):
    """What a store promises, in the plainest way."""

    def __init__(self, group: GroupSpec) -> None:
        self.rows: Rows = {}
        self.changed: set[int] = set()
        self.written = 0
        self._group = group

    def write(self, keys: Keys, rows: Records) -> Finished:
        self.written += len(keys)
        self.rows |= as_dict(keys, rows)
        self.changed |= set(keys.tolist())
        return FINISHED

    def changed_keys(self, table: int) -> Keys:
        return np.array(sorted(key for key in self.changed if key >> 48 == table), np.int64)

    def forget(self, keys: Keys) -> None:
        for key in keys.tolist():
            self.rows.pop(key, None)
            self.changed.discard(key)

    def settle(self) -> None:
        self.changed.clear()

    def blocks(self, block: int) -> Iterator[tuple[Keys, Records]]:
        """The changed rows by ascending key."""
        for table in self._group.tables:
            keys = self.changed_keys(table.index)
            for start in range(0, len(keys), block):
                chosen = keys[start : start + block]
                content = b"".join(self.rows[key] for key in chosen.tolist())
                yield chosen, np.frombuffer(content, np.uint8).reshape(len(chosen), self._group.record_bytes).copy()


def as_dict(keys: Keys, records: Records) -> Rows:
    return {key: record.tobytes() for key, record in zip(keys.tolist(), records, strict=True)}


@dataclass
class FakeRun:
    """`train` changes rows; `checkpoint` makes them durable. `states`: what each checkpoint holds, by its step."""

    job: Job
    disk: Disk = field(default_factory=UnsyncedDisk)
    keep: int = 2
    newest: Manifest | None = None
    block: int = 7
    states: dict[int, Rows] = field(default_factory=dict)
    shard: OwnShard = ALONE
    run_id: str = "0123456789ab"
    trained_on: TrainingData = NO_FILES

    def __post_init__(self) -> None:
        self.job.run_dir.mkdir(parents=True, exist_ok=True)
        self.groups = group_specs(self.job)
        self.stores = [DictStore(group) for group in self.groups]
        self.checkpoints = Checkpoints(self.job.run_dir, self.disk)
        self.writer = CheckpointWriter(
            self.job,
            self.groups,
            self.run_id,
            self.trained_on,
            self.checkpoints,
            self.newest,
            self.keep,
            shard=self.shard,
        )
        self.step = self.newest.position.step if self.newest else 0

    def train(self, rows: Mapping[int, list[int]], steps: int = 10) -> None:
        """Rows of tables that are of the shard get values that say in which step and which row they are."""
        self.step += steps
        for group, store in zip(self.groups, self.stores, strict=True):
            for table in group.tables:
                keys = make_keys(table.index, np.array(sorted(set(rows.get(table.index, []))), np.int64))
                keys, records = self.shard.owned(group, (keys, values(group, keys, self.step)))
                if len(keys):
                    store.write(keys, records)

    def train_at_random(self, rng: np.random.Generator, share: float) -> None:
        self.train({i: np.flatnonzero(rng.random(rows) < share).tolist() for i, (_, rows, _) in enumerate(TABLES)})

    def begin(self, *, finished: bool = False) -> None:
        self.states[self.step] = self.rows()
        self.writer.begin(Position(step=self.step, train_step=self.step), finished, "checkpoint.every")

    def hand_over(self) -> None:
        """The dense side, which here says nothing but the step, and the rows."""
        content = dense_of(self.step)
        if self.shard.number == 0:
            self.writer.offer_dense(content[:10])
            self.writer.offer_dense(content[10:])
        self.writer.finish(xxhash.xxh3_64_hexdigest(content), self.blocks())

    def blocks(self) -> list[RowBlock]:
        """The changed rows."""
        return [
            (index, keys, records)
            for index, store in enumerate(self.stores)
            for keys, records in store.blocks(self.block)
        ]

    def checkpoint(self, *, finished: bool = False) -> Manifest:
        self.begin(finished=finished)
        self.hand_over()
        self.complete()
        assert self.writer.newest is not None
        return self.writer.newest

    def checkpoint_without_dense(self) -> Manifest:
        self.begin()
        self.writer.finish(None, self.blocks())
        self.complete()
        assert self.writer.newest is not None
        return self.writer.newest

    def complete(self) -> None:
        for _ in range(MAX_ADVANCES):
            self.writer.advance()
            if not self.writer.busy:
                break
        assert not self.writer.busy
        self.settle()

    def settle(self) -> None:
        for store in self.stores:
            store.settle()

    @property
    def newest_checksum(self) -> str:
        assert self.writer.newest is not None
        return self.writer.newest.checksum

    def rows(self) -> Rows:
        return {key: record for store in self.stores for key, record in store.rows.items()}


def values(group: GroupSpec, keys: Keys, step: int) -> Records:
    floats = np.full((len(keys), group.record_floats), step, np.float32)
    floats[:, 0] = keys & 0xFFFF
    return floats.view(np.uint8)


def dense_of(step: int) -> bytes:
    return f"the dense side at step {step}: not looked into".encode() * 3


def restored(run_dir: Path, job: Job, manifest: Manifest, shard: OwnShard = ALONE) -> Rows:
    stores = [DictStore(group) for group in group_specs(job)]
    restore_rows(run_dir / "checkpoints", manifest, group_specs(job), stores, shard)
    assert not any(store.changed for store in stores)
    return {key: record for store in stores for key, record in store.rows.items()}


def assert_holds(run_dir: Path, job: Job, manifest: Manifest, rows: Rows, count: int = 1) -> None:
    """Where `count` shards restore it, each of them has its own rows."""
    found: Rows = {}
    for number in range(count):
        shard = OwnShard(number=number, count=count)
        own = restored(run_dir, job, manifest, shard)
        for group in group_specs(job):
            keys = [key for key in own if key >> 48 in {table.index for table in group.tables}]
            assert shard.owns(group, np.array(keys, np.int64)).all()
        assert found.keys().isdisjoint(own)
        found |= own
    assert found == rows
    assert b"".join(dense_content(run_dir / "checkpoints", manifest)) == dense_of(manifest.position.step)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files a table."""
    monkeypatch.setattr(row_files, "ROW_FILE_BYTES", 400)


@contextmanager
def damages() -> Iterator[list[str]]:
    """What is logged as damaged, once the block has ended."""
    found: list[str] = []
    with capture_logs() as logs:
        yield found
    found += [log["damage"] for log in logs if "damage" in log]
