"""The rule of Adam for Triton kernels."""

import triton.language as tl

from rowcast.trainer.kernels import Rule
from rowcast.trainer.kernels.row_optimizers.adam import step_size
from rowcast.trainer.kernels.triton_code import device


def scalars(rule: Rule) -> tuple[float, tuple[float, ...]]:
    beta1, beta2 = rule.settings.betas
    return step_size(rule), (rule.eps, 1 - beta1, 1 - beta2)


@device
def train(
    old: tl.tensor, states: tl.tuple, grads: tl.tensor, rate: tl.tensor, CONSTANTS: tl.constexpr, D: tl.constexpr
) -> tuple[tl.tensor, tl.tuple]:
    average = states[0] + (grads - states[0]) * CONSTANTS[1]
    square = states[1] + (grads * grads - states[1]) * CONSTANTS[2]
    return old + tl.div_rn(average, tl.sqrt_rn(square) + CONSTANTS[0]) * -rate, (average, square)
