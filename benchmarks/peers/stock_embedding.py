"""Contestant: stock PyTorch, one `nn.EmbeddingBag(sparse=True)` per table and its torch.optim optimizer, all rows in
memory.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks.peers.turns import Clock, Seconds, Terms, by_feature, initial_rows, take_turns


class Stock:
    def __init__(self, terms: Terms, ids: npt.NDArray[np.int64], gradient: Tensor) -> None:
        self._terms, self._ids = terms, torch.from_numpy(ids)
        self._gradients = by_feature(gradient, terms)
        self._bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(
                torch.from_numpy(initial_rows(table, terms)), freeze=False, mode="sum", sparse=True
            )
            for table in range(len(terms.cardinalities))
        )
        self._optimizer = make_optimizer(terms, self._bags)
        self._offsets = torch.arange(terms.batch_size)

    def step(self, step: int) -> Seconds:
        clock = Clock()
        pooled = self._forward(step)
        clock.lap("forward")
        torch.autograd.backward(pooled, self._gradients)
        clock.lap("backward")
        self._optimizer.step()
        self._optimizer.zero_grad()
        clock.lap("optimizer")
        return clock.seconds

    @torch.no_grad()
    def look_up(self, step: int) -> Tensor:
        return torch.cat(self._forward(step))

    def _forward(self, step: int) -> list[Tensor]:
        features = by_feature(self._ids[step], self._terms)
        return [bag(ids, self._offsets) for bag, ids in zip(self._bags, features, strict=True)]


def make_optimizer(terms: Terms, bags: nn.ModuleList) -> torch.optim.Optimizer:
    if terms.optimizer == "sgd":
        return torch.optim.SGD(bags.parameters(), lr=terms.lr)
    assert terms.optimizer == "adagrad", f"torch.optim has no {terms.optimizer}"
    return torch.optim.Adagrad(bags.parameters(), lr=terms.lr, eps=terms.eps)


if __name__ == "__main__":
    take_turns(Stock)
