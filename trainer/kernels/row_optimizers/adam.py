"""Adam (Kingma and Ba 2015), as torch.optim.SparseAdam: updates moments of touched rows only.

The bias correction counts all train steps.
"""

import math

from torch import Tensor

from rowcast.trainer.kernels import Rule


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
