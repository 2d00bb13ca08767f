"""Small training jobs and batches of every kind of feature, made from a seed."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from rowcast.job.embedding_tables import Placement, RowType
from rowcast.job.schema import Job
from rowcast.job.tables import GroupSpec, with_placements
from rowcast.protocol.batch import Batch, Kind, ScheduledBatch
from rowcast.runtime.arrays import F32
from rowcast.trainer.models import Embedded, Sequences
from tests.support import jobs

Bags = Literal["single", "multi", "weighted", "mean", "empty", "apart", "single apart", "weighted apart"]
BAGS: tuple[Bags, ...] = ("single", "multi", "weighted", "mean", "empty", "apart")
# of the tables of `small_job`, in groups that have both
PLACED: tuple[Placement, ...] = ("table", "rows", "rows", "table")
UNPOOLED = {  # tables with pooling = "none"
    "apart": ("narrow_a", "wide_b"),
    "single apart": ("narrow_a", "wide_b"),
    "weighted apart": ("narrow_b", "wide_a", "wide_b"),
}
FP32: tuple[RowType, ...] = ("fp32", "fp32", "fp32", "fp32")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
SEVERAL_LABELS: dict[str, Any] = {  # sections of a job
    "data": {"columns": {"labels": ["click", "buy", "stay"]}},
    "model": {"kind": "examples.mmoe:build", "options": {"num_experts": 2, "expert_mlp": [6, 5], "tower_mlp": [3]}},
}
BATCH_SIZE = 64
NUM_DENSE = 4


def small_job(
    optimizer: str,
    /,
    bags: Bags = "single",
    *,
    depth: int = 2,
    horizon: int = 8,
    bundle: int = 1,
    dtypes: Sequence[RowType] = FP32,
    master: bool = False,
    **sections: Any,
) -> Job:
    """Four tables of two different widths, in groups whose features alternate; one table serves two features."""
    pooling = "mean" if bags == "mean" else "sum"
    tables = [
        jobs.table("narrow_a", 400, 5, "f0", "f1", pooling=pooling),
        jobs.table("wide_a", 300, 8, "f2", pooling="sum"),
        jobs.table("narrow_b", 2000, 5, "f3", pooling="sum", init="normal:0.1"),
        jobs.table("wide_b", 100, 8, "f4", pooling=pooling),
    ]
    for own, dtype in zip(tables, dtypes, strict=True):
        own["dtype"] = dtype
        if own["name"] in UNPOOLED.get(bags, ()):
            own["pooling"] = "none"
    content = {
        "job": {"seed": 11},
        "data": {"format": "tests.support.batches:unused", "batch_size": BATCH_SIZE},
        "tables": tables,
        "optimizer": {
            "sparse": {"kind": optimizer, "lr": 0.05, "master": master},
            "dense": {"kind": "sgd", "lr": 0.05},
        },
        "cache": {"capacity": "1GiB"},
        "lookahead": {"depth": depth, "horizon": horizon, "bundle": bundle},
    }
    return jobs.job(**jobs.laid_over(content, sections))


def placed(job: Job, placements: Sequence[Placement], ranks: int, parts: int) -> Job:
    """The job for some ranks. Tables without pooling stay by rows."""
    pooled = zip(job.tables, placements, strict=True)
    own = ["rows" if table.pooling == "none" else placement for table, placement in pooled]
    shared = msgspec.structs.replace(job.ranks, count=ranks, parts=parts)
    return msgspec.structs.replace(with_placements(job, own), ranks=shared)


def small_batches(
    job: Job, bags: Bags, *, num_steps: int = 12, eval_at: Sequence[int] = (4, 9), seed: int = 3
) -> list[ScheduledBatch]:
    """Train batches with an evaluation batch at each step of `eval_at`; the last batch is shorter."""
    sizes = [BATCH_SIZE] * (num_steps + len(eval_at) - 1) + [BATCH_SIZE // 3]
    return batches_of_sizes(job, bags, sizes, eval_at=eval_at, seed=seed)


def batches_of_sizes(
    job: Job, bags: Bags, sizes: Sequence[int], *, eval_at: Sequence[int], seed: int
) -> list[ScheduledBatch]:
    rng = np.random.default_rng(seed)
    scheduled, train_step = [], 0
    for step, size in enumerate(sizes):
        kind: Kind = "eval" if step in eval_at else "train"
        scheduled.append(
            ScheduledBatch.at(
                step=step, kind=kind, train_step=train_step, epoch=0, batch=make_batch(job, bags, size, rng)
            )
        )
        train_step += kind == "train"
    return scheduled


def make_batch(job: Job, bags: Bags, size: int, rng: np.random.Generator) -> Batch:
    sizes = {feature: table.num_embeddings for table in job.tables for feature in table.features}
    counts = bag_counts(bags, len(sizes) * size, rng)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    ids = np.concatenate(
        [
            skewed_ids(rows, int(offsets[(index + 1) * size] - offsets[index * size]), rng)
            for index, rows in enumerate(sizes.values())
        ]
    )  # fmt: skip
    weights = rng.normal(1, 0.3, len(ids)).astype(np.float32) if "weighted" in bags else None
    return Batch(
        dense=rng.normal(size=(size, NUM_DENSE)).astype(np.float32),
        labels=make_labels(job, size, rng),
        ids=ids,
        offsets=None if "single" in bags else offsets,
        weights=weights,
    )


def make_labels(job: Job, size: int, rng: np.random.Generator) -> F32:
    """Of several labels about a third is unknown."""
    labels = rng.integers(0, 2, (size, *job.data.columns.label_shape)).astype(np.float32)
    if job.data.columns.labels:
        labels[rng.random(labels.shape) < 1 / 3] = np.nan
    return labels


def bag_counts(bags: Bags, num_bags: int, rng: np.random.Generator) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    if "single" in bags:
        return np.ones(num_bags, np.int64)
    low = 1 if bags in ("multi", "weighted") else 0
    return rng.integers(low, 4, num_bags)


def skewed_ids(rows: int, count: int, rng: np.random.Generator) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Half of the look-ups go to a tenth of the rows, so that rows come back soon and duplicates are common."""
    hot = rng.integers(0, max(1, rows // 10), count)
    return np.where(rng.random(count) < 0.5, hot, rng.integers(0, rows, count)).astype(np.int64)


def slots_for(groups: tuple[GroupSpec, ...], batches: Sequence[ScheduledBatch], capacity: str) -> tuple[int, ...]:
    """Slots per group: "one batch" is what the largest batch touches, "more" a little more, "everything" every row."""
    if capacity == "everything":
        return tuple(group.num_rows for group in groups)
    largest = [max(distinct_rows(group, scheduled.batch) for scheduled in batches) for group in groups]
    return tuple(
        {"one batch": n, "more": n + 3, "two batches": 2 * n, "nine batches": 9 * n}[capacity] for n in largest
    )


def distinct_rows(group: GroupSpec, batch: Batch) -> int:
    keys = set()
    bounds = range(0, len(batch.ids) + 1, batch.size) if batch.offsets is None else batch.offsets[:: batch.size]
    for position, table in zip(group.feature_positions, group.feature_tables(), strict=True):
        keys |= {(table.index, int(row)) for row in batch.ids[bounds[position] : bounds[position + 1]]}
    return len(keys)


class SmallModel(nn.Module):
    """Two layers over inputs side by side, so features may differ in width; of a sequence its last two entries."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, dense: Tensor, embeddings: list[Embedded]) -> Tensor:
        flat = [own.padded(2)[0].flatten(1) if isinstance(own, Sequences) else own for own in embeddings]
        hidden: Tensor = torch.relu(self.hidden(torch.cat([dense, *flat], dim=1)))
        logits: Tensor = self.out(hidden)
        return logits.squeeze(1)


def small_width(job: Job, num_dense: int) -> int:
    return num_dense + sum(
        table.embedding_dim * len(table.features) * (2 if table.pooling == "none" else 1) for table in job.tables
    )


def small_model(job: Job, num_dense: int) -> nn.Module:
    return SmallModel(small_width(job, num_dense))
