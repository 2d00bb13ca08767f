"""Adagrad (Duchi et al. 2011), as torch.optim.Adagrad with dense gradients and no lr_decay, foreach=False.

In compiled loops, block by block:    gradients -> sum, states -> | torch.sqrt | -> weights

torch computes the square roots over a contiguous block: a compiled loop would have different bits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rowcast.runtime.arrays import F32
from rowcast.runtime.compiled import compiled_arithmetic, multiply_add
from rowcast.runtime.stages import ThreadPool
from rowcast.trainer.kernels import Rule
from rowcast.trainer.kernels.compiled_loops import (
    AHEAD,
    ROWS_AHEAD,
    Gradients,
    RecordArray,
    U,
    add_up,
    ask_for,
    blocks,
    flat,
    floats,
    start_of,
)

if TYPE_CHECKING:
    import triton.language as tl


def train(weight: Tensor, states: list[Tensor], row_grads: Tensor, rule: Rule) -> None:
    (state,) = states
    state.addcmul_(row_grads, row_grads, value=1)
    weight.addcdiv_(row_grads, state.sqrt().add_(rule.eps), value=-rule.lr)


def update(pool: ThreadPool, grads: Gradients, weights: RecordArray, states: list[RecordArray], rule: Rule) -> None:
    (state,) = states
    lr, eps = np.float32(rule.lr), np.float32(rule.eps)
    for first, end in blocks(len(weights.slots), grads.dim):
        row_grads, roots = floats(end - first, grads.dim), floats(end - first, grads.dim)
        work = partial(sum_and_accumulate, grads, state, flat(row_grads), flat(roots), first)
        pool.share(work, first, end, grads.dim, grads.segments)
        work = partial(descend_by_roots, weights, grads.dim, flat(row_grads), flat(roots.sqrt_()), lr, eps, first)
        pool.share(work, first, end, grads.dim)


@compiled_arithmetic
def sum_and_accumulate(
    grads: Gradients, states: RecordArray, out: F32, sums: F32, block: int, first: int, end: int
) -> None:
    """out[u - block] = gradient g of row u; state = state + g * g, rounded once, and copied to `sums`."""
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
    """w = w + (-lr * g) / (root + eps)."""
    for u in range(first, end):
        if u + AHEAD < end:
            ask_for(weights, u + AHEAD, dim)
        row, at = start_of(weights, u), U(u - block) * U(dim)
        for c in range(dim):
            weights.flat[row + U(c)] += -lr * grads[at + U(c)] / (roots[at + U(c)] + eps)


def scalars(rule: Rule) -> tuple[float, tuple[float, ...]]:
    return rule.lr, (rule.eps,)


def train_block(
    old: tl.tensor, states: tl.tuple, grads: tl.tensor, rate: tl.tensor, CONSTANTS: tl.constexpr, D: tl.constexpr
) -> tuple[tl.tensor, tl.tuple]:
    state = tl.fma(grads, grads, states[0])
    return old + tl.div_rn(grads * -rate, tl.sqrt_rn(state) + CONSTANTS[0]), (state,)
