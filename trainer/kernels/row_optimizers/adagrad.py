"""Adagrad (Duchi et al. 2011), as torch.optim.Adagrad with dense gradients and no lr_decay, foreach=False."""

from torch import Tensor

from rowcast.trainer.kernels import Rule


def train(weight: Tensor, states: list[Tensor], row_grads: Tensor, rule: Rule) -> None:
    (state,) = states
    state.addcmul_(row_grads, row_grads, value=1)
    weight.addcdiv_(row_grads, state.sqrt().add_(rule.eps), value=-rule.lr)
