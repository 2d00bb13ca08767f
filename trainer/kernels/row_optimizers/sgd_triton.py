"""The rule of SGD for Triton kernels."""

import triton.language as tl

from rowcast.trainer.kernels import Rule
from rowcast.trainer.kernels.triton_code import device


def scalars(rule: Rule) -> tuple[float, tuple[float, ...]]:
    return rule.lr, ()


@device
def train(
    old: tl.tensor, states: tl.tuple, grads: tl.tensor, rate: tl.tensor, CONSTANTS: tl.constexpr, D: tl.constexpr
) -> tuple[tl.tensor, tl.tuple]:
    return tl.fma(grads, -rate, old), states
