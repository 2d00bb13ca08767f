"""Adagrad with one accumulator per row: the mean of the squared gradient.

torch.optim has no such optimizer; examples/plain_loop.py defines it. torch computes means and square roots over a
contiguous block: a compiled loop would have different bits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rowcast.runtime.arrays import F32, I64
from rowcast.runtime.compiled import compiled_arithmetic
from rowcast.trainer.kernels import Rule
from rowcast.trainer.kernels.compiled_ops import (
    AHEAD,
    CompiledStep,
    U,
    ask_for,
    flat,
    floats,
    start_of,
    states_of,
    sum_rows,
    weights_of,
)

if TYPE_CHECKING:
    import triton.language as tl

    from rowcast.trainer.kernels.triton_kernels import row_sums


def train(weight: Tensor, states: list[Tensor], row_grads: Tensor, rule: Rule) -> None:
    (state,) = states
    state += (row_grads * row_grads).mean(1, keepdim=True)
    weight -= rule.lr * row_grads / (state.sqrt() + rule.eps)


def update(step: CompiledStep, rule: Rule) -> None:
    lr, eps = np.float32(rule.lr), np.float32(rule.eps)
    for ranges, num_floats, num_rows in step.blocks():
        row_grads, roots = sum_rows(step, ranges, num_floats), floats(num_rows)
        means = torch.cat([mean_squares(row_grads, step.dims[g], *place) for g, *place, _ in ranges.tolist()])
        accumulate_means(step.groups, flat(means), flat(roots), ranges)
        work = partial(descend_by_row_roots, step.groups, flat(row_grads), flat(roots.sqrt_()), lr, eps)
        step.share(work, ranges, "segment_offsets")


def mean_squares(row_grads: Tensor, dim: int, first: int, end: int, base: int) -> Tensor:
    """Returns f32 [end - first] of a range."""
    grads = row_grads[base + first * dim : base + end * dim].view(-1, dim)
    return (grads * grads).mean(1)


@compiled_arithmetic
def accumulate_means(groups: Any, means: F32, sums: F32, ranges: I64) -> None:
    """state = state + mean, one per row, and copied to `sums`."""
    for k in range(len(ranges)):
        end, states = ranges[k, 2], states_of(groups[ranges[k, 0]])
        for u in range(ranges[k, 1], end):
            if u + AHEAD < end:
                ask_for(states, u + AHEAD, 1)
            row, at = start_of(states, u), U(ranges[k, 4] + u)
            states.flat[row] += means[at]
            sums[at] = states.flat[row]


@compiled_arithmetic
def descend_by_row_roots(groups: Any, grads: F32, roots: F32, lr: np.float32, eps: np.float32, ranges: I64) -> None:
    """w = w - lr * g / (root + eps), one root per row."""
    for k in range(len(ranges)):
        group, end = groups[ranges[k, 0]], ranges[k, 2]
        weights, dim = weights_of(group), group["dim"]
        for u in range(ranges[k, 1], end):
            if u + AHEAD < end:
                ask_for(weights, u + AHEAD, dim)
            row, at = start_of(weights, u), U(ranges[k, 3] + u * dim)
            divisor = roots[U(ranges[k, 4] + u)] + eps
            for c in range(dim):
                weights.flat[row + U(c)] -= lr * grads[at + U(c)] / divisor


def scalars(rule: Rule) -> tuple[float, tuple[float, ...]]:
    return rule.lr, (rule.eps,)


def train_block(
    old: tl.tensor, states: tl.tuple, grads: tl.tensor, rate: tl.tensor, CONSTANTS: tl.constexpr, D: tl.constexpr
) -> tuple[tl.tensor, tl.tuple]:
    state = states[0] + tl.div_rn(row_sums(grads * grads), D * 1.0)
    return old - tl.div_rn(grads * rate, tl.sqrt_rn(state) + CONSTANTS[0]), (state,)
