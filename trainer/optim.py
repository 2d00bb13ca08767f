"""Row optimizers: what torch.optim would do to whole tables, done to the rows that a batch touches, bit for bit.

Each update works on contiguous blocks [U, width] gathered from the records, with the same torch operations in the same order as the
optimizer it stands for. Their bits do not depend on how rows are cut into blocks, so gathered rows and whole tables agree.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from protocol.job import SparseOptimizer
from protocol.tables import GroupSpec

Update = Callable[[list[Tensor], Tensor, int], None]  # (weight and states [U, width], row_grads [U, D], step), in place


class RowOptimizer:
    """Updates the records of one group in place."""

    def __init__(self, group: GroupSpec, settings: SparseOptimizer) -> None:
        self._columns = [(part.offset, part.width) for part in group.parts]
        self._update = make_update(settings)

    def apply(self, records: Tensor, unique_slots: Tensor, row_grads: Tensor, step: int) -> None:
        """One train step. The second half of an update; `reduce` of the kernels is the first.

        records f32 [num_slots, record_floats], changed only in the parts of the rows named; unique_slots i32 or i64 [U], distinct;
        row_grads f32 [U, D], zero gradients included; step counts train steps from 1.
        """
        slots = unique_slots.long()
        parts = [records[:, offset : offset + width] for offset, width in self._columns]
        blocks = [part.index_select(0, slots) for part in parts]
        self._update(blocks, row_grads, step)
        for part, block in zip(parts, blocks, strict=True):
            part.index_copy_(0, slots, block)


def make_update(settings: SparseOptimizer) -> Update:
    match settings.kind:
        case "sgd":
            return sgd(settings.lr)
        case "adagrad":
            return adagrad(settings.lr, settings.epsilon)
        case "rowwise_adagrad":
            return rowwise_adagrad(settings.lr, settings.epsilon)
        case "adam":
            return adam(settings.lr, settings.epsilon, settings.betas)


def sgd(lr: float) -> Update:
    """As torch.optim.SGD without momentum and weight decay, foreach=False."""

    def update(blocks: list[Tensor], row_grads: Tensor, step: int) -> None:
        (weight,) = blocks
        weight.add_(row_grads, alpha=-lr)

    return update


def adagrad(lr: float, eps: float) -> Update:
    """As torch.optim.Adagrad (Duchi et al. 2011) with dense gradients and no lr_decay, foreach=False."""

    def update(blocks: list[Tensor], row_grads: Tensor, step: int) -> None:
        weight, state = blocks
        state.addcmul_(row_grads, row_grads, value=1)
        weight.addcdiv_(row_grads, state.sqrt().add_(eps), value=-lr)

    return update


def rowwise_adagrad(lr: float, eps: float) -> Update:
    """Adagrad with one accumulator a row: the mean of the squared gradient. torch.optim has none; examples/plain_loop.py defines it."""

    def update(blocks: list[Tensor], row_grads: Tensor, step: int) -> None:
        weight, state = blocks
        state += (row_grads * row_grads).mean(1, keepdim=True)
        weight -= lr * row_grads / (state.sqrt() + eps)

    return update


def adam(lr: float, eps: float, betas: tuple[float, float]) -> Update:
    """As torch.optim.SparseAdam (Kingma and Ba 2015, moments of touched rows only); the bias correction counts all train steps."""
    beta1, beta2 = betas

    def update(blocks: list[Tensor], row_grads: Tensor, step: int) -> None:
        weight, exp_avg, exp_avg_sq = blocks
        change = row_grads.sub(exp_avg).mul_(1 - beta1)
        change_sq = row_grads.pow(2).sub_(exp_avg_sq).mul_(1 - beta2)
        exp_avg += change
        exp_avg_sq += change_sq
        step_size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        weight += -step_size * exp_avg.div(exp_avg_sq.sqrt().add_(eps))

    return update


def warm_up_sqrt() -> None:
    """Makes the first `torch.sqrt` of the process in one thread: made by several, its roots may be inaccurate (pytorch#188792)."""
    torch.ones(1).sqrt()
