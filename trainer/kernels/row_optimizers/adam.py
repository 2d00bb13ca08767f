"""Adam (Kingma and Ba 2015), as torch.optim.SparseAdam: updates moments of touched rows only.

The bias correction counts all train steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from rowcast.trainer.kernels import Rule

if TYPE_CHECKING:
    import triton.language as tl


def train(weight: Tensor, states: list[Tensor], row_grads: Tensor, rule: Rule) -> None:
    exp_avg, exp_avg_sq = states
    beta1, beta2 = rule.settings.betas
    exp_avg += row_grads.sub(exp_avg).mul_(1 - beta1)
    exp_avg_sq += row_grads.pow(2).sub_(exp_avg_sq).mul_(1 - beta2)
    weight += -step_size(rule) * exp_avg.div(exp_avg_sq.sqrt().add_(rule.eps))


def step_size(rule: Rule) -> float:
    """Returns the learning rate with both moments' bias corrections."""
    beta1, beta2 = rule.settings.betas
    return rule.lr * math.sqrt(1 - beta2**rule.step) / (1 - beta1**rule.step)


def scalars(rule: Rule) -> tuple[float, tuple[float, ...]]:
    beta1, beta2 = rule.settings.betas
    return step_size(rule), (rule.eps, 1 - beta1, 1 - beta2)


def train_block(
    old: tl.tensor, states: tl.tuple, grads: tl.tensor, rate: tl.tensor, CONSTANTS: tl.constexpr, D: tl.constexpr
) -> tuple[tl.tensor, tl.tuple]:
    average = states[0] + (grads - states[0]) * CONSTANTS[1]
    square = states[1] + (grads * grads - states[1]) * CONSTANTS[2]
    return old + tl.div_rn(average, tl.sqrt_rn(square) + CONSTANTS[0]) * -rate, (average, square)
