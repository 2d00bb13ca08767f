"""Adagrad with one accumulator per row: the mean of the squared gradient.

torch.optim has no such optimizer; examples/plain_loop.py defines it.
"""

from torch import Tensor

from rowcast.trainer.kernels import Rule


def train(weight: Tensor, states: list[Tensor], row_grads: Tensor, rule: Rule) -> None:
    (state,) = states
    state += (row_grads * row_grads).mean(1, keepdim=True)
    weight -= rule.lr * row_grads / (state.sqrt() + rule.eps)
