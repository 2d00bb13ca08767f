"""SGD, as torch.optim.SGD without momentum and weight decay, foreach=False."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from rowcast.runtime.arrays import F32, I64
from rowcast.runtime.compiled import compiled_arithmetic, multiply_add
from rowcast.trainer.kernels import Rule
from rowcast.trainer.kernels.compiled_ops import (
    ROWS_AHEAD,
    CompiledStep,
    U,
    add_up,
    ask_for,
    gradients_of,
    start_of,
    weights_of,
)

if TYPE_CHECKING:
    import triton.language as tl


def train(weight: Tensor, states: list[Tensor], row_grads: Tensor, rule: Rule) -> None:
    weight.add_(row_grads, alpha=-rule.lr)


def update(step: CompiledStep, rule: Rule) -> None:
    lr = np.float32(rule.lr)

    def work(ranges: I64) -> None:
        sum_and_descend(step.groups, lr, np.empty(max(step.dims), np.float32), ranges)

    for ranges, _, _ in step.blocks():
        step.share(work, ranges, "segment_offsets")


@compiled_arithmetic
def sum_and_descend(groups: Any, lr: np.float32, scratch: F32, ranges: I64) -> None:
    """w = w - lr * g, rounded once. `scratch`: [D], private to the thread."""
    for k in range(len(ranges)):
        group, end = groups[ranges[k, 0]], ranges[k, 2]
        grads, weights = gradients_of(group), weights_of(group)
        for u in range(ranges[k, 1], end):
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
