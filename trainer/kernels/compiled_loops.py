"""Compiled loops over rows, for `compiled_ops`; the loops of the row optimizers are in `row_optimizers/`.

Rows and gradients are flat arrays; a field of the records has a start and a stride:

    flat    | weight  | sum     | weight  | sum     | ...        slot s of a field: flat[s * stride + column]
            <----- stride ------>

Each loop processes the items from `first` to `end` - 1 and writes only these, so threads may divide the items. One
thread adds the look-ups of one bag or row in their order, starting from 0. Each product and sum is rounded, except in
`multiply_add`, where torch rounds once. Indices are unsigned: a signed index might count from the end, and a loop with
that test is not vectorized.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rowcast.runtime.arrays import F32, I32
from rowcast.runtime.compiled import compiled_arithmetic, prefetch
from rowcast.runtime.stages import ThreadPool

AHEAD = 8  # look-ups between prefetching data and using it
ROWS_AHEAD = 4  # the same in distinct rows, with several look-ups each
LINE = 16  # floats per cache line
U = np.uint64
ZERO, ONE = np.float32(0), np.float32(1)
BLOCK_FLOATS = 2**18  # row gradients per block of an update; smaller blocks cost too many calls
NO_FLOATS, NO_INTS = np.zeros(0, np.float32), np.zeros(0, np.int32)


class RecordArray(NamedTuple):
    """One field of some rows' records."""

    flat: F32
    stride: int
    slots: I32  # [U] of rows, or [N] of look-ups


class Gradients(NamedTuple):
    """The inputs of the sums of row gradients."""

    flat: F32  # [G * D] gradients of the pooled bags
    dim: int  # D
    bags: I32  # [N] the bags of each row's look-ups, row by row
    segments: I32  # [U + 1] start of each row's look-ups in `bags`
    lookups: I32  # [N] the look-up of each entry of `bags`; empty without weights
    weights: F32  # [N] by look-up; empty: all are 1
    divisors: F32  # [G] of the bags; empty: all are 1


def sum_rows(pool: ThreadPool, grads: Gradients, first: int, end: int) -> Tensor:
    """Returns the gradients f32 [end - first, D] of the rows from `first` to `end` - 1."""
    row_grads = floats(end - first, grads.dim)
    pool.share(partial(sum_each, grads, flat(row_grads), first), first, end, grads.dim, grads.segments)
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


@compiled_arithmetic
def gather(rows: RecordArray, dim: int, out: F32, first: int, end: int) -> None:
    """out[i] = 0 + row of look-up i, for bags of one look-up."""
    for i in range(first, end):
        if i + AHEAD < end:
            ask_for(rows, i + AHEAD, dim)
        row, at = start_of(rows, i), U(i) * U(dim)
        for c in range(dim):
            out[at + U(c)] = rows.flat[row + U(c)] + ZERO


@compiled_arithmetic
def pool_bags(
    rows: RecordArray, dim: int, offsets: I32, weights: F32, divisors: F32, out: F32, first: int, end: int
) -> None:
    """out[bag] = sum of weight * row over the bag's look-ups, divided by its divisor.

    Empty `offsets`: bags of one look-up. Empty `weights` or `divisors`: all are 1.
    """
    for bag in range(first, end):
        at = U(bag) * U(dim)
        start, stop = (offsets[bag], offsets[bag + 1]) if len(offsets) else (bag, bag + 1)
        for c in range(dim):
            out[at + U(c)] = ZERO
        for i in range(start, stop):
            if i + AHEAD < len(rows.slots):
                ask_for(rows, i + AHEAD, dim)
            row = start_of(rows, i)
            weight = weights[i] if len(weights) else ONE
            for c in range(dim):
                out[at + U(c)] += rows.flat[row + U(c)] * weight
        if len(divisors):
            for c in range(dim):
                out[at + U(c)] /= divisors[bag]


@compiled_arithmetic
def sum_each(grads: Gradients, out: F32, block: int, first: int, end: int) -> None:
    """out[u - block] = the gradient of row u."""
    for u in range(first, end):
        add_up(grads, u, out, U(u - block) * U(grads.dim))


@compiled_arithmetic
def add_up(grads: Gradients, u: int, out: F32, at: np.uint64) -> None:
    """out[at:at + D] = sum of row u's gradients; each is its bag's gradient / bag's divisor * look-up's weight."""
    dim, bags = grads.dim, grads.bags
    for c in range(dim):
        out[at + U(c)] = ZERO
    for i in range(grads.segments[u], grads.segments[u + 1]):
        if i + AHEAD < len(bags):
            for c in range(0, dim, LINE):
                prefetch(grads.flat, bags[i + AHEAD] * dim + c)
        grad = U(bags[i]) * U(dim)
        if len(grads.weights) or len(grads.divisors):
            divisor = grads.divisors[bags[i]] if len(grads.divisors) else ONE
            weight = grads.weights[grads.lookups[i]] if len(grads.weights) else ONE
            for c in range(dim):
                out[at + U(c)] += grads.flat[grad + U(c)] / divisor * weight
        else:
            for c in range(dim):
                out[at + U(c)] += grads.flat[grad + U(c)]


@compiled_arithmetic
def start_of(part: RecordArray, i: int) -> np.uint64:
    return U(part.slots[i]) * U(part.stride)


@compiled_arithmetic
def ask_for(part: RecordArray, i: int, width: int) -> None:
    """Prefetches the row of slots[i]."""
    row = part.slots[i] * part.stride
    for c in range(0, width, LINE):
        prefetch(part.flat, row + c)
