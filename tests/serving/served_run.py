"""A run without training whose checkpoints can be published: random weights, and a model state in safetensors."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors.numpy import save

from rowcast.job.schema import Job
from rowcast.job.tables import make_keys
from rowcast.prefetcher.stores.records import elements_of, first_records, rounded, widened
from rowcast.runtime.arrays import F32
from rowcast.runtime.checkpoint_manifest import TrainingData
from rowcast.serving.publisher import Publisher
from rowcast.serving.row_layout import DType
from rowcast.serving.version_file import VersionFile
from tests.checkpoints.fake_run import FakeRun
from tests.support import jobs

NUM_DENSE = 3
DATA = TrainingData(files=(), num_dense=NUM_DENSE)
Tables = tuple[tuple[str, int, int, dict[str, Any]], ...]
TABLES: Tables = (
    ("user", 3000, 4, {}),
    ("item", 700, 8, {"dtype": "bf16"}),
    ("site", 50, 5, {"linear": True}),
)

SMALL: Tables = (("user", 60, 4, {}), ("item", 40, 8, {"dtype": "bf16"}), ("site", 10, 5, {"linear": True}))


def serving_job(run_dir: Path, tables: Tables = TABLES, **data: Any) -> Job:
    return jobs.job(
        job={"run_dir": str(run_dir), "seed": 9},
        data={"synthetic": {"samples": 1000}, **data},
        tables=[jobs.table(name, rows, dim, name, init="normal:0.1", **more) for name, rows, dim, more in tables],
        optimizer={"sparse": {"kind": "adagrad", "lr": 0.1}},
    )


@dataclass
class ServedRun(FakeRun):
    trained_on: TrainingData = DATA
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))

    def train_some(self, share: float, steps: int = 10) -> None:
        self.step += steps
        for group, store in zip(self.groups, self.stores, strict=True):
            for table in group.tables:
                rows = np.flatnonzero(self.rng.random(table.num_embeddings) < share)
                records = self.rng.integers(0, 256, (len(rows), group.record_bytes), np.uint8)
                part = group.parts[0]
                values = self.rng.normal(size=(len(rows), part.width)).astype(np.float32)
                elements_of(records, part)[:] = rounded(values, part.dtype)
                if len(rows):
                    store.write(make_keys(table.index, rows.astype(np.int64)), records)

    def hand_over(self) -> None:
        content = save(dense_at(self.step))
        if self.shard.number == 0:
            self.writer.offer_dense(content)
        self.writer.finish(xxhash.xxh3_64_hexdigest(content), self.blocks())

    def expected(self, table: str) -> F32:
        """All rows of a table as look-ups read them now."""
        [(group, spec)] = [(g, t) for g in self.groups for t in g.tables if t.name == table]
        keys = make_keys(spec.index, np.arange(spec.num_embeddings, dtype=np.int64))
        records, rows = first_records(group, self.job.job.seed, keys), self.rows()
        for index, key in enumerate(keys.tolist()):
            if key in rows:
                records[index] = np.frombuffer(rows[key], np.uint8)
        return widened(elements_of(records, group.parts[0]), group.parts[0].dtype).copy()


def dense_at(step: int) -> dict[str, Any]:
    return {"model.weight": np.full((2, 3), step, np.float32), "optimizer.weight": np.zeros(3, np.float32)}


def publisher_of(run: FakeRun, to: Path, dtype: DType = "fp32", keep: int = 3) -> Publisher:
    to.mkdir(parents=True, exist_ok=True)
    return Publisher(run.job.run_dir, to, dtype, keep)


def publish(run: FakeRun, to: Path, dtype: DType = "fp32", keep: int = 3, *, fresh: bool = False) -> VersionFile:
    version = publisher_of(run, to, dtype, keep).publish(fresh=fresh)
    assert version is not None
    return version


def versions_of(folder: Path, name: str, *, dtype: Any = "fp32", seed: int = 3, run_id: str = "0123456789ab") -> Path:
    """Returns a folder with a whole version and two changed ones."""
    run = ServedRun(serving_job(folder / f"run of {name}", SMALL), run_id=run_id, rng=np.random.default_rng(seed))
    for share in (0.6, 0.1, 0.1):
        run.train_some(share)
        run.checkpoint()
        publish(run, folder / name, dtype)
    return folder / name
