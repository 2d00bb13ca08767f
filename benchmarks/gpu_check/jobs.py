"""The jobs of the check: Criteo-shaped click streams sized for the device; small ones on a CPU, to try the check
itself.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.training.recorded import Touched, train_batches
from rowcast.job.file import parse_job
from rowcast.job.schema import Job
from rowcast.protocol.batch import ScheduledBatch
from rowcast.runtime.machine import usable_cores

KAGGLE_ROWS = 33_762_577


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    batch_size: int
    steps: int
    dim: int
    scale: float  # relative to Criteo Kaggle's tables
    bottom_mlp: tuple[int, ...]  # the last width is `dim`
    top_mlp: tuple[int, ...]


def threads_of(device: torch.device) -> int:
    """For torch. One on a CPU: small operations in several threads wait for the slowest, on a busy machine for long."""
    return 1 if device.type == "cpu" else usable_cores()


def sizes(device: torch.device) -> tuple[Size, Size]:
    """Batches of 16,384 and 65,536 at dimension 128 with MLPerf's MLPs."""
    if device.type == "cpu":
        small = Size(batch_size=256, steps=12, dim=16, scale=0.01, bottom_mlp=(64, 16), top_mlp=(64, 1))
        return small, replace(small, batch_size=512)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    scale = min(1.0, free_bytes / 3 / (KAGGLE_ROWS * 128 * 4))
    bottom, top = (512, 256, 128), (1024, 1024, 512, 256, 1)
    small = Size(batch_size=16_384, steps=48, dim=128, scale=scale, bottom_mlp=bottom, top_mlp=top)
    return small, replace(small, batch_size=65_536, steps=24)


def make_job(size: Size, device: torch.device, precision: str = "fp32", run_dir: str = "unused") -> Job:
    return parse_job(
        {
            "job": {"run_dir": run_dir, "seed": 7},
            "data": {
                "format": "synthetic",
                "batch_size": size.batch_size,
                "synthetic": {"preset": "criteo-kaggle", "scale": size.scale, "samples": size.batch_size * size.steps},
            },
            "tables_from": {"embedding_dim": size.dim},
            "model": {
                "kind": "dlrm",
                "bottom_mlp": list(size.bottom_mlp),
                "top_mlp": list(size.top_mlp),
                "precision": precision,
            },
            "optimizer": {"sparse": {"kind": "rowwise_adagrad", "lr": 0.02}, "dense": {"kind": "sgd", "lr": 0.1}},
            "cache": {"capacity": "1GiB"},
            "trainer": {"device": str(device), "threads": threads_of(device)},
        }
    )


def write_job(path: Path, job: Job, /, **changes: dict[str, Any]) -> None:
    """Writes a parsed job as a job file, for commands; `changes`: keys of its sections."""
    content: dict[str, Any] = msgspec.to_builtins(job)
    content.pop("tables_from")  # already in `tables`
    for section, keys in changes.items():
        content[section] |= keys
    path.write_text(json.dumps(content))


def batches_of(size: Size, device: torch.device) -> list[ScheduledBatch]:
    return train_batches(make_job(size, device), None)


def capacity_of(known: Touched, share: float) -> int:
    """A share of the rows that the batches touch, and at least those of the largest batch."""
    return max(int(known.rows * share), known.largest_batch)


def write_npy(folder: Path, batches: Sequence[ScheduledBatch]) -> None:
    """Writes single-hot batches in the layout of `criteo-npy`, which costs next to nothing to read."""
    whole = [scheduled.batch for scheduled in batches]
    np.save(folder / "day_0_dense.npy", np.concatenate([batch.dense for batch in whole]))
    np.save(folder / "day_0_labels.npy", np.concatenate([batch.labels for batch in whole]))
    sparse = [batch.ids.reshape(-1, batch.size).T.astype(np.int32) for batch in whole]
    np.save(folder / "day_0_sparse.npy", np.concatenate(sparse))


def with_touched_rows(job: Job, batches: Sequence[ScheduledBatch]) -> tuple[Job, list[ScheduledBatch]]:
    """The same job over tables that hold only the rows that the single-hot batches touch, numbered anew."""
    ids = np.stack([scheduled.batch.ids.reshape(len(job.features), -1) for scheduled in batches])  # [steps, F, B]
    found = [np.unique(ids[:, feature], return_inverse=True) for feature in range(len(job.features))]
    content: dict[str, Any] = msgspec.to_builtins(job)
    content.pop("tables_from")  # already in `tables`
    places = {feature: number for number, feature in enumerate(job.features)}
    for table in content["tables"]:
        (feature,) = table["features"]
        table["num_embeddings"] = len(found[places[feature]][0])
    renumbered = np.stack([inverse.reshape(len(batches), -1) for _, inverse in found], axis=1)
    return parse_job(content), [
        replace(scheduled, batch=replace(scheduled.batch, ids=own.ravel()))
        for scheduled, own in zip(batches, renumbered, strict=True)
    ]
