"""The bits that the kernels of a device must have: plain torch operations on a CPU, but for what differs by design.

A long row is summed chunk by chunk. Square roots are those of IEEE 754, which a CPU's in torch are not. A row's columns
are added pair by pair.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import rowcast.trainer.kernels
from rowcast.trainer.kernels import GroupLookup, torch_ops


def reduce_in_chunks(pooled_grad: Tensor, group: GroupLookup, divisors: Tensor | None) -> Tensor:
    """`torch_ops.reduce`, long rows chunk by chunk."""
    most, ends = rowcast.trainer.kernels.CHUNK_LOOKUPS, group.segment_offsets.tolist()
    starts = [list(range(first, end, most)) for first, end in pairwise(ends)]
    chunks = torch.tensor([*(start for of_row in starts for start in of_row), ends[-1]], dtype=torch.int32)
    rows = torch.tensor(np.cumsum([0, *map(len, starts)]), dtype=torch.int32)
    sums = torch_ops.reduce(pooled_grad, replace(group, segment_offsets=chunks), divisors)
    return torch_ops.segment_sum(sums, torch.arange(len(sums), dtype=torch.int32), rows)


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """`torch_ops` with the square roots of IEEE 754 and with sums over columns pair by pair."""

    def sqrt(values: Tensor) -> Tensor:
        return torch.from_numpy(np.sqrt(values.numpy()))

    def in_pairs(values: Tensor, dim: int, keepdim: bool) -> Tensor:
        assert (dim, keepdim) == (1, True)
        columns = 1 << (values.shape[1] - 1).bit_length()
        values = torch.nn.functional.pad(values, (0, columns - values.shape[1]))
        while values.shape[1] > 1:
            values = values[:, ::2] + values[:, 1::2]
        return values

    def mean(values: Tensor, dim: int, keepdim: bool) -> Tensor:
        return in_pairs(values, dim, keepdim) / values.shape[1]

    with patch.object(Tensor, "sqrt", sqrt), patch.object(Tensor, "sum", in_pairs), patch.object(Tensor, "mean", mean):
        yield
