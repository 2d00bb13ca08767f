"""Compares the dense weights of ranks: they stay equal only if all begin alike and add up their gradients."""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any
from weakref import WeakSet

import msgspec
import torch
import xxhash
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.run.meeting import decoded

REMEDY = "wrap the model in DistributedDataParallel, or call rowcast.sum_gradients(model) after backward()"
APART = (
    "after train step {} rank {} has other dense weights than rank 0 (first: {}): each rank has trained or changed "
    f"them for itself; {REMEDY}"
)
BEGAN_APART = (
    "after train step {} rank {} has other dense weights than rank 0 (first: {}), and had before the optimizer's step: "
    f"make the model from one seed on all ranks (torch.manual_seed), and {REMEDY}"
)


class DenseWeights:
    """What the torch.optim optimizers of this rank have trained since the last comparison."""

    def __init__(self, counts: Callable[[Tensor], bool], await_device: Callable[[], None]) -> None:
        """`counts`: whether a weight that an optimizer steps now shall be the same on all ranks."""
        self._counts, self._await_device = counts, await_device
        self._optimizers = WeakSet[Optimizer]()
        self._weights = dict[Tensor, tuple[str, str]]()  # where it is, and its checksum before the step
        self.close = register_optimizer_step_pre_hook(self._steps).remove

    def _steps(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[Any, Any]) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        counted = [(number, weight) for number, weight in enumerate(weights) if self._counts(weight)]
        if optimizer in self._optimizers or not counted:
            return
        self._await_device()
        self._optimizers.add(optimizer)
        for number, weight in counted:
            place = f"weight {number} of {type(optimizer).__name__}, {list(weight.shape)}"
            self._weights.setdefault(weight, (place, checksum(weight)))

    def compare(self, gather: Callable[[bytes], list[bytes]], train_steps: int) -> None:
        """Call it on all ranks after the same train step. `gather`: of `rank_group.Group`.

        Raises ConfigError, the same on each, or PeerLost."""
        self._await_device()
        own = msgspec.json.encode([(*known, checksum(weight)) for weight, known in self._weights.items()])
        self._optimizers.clear()
        self._weights.clear()
        if len({*gather(xxhash.xxh3_64_hexdigest(own).encode())}) == 1:
            return
        first, *others = (decoded(told, list[tuple[str, str, str]]) for told in gather(own))
        for rank, told in enumerate(others, 1):
            for here, there in zip_longest(first, told, fillvalue=("", "", "")):
                if here != there:
                    sentence = APART if here[1] == there[1] else BEGAN_APART
                    raise ConfigError(sentence.format(train_steps - 1, rank, here[0] or there[0]))


def checksum(weight: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(weight.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
