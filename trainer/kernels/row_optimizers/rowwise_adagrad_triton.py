"""The rule of row-wise Adagrad for Triton kernels."""

import triton.language as tl

from rowcast.trainer.kernels import Rule
from rowcast.trainer.kernels.triton_code import device, row_sums


def scalars(rule: Rule) -> tuple[float, tuple[float, ...]]:
    return rule.lr, (rule.eps,)


@device
def train(
    old: tl.tensor, states: tl.tuple, grads: tl.tensor, rate: tl.tensor, CONSTANTS: tl.constexpr, D: tl.constexpr
) -> tuple[tl.tensor, tl.tuple]:
    state = states[0] + tl.div_rn(row_sums(grads * grads), D * 1.0)
    return old - tl.div_rn(grads * rate, tl.sqrt_rn(state) + CONSTANTS[0]), (state,)
