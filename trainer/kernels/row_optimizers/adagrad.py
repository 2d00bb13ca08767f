"""Adagrad (Duchi et al. 2011), as torch.optim.Adagrad with dense gradients and no lr_decay, foreach=False.

In compiled loops, block by block:    gradients -> sum, states -> | torch.sqrt | -> weights

torch computes the square roots over a contiguous block: a compiled loop would have different bits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from rowcast.runtime.arrays import F32, I64
from rowcast.runtime.compiled import compiled_arithmetic, multiply_add
from rowcast.trainer.kernels import Rule
from rowcast.trainer.kernels.compiled_ops import (
    AHEAD,
    ROWS_AHEAD,
    CompiledStep,
    U,
    add_up,
    ask_for,
    flat,
    floats,
    gradients_of,
    start_of,
    states_of,
    weights_of,
)

if TYPE_CHECKING:
    import triton.language as tl


def train(weight: Tensor, states: list[Tensor], row_grads: Tensor, rule: Rule) -> None:
    (state,) = states
    state.addcmul_(row_grads, row_grads, value=1)
    weight.addcdiv_(row_grads, state.sqrt().add_(rule.eps), value=-rule.lr)


def update(step: CompiledStep, rule: Rule) -> None:
    lr, eps = np.float32(rule.lr), np.float32(rule.eps)
    for ranges, num_floats, _ in step.blocks():
        row_grads, roots = floats(num_floats), floats(num_floats)
        work = partial(sum_and_accumulate, step.groups, flat(row_grads), flat(roots))
        step.share(work, ranges, "segment_offsets")
        work = partial(descend_by_roots, step.groups, flat(row_grads), flat(roots.sqrt_()), lr, eps)
        step.share(work, ranges, "segment_offsets")


@compiled_arithmetic
def sum_and_accumulate(groups: Any, out: F32, sums: F32, ranges: I64) -> None:
    """out = gradient g of each row; state = state + g * g, rounded once, and copied to `sums`."""
    for k in range(len(ranges)):
        group, end = groups[ranges[k, 0]], ranges[k, 2]
        grads, states = gradients_of(group), states_of(group)
        for u in range(ranges[k, 1], end):
            if u + ROWS_AHEAD < end:
                ask_for(states, u + ROWS_AHEAD, grads.dim)
            row, at = start_of(states, u), U(ranges[k, 3] + u * grads.dim)
            add_up(grads, u, out, at)
            for c in range(grads.dim):
                grad = out[at + U(c)]
                state = multiply_add(grad, grad, states.flat[row + U(c)])
                states.flat[row + U(c)] = state
                sums[at + U(c)] = state


@compiled_arithmetic
def descend_by_roots(groups: Any, grads: F32, roots: F32, lr: np.float32, eps: np.float32, ranges: I64) -> None:
    """w = w + (-lr * g) / (root + eps)."""
    for k in range(len(ranges)):
        group, end = groups[ranges[k, 0]], ranges[k, 2]
        weights, dim = weights_of(group), group["dim"]
        for u in range(ranges[k, 1], end):
            if u + AHEAD < end:
                ask_for(weights, u + AHEAD, dim)
            row, at = start_of(weights, u), U(ranges[k, 3] + u * dim)
            for c in range(dim):
                weights.flat[row + U(c)] += -lr * grads[at + U(c)] / (roots[at + U(c)] + eps)


def scalars(rule: Rule) -> tuple[float, tuple[float, ...]]:
    return rule.lr, (rule.eps,)


def train_block(
    old: tl.tensor, states: tl.tuple, grads: tl.tensor, rate: tl.tensor, CONSTANTS: tl.constexpr, D: tl.constexpr
) -> tuple[tl.tensor, tl.tuple]:
    state = tl.fma(grads, grads, states[0])
    return old + tl.div_rn(grads * -rate, tl.sqrt_rn(state) + CONSTANTS[0]), (state,)
