"""Batches of a Hugging Face data set, for `data.format = "examples.datasets_batches:open_clicks"`.

The last tenth of the rows is for evaluation. A shuffle that depends on the epoch alone lets a stopped run continue.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from datasets import Dataset

BATCH = 100


def open_clicks(path: str, dense: list[str], features: list[str], label: str = "clicked") -> Callable[..., Any]:
    clicks = Dataset.from_parquet(path).with_format("numpy")
    held_out = len(clicks) // 10
    parts = {
        "train": clicks.select(range(len(clicks) - held_out)),
        "eval": clicks.select(range(len(clicks) - held_out, len(clicks))),
    }

    def batches(split: str, epoch: int) -> Iterator[Any]:
        rows = parts[split].shuffle(seed=epoch) if split == "train" else parts[split]
        for some in rows.iter(BATCH):
            yield (
                torch.stack([torch.tensor(some[name], dtype=torch.float32) for name in dense], dim=1),
                {name: torch.tensor(some[name], dtype=torch.int64) for name in features},
                torch.tensor(some[label], dtype=torch.float32),
            )

    return batches
