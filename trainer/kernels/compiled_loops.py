"""The compiled loops over rows behind `compiled_ops`. Rows and gradients are flat arrays; a part of the records has a start and a stride:

    flat    | weight  | sum     | weight  | sum     | ...        slot s of a part: flat[s * stride + column]
            <----- stride ------>

Each loop takes the items from `first` to `end` and writes these alone, so that threads may share them out; the look-ups of one bag or
row are added by one thread in their order, starting from 0. Products and sums are rounded one by one, but for `multiply_add`, where torch
rounds once. Indices are unsigned: a signed one might count from the end, and a loop that has to ask is not vectorized.
"""

from typing import NamedTuple

import numpy as np

from rowcast.runtime.arrays import F32, I32
from rowcast.runtime.compiled import compiled_arithmetic, multiply_add, prefetch

AHEAD = 8  # look-ups: what they need is asked for so long before it is used
ROWS_AHEAD = 4  # the same, in distinct rows, of which each has several look-ups
LINE = 16  # floats of a cache line
U = np.uint64
ZERO, ONE = np.float32(0), np.float32(1)


class Part(NamedTuple):
    """One part of some rows' records."""

    flat: F32
    stride: int
    slots: I32  # [U] of the rows, or [N] of the look-ups


class Gradients(NamedTuple):
    """What the gradients of a batch's rows are summed from."""

    flat: F32  # [G * D] of the pooled bags
    dim: int  # D
    bags: I32  # [N] by row
    segments: I32  # [U + 1] where each row's look-ups start in `bags`
    lookups: I32  # [N] the look-up behind each entry of `bags`; empty without weights
    weights: F32  # [N] by look-up; empty: all are 1
    divisors: F32  # [G] of the bags; empty: all are 1


class Rate(NamedTuple):
    lr: np.float32
    eps: np.float32


@compiled_arithmetic
def gather(rows: Part, dim: int, out: F32, first: int, end: int) -> None:
    """out[i] = 0 + row of look-up i: a bag a look-up."""
    for i in range(first, end):
        if i + AHEAD < end:
            ask_for(rows, i + AHEAD, dim)
        row, at = start_of(rows, i), U(i) * U(dim)
        for c in range(dim):
            out[at + U(c)] = rows.flat[row + U(c)] + ZERO


@compiled_arithmetic
def pool_bags(rows: Part, dim: int, offsets: I32, weights: F32, divisors: F32, out: F32, first: int, end: int) -> None:
    """out[bag] = sum of weight * row over the bag's look-ups, over its divisor. Empty arrays: a bag a look-up; all 1; all 1."""
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
def sum_rows(grads: Gradients, out: F32, block: int, first: int, end: int) -> None:
    """out[u - block] = the gradient of row u."""
    for u in range(first, end):
        add_up(grads, u, out, U(u - block) * U(grads.dim))


@compiled_arithmetic
def sum_and_descend(grads: Gradients, weights: Part, rate: Rate, scratch: F32, first: int, end: int) -> None:
    """SGD: w = w - lr * g, rounded once. `scratch`: [D], of this thread."""
    for u in range(first, end):
        if u + ROWS_AHEAD < end:
            ask_for(weights, u + ROWS_AHEAD, grads.dim)
        add_up(grads, u, scratch, U(0))
        row = start_of(weights, u)
        for c in range(grads.dim):
            weights.flat[row + U(c)] = multiply_add(scratch[U(c)], -rate.lr, weights.flat[row + U(c)])


@compiled_arithmetic
def sum_and_accumulate(grads: Gradients, states: Part, out: F32, sums: F32, block: int, first: int, end: int) -> None:
    """Adagrad's first half: out[u - block] = the gradient of row u; state = state + g * g, rounded once, and a copy of it in `sums`."""
    for u in range(first, end):
        if u + ROWS_AHEAD < end:
            ask_for(states, u + ROWS_AHEAD, grads.dim)
        row, at = start_of(states, u), U(u - block) * U(grads.dim)
        add_up(grads, u, out, at)
        for c in range(grads.dim):
            grad = out[at + U(c)]
            state = multiply_add(grad, grad, states.flat[row + U(c)])
            states.flat[row + U(c)] = state
            sums[at + U(c)] = state


@compiled_arithmetic
def descend_by_roots(
    weights: Part, dim: int, grads: F32, roots: F32, rate: Rate, block: int, first: int, end: int
) -> None:
    """Adagrad's second half: w = w + (-lr * g) / (root + eps)."""
    for u in range(first, end):
        if u + AHEAD < end:
            ask_for(weights, u + AHEAD, dim)
        row, at = start_of(weights, u), U(u - block) * U(dim)
        for c in range(dim):
            weights.flat[row + U(c)] += -rate.lr * grads[at + U(c)] / (roots[at + U(c)] + rate.eps)


@compiled_arithmetic
def accumulate_means(states: Part, means: F32, sums: F32, block: int, first: int, end: int) -> None:
    """Row-wise Adagrad: state = state + mean, one a row; and a copy of it in `sums`."""
    for u in range(first, end):
        if u + AHEAD < end:
            ask_for(states, u + AHEAD, 1)
        row, at = start_of(states, u), U(u - block)
        states.flat[row] += means[at]
        sums[at] = states.flat[row]


@compiled_arithmetic
def descend_by_row_roots(
    weights: Part, dim: int, grads: F32, roots: F32, rate: Rate, block: int, first: int, end: int
) -> None:
    """Row-wise Adagrad: w = w - lr * g / (root + eps), one root a row."""
    for u in range(first, end):
        if u + AHEAD < end:
            ask_for(weights, u + AHEAD, dim)
        row, at, divisor = start_of(weights, u), U(u - block) * U(dim), roots[U(u - block)] + rate.eps
        for c in range(dim):
            weights.flat[row + U(c)] -= rate.lr * grads[at + U(c)] / divisor


@compiled_arithmetic
def add_up(grads: Gradients, u: int, out: F32, at: np.uint64) -> None:
    """out[at:at + D] = the sum of row u's gradients: each is its bag's over the bag's divisor, times the look-up's weight."""
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
def start_of(part: Part, i: int) -> np.uint64:
    return U(part.slots[i]) * U(part.stride)


@compiled_arithmetic
def ask_for(part: Part, i: int, width: int) -> None:
    """Prefetches the row of slots[i]."""
    row = part.slots[i] * part.stride
    for c in range(0, width, LINE):
        prefetch(part.flat, row + c)
