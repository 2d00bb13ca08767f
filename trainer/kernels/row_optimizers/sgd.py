"""SGD, as torch.optim.SGD without momentum and weight decay, foreach=False."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rowcast.runtime.arrays import F32
from rowcast.runtime.compiled import compiled_arithmetic, multiply_add
from rowcast.runtime.stages import ThreadPool
from rowcast.trainer.kernels import Rule
from rowcast.trainer.kernels.compiled_loops import ROWS_AHEAD, Gradients, RecordArray, U, add_up, ask_for, start_of

if TYPE_CHECKING:
    import triton.language as tl


def train(weight: Tensor, states: list[Tensor], row_grads: Tensor, rule: Rule) -> None:
    weight.add_(row_grads, alpha=-rule.lr)


def update(pool: ThreadPool, grads: Gradients, weights: RecordArray, states: list[RecordArray], rule: Rule) -> None:
    lr = np.float32(rule.lr)

    def work(first: int, end: int) -> None:
        sum_and_descend(grads, weights, lr, np.empty(grads.dim, np.float32), first, end)

    pool.share(work, 0, len(weights.slots), grads.dim, grads.segments)


@compiled_arithmetic
def sum_and_descend(grads: Gradients, weights: RecordArray, lr: np.float32, scratch: F32, first: int, end: int) -> None:
    """w = w - lr * g, rounded once. `scratch`: [D], private to the thread."""
    for u in range(first, end):
        if u + ROWS_AHEAD < end:
            ask_for(weights, u + ROWS_AHEAD, grads.dim)
        add_up(grads, u, scratch, U(0))
        row = start_of(weights, u)
        for c in range(grads.dim):
            weights.flat[row + U(c)] = multiply_add(scratch[U(c)], -lr, weights.flat[row + U(c)])


def scalars(rule: Rule) -> tuple[float, tuple[float, ...]]:
    return rule.lr, ()


def train_block(
    old: tl.tensor, states: tl.tuple, grads: tl.tensor, rate: tl.tensor, CONSTANTS: tl.constexpr, D: tl.constexpr
) -> tuple[tl.tensor, tl.tuple]:
    return tl.fma(grads, -rate, old), states
