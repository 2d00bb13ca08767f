"""The rule of Adagrad for Triton kernels."""

import triton.language as tl

from rowcast.trainer.kernels import Rule
from rowcast.trainer.kernels.triton_code import device


def scalars(rule: Rule) -> tuple[float, tuple[float, ...]]:
    return rule.lr, (rule.eps,)


@device
def train(
    old: tl.tensor, states: tl.tuple, grads: tl.tensor, rate: tl.tensor, CONSTANTS: tl.constexpr, D: tl.constexpr
) -> tuple[tl.tensor, tl.tuple]:
    state = tl.fma(grads, grads, states[0])
    return old + tl.div_rn(grads * -rate, tl.sqrt_rn(state) + CONSTANTS[0]), (state,)
