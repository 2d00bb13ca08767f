"""Converts tensors to flat arrays for compiled loops, and cuts rows into blocks."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rowcast.runtime.arrays import F32, I32
from rowcast.runtime.stages import ThreadPool
from rowcast.trainer.kernels import compiled_loops as loops
from rowcast.trainer.kernels.compiled_loops import Gradients

BLOCK_FLOATS = 2**18  # row gradients per block of an update; smaller blocks cost too many calls
NO_FLOATS, NO_INTS = np.zeros(0, np.float32), np.zeros(0, np.int32)


def sum_rows(pool: ThreadPool, grads: Gradients, first: int, end: int) -> Tensor:
    """Returns the gradients f32 [end - first, D] of the rows from `first` to `end` - 1."""
    row_grads = floats(end - first, grads.dim)
    pool.share(partial(loops.sum_rows, grads, flat(row_grads), first), first, end, grads.dim, grads.segments)
    return row_grads


def blocks(num_rows: int, dim: int) -> Iterator[tuple[int, int]]:
    rows = max(1, BLOCK_FLOATS // dim)
    for first in range(0, num_rows, rows):
        yield first, min(first + rows, num_rows)


def floats(*shape: int) -> Tensor:
    """Returns uninitialised fp32, independent of torch's default dtype and device."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def flat(tensor: Tensor | None) -> F32:
    array: F32 = NO_FLOATS if tensor is None else tensor.view(-1).numpy()
    return array


def ints(tensor: Tensor) -> I32:
    array: I32 = tensor.numpy()
    return array
