"""Batches of a Parquet file by polars, for `data.format = "examples.polars_batches:open_clicks"`.

The last tenth of the rows is for evaluation. A shuffle that depends on the epoch alone lets a stopped run continue.
"""

from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import torch

BATCH = 100


def open_clicks(path: str, dense: list[str], features: list[str], label: str = "clicked") -> Callable[..., Any]:
    frame = pl.read_parquet(path)
    held_out = len(frame) // 10

    def batches(split: str, epoch: int) -> Iterator[Any]:
        if split == "eval":
            rows = frame.tail(held_out)
        else:
            rows = frame.head(len(frame) - held_out).sample(fraction=1, shuffle=True, seed=epoch)
        for some in rows.iter_slices(BATCH):
            yield (
                torch.tensor(some.select(dense).to_numpy(), dtype=torch.float32),
                {name: torch.tensor(some[name].to_numpy(), dtype=torch.int64) for name in features},
                torch.tensor(some[label].to_numpy(), dtype=torch.float32),
            )

    return batches
