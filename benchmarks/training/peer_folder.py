"""Input files for contestants of another environment: `benchmarks/peers/fused_dlrm.py`."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rowcast.job.models import BottomAndTop
from rowcast.job.schema import Job
from rowcast.job.tables import table_specs
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.first_values import initial_rows
from rowcast.trainer.models import build_model


def why_not(job: Job) -> str | None:
    """Why these contestants cannot run the job; None if they can."""
    widths = {table.embedding_dim for table in job.tables}
    if (
        job.model.kind != "dlrm"
        or len(widths) != 1
        or any(table.pooling != "sum" or len(table.features) != 1 for table in job.tables)
    ):
        return "the job is not a DLRM over tables of one width and one feature each"
    dense = job.optimizer.dense
    if job.optimizer.sparse.kind == "adam" or dense is None or dense.kind != "sgd":
        return "these contestants lack the job's optimizers"
    return None


def write_folder(folder: Path, job: Job, batches: Sequence[ScheduledBatch], threads: int) -> int:
    """Writes complete batches; returns how many."""
    whole = [scheduled.batch for scheduled in batches if scheduled.batch.size == job.data.batch_size]
    for name in ("dense", "labels", "ids"):
        np.save(folder / f"{name}.npy", np.stack([getattr(batch, name) for batch in whole]))
    specs = table_specs(job)
    for n, table in enumerate(specs):
        rows = np.arange(table.num_embeddings, dtype=np.int64)
        np.save(folder / f"table_{n}.npy", initial_rows(job.job.seed, table, rows))
    num_dense = whole[0].dense.shape[1]
    state = build_model(job, num_dense).state_dict()
    for name, tensor in state.items():
        np.save(folder / f"{name}.npy", tensor.numpy())
    num_pairs = len(specs) * (len(specs) + 1) // 2
    settings, dense = job.optimizer.sparse, job.optimizer.dense
    assert dense is not None
    assert isinstance(job.model, BottomAndTop)
    terms = {
        "num_tables": len(specs),
        "optimizer": settings.kind,
        "lr": settings.lr,
        "eps": settings.epsilon,
        "dense_lr": dense.lr,
        "bottom": [num_dense, *job.model.bottom_mlp],
        "top": [job.model.bottom_mlp[-1] + num_pairs, *job.model.top_mlp],
        "threads": threads,
    }
    (folder / "terms.json").write_text(json.dumps(terms))
    return len(whole)
