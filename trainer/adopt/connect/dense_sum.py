"""Adds the dense gradients of several ranks, in the order of `trainer/models/ordered.py`: `rowcast.sum_gradients`."""

from collections.abc import Mapping
from os import environ
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.connect.rank_session import OPEN, RankSession
from rowcast.trainer.models.exchanges import SumMemory
from rowcast.trainer.models.ordered import PartVector
from rowcast.trainer.run.launch import read_launch

_sums = WeakKeyDictionary[nn.Module, "DenseSum"]()


def sum_gradients(model: nn.Module) -> None:
    """Makes each weight's gradient the mean over ranks: call it on all ranks between `backward()` and the optimizer's
    step, instead of DistributedDataParallel. On one rank it does nothing.

    Gradients are multiplied by 1 / ranks and added in one tree; collectives only copy. Waits for the device. Raises
    ConfigError for a gradient that is not float32, if other weights have one than in the first step, and before the
    loader has yielded a batch."""
    if not OPEN:
        if read_launch(environ).world_size > 1:
            raise ConfigError("sum_gradients adds what ranks of rowcast.connect computed; call it in the loader's loop")
        return
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if model not in _sums or _sums[model].names != [*trained]:  # others are frozen now
        _sums[model] = DenseSum(trained, OPEN[-1])
    _sums[model].add(OPEN[-1])


class DenseSum:
    def __init__(self, weights: Mapping[str, nn.Parameter], session: RankSession) -> None:
        self._weights, self.names = weights, [*weights]
        count, device = session.rank.count, session.streams.device
        self._vector = PartVector(self._weights, 1, count, device)
        self._gradients = self._vector.own[: sum(weight.numel() for weight in self._weights.values())]
        self._memory = SumMemory.of(self._vector.own, count)
        self._no_loss = torch.zeros(1, dtype=torch.float32, device=device)

    def add(self, session: RankSession) -> None:
        for name, weight in self._weights.items():
            if weight.grad is not None and (weight.grad.dtype != torch.float32 or weight.grad.is_sparse):
                kind = "sparse" if weight.grad.is_sparse else str(weight.grad.dtype).removeprefix("torch.")
                raise ConfigError(f"sum_gradients: the gradient of {name} is {kind}; dense float32 ones are added")
        self._vector.take(0, self._no_loss)
        self._gradients.mul_(1 / session.rank.count)
        self._vector.add_up()
        session.exchanges.name(f"the dense gradients of train step {session.train_steps}")
        session.exchanges.sum(session.streams, self._memory)
        self._vector.give(self._memory.total)
        self._vector.read(self._vector.told(self._memory.total), session.train_steps)
