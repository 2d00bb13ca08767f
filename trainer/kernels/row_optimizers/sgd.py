"""SGD, as torch.optim.SGD without momentum and weight decay, foreach=False."""

from torch import Tensor

from rowcast.trainer.kernels import Rule


def train(weight: Tensor, states: list[Tensor], row_grads: Tensor, rule: Rule) -> None:
    weight.add_(row_grads, alpha=-rule.lr)
