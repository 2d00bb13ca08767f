"""Adagrad with one accumulator per row: the mean of the squared gradient.

torch.optim has no such optimizer; examples/plain_loop.py defines it. torch computes means and square roots over a
contiguous block: a compiled loop would have different bits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rowcast.runtime.arrays import F32
from rowcast.runtime.compiled import compiled_arithmetic
from rowcast.runtime.stages import ThreadPool
from rowcast.trainer.kernels import Rule
from rowcast.trainer.kernels.compiled_loops import (
    AHEAD,
    Gradients,
    RecordArray,
    U,
    ask_for,
    blocks,
    flat,
    floats,
    start_of,
    sum_rows,
)

if TYPE_CHECKING:
    import triton.language as tl

    from rowcast.trainer.kernels.triton_code import row_sums


def train(weight: Tensor, states: list[Tensor], row_grads: Tensor, rule: Rule) -> None:
    (state,) = states
    state += (row_grads * row_grads).mean(1, keepdim=True)
    weight -= rule.lr * row_grads / (state.sqrt() + rule.eps)


def update(pool: ThreadPool, grads: Gradients, weights: RecordArray, states: list[RecordArray], rule: Rule) -> None:
    (state,) = states
    lr, eps = np.float32(rule.lr), np.float32(rule.eps)
    for first, end in blocks(len(weights.slots), grads.dim):
        row_grads, roots = sum_rows(pool, grads, first, end), floats(end - first)
        means = (row_grads * row_grads).mean(1)
        accumulate_means(state, flat(means), flat(roots), first, first, end)
        work = partial(descend_by_row_roots, weights, grads.dim, flat(row_grads), flat(roots.sqrt_()), lr, eps, first)
        pool.share(work, first, end, grads.dim)


@compiled_arithmetic
def accumulate_means(states: RecordArray, means: F32, sums: F32, block: int, first: int, end: int) -> None:
    """state = state + mean, one per row, and copied to `sums`."""
    for u in range(first, end):
        if u + AHEAD < end:
            ask_for(states, u + AHEAD, 1)
        row, at = start_of(states, u), U(u - block)
        states.flat[row] += means[at]
        sums[at] = states.flat[row]


@compiled_arithmetic
def descend_by_row_roots(
    weights: RecordArray,
    dim: int,
    grads: F32,
    roots: F32,
    lr: np.float32,
    eps: np.float32,
    block: int,
    first: int,
    end: int,
) -> None:
    """w = w - lr * g / (root + eps), one root per row."""
    for u in range(first, end):
        if u + AHEAD < end:
            ask_for(weights, u + AHEAD, dim)
        row, at, divisor = start_of(weights, u), U(u - block) * U(dim), roots[U(u - block)] + eps
        for c in range(dim):
            weights.flat[row + U(c)] -= lr * grads[at + U(c)] / divisor


def scalars(rule: Rule) -> tuple[float, tuple[float, ...]]:
    return rule.lr, (rule.eps,)


def train_block(
    old: tl.tensor, states: tl.tuple, grads: tl.tensor, rate: tl.tensor, CONSTANTS: tl.constexpr, D: tl.constexpr
) -> tuple[tl.tensor, tl.tuple]:
    state = states[0] + tl.div_rn(row_sums(grads * grads), D * 1.0)
    return old - tl.div_rn(grads * rate, tl.sqrt_rn(state) + CONSTANTS[0]), (state,)
