"""The jobs of the check: Criteo-shaped click streams sized for the device; small ones on a CPU, to try the check
itself.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from rowcast.job.file import parse_job
from rowcast.job.schema import Job

KAGGLE_ROWS = 33_762_577


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    batch_size: int
    steps: int
    dim: int
    scale: float  # relative to Criteo Kaggle's tables
    bottom_mlp: tuple[int, ...]  # the last width is `dim`
    top_mlp: tuple[int, ...]


def sizes(device: torch.device) -> list[Size]:
    """Batches of 16,384 and 65,536 at dimension 128 with MLPerf's MLPs."""
    if device.type == "cpu":
        return [Size(batch_size=512, steps=12, dim=16, scale=0.01, bottom_mlp=(64, 16), top_mlp=(64, 1))]
    free_bytes, _ = torch.cuda.mem_get_info(device)
    scale = min(1.0, free_bytes / 3 / (KAGGLE_ROWS * 128 * 4))
    bottom, top = (512, 256, 128), (1024, 1024, 512, 256, 1)
    return [
        Size(batch_size=batch_size, steps=steps, dim=128, scale=scale, bottom_mlp=bottom, top_mlp=top)
        for batch_size, steps in ((16_384, 48), (65_536, 24))
    ]


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
            "trainer": {"device": str(device)},
        }
    )


def write_job(path: Path, job: Job, /, **changes: dict[str, Any]) -> None:
    """Writes a parsed job as a job file, for commands; `changes`: keys of its sections."""
    content: dict[str, Any] = msgspec.to_builtins(job)
    content.pop("tables_from")  # already in `tables`
    for section, keys in changes.items():
        content[section] |= keys
    path.write_text(json.dumps(content))


def precisions(device: torch.device) -> tuple[str, ...]:
    return ("fp32", "tf32", "bf16") if device.type == "cuda" else ("fp32", "bf16")
