"""A script that runs twice with the same seeds, un-adopted and adopted, and ends with the same values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

import rowcast
from rowcast.trainer.adopt.table_parameter import TableParameter

ROWS, DIM, CAPACITY = 300, 4, "90 rows"  # of two tables

Seen = list[Tensor]


def same_as_unadopted(script: Callable[[Callable[[Any], Any]], Seen]) -> None:
    """script: gets the function that adopts its models."""

    def adopted(model: nn.Module) -> nn.Module:
        rowcast.adopt(model, CAPACITY)
        assert any(isinstance(own, TableParameter) for own in model.parameters())
        return model

    torch.manual_seed(0)
    plain = script(lambda model: model)
    torch.manual_seed(0)
    seen = script(adopted)
    assert len(seen) == len(plain)
    for own, expected in zip(seen, plain, strict=True):
        assert own.shape == expected.shape
        assert int((own != expected).sum()) == 0  # of values


def bytes_by_name(ended: Any) -> dict[str, Any]:
    """What a script ends with, by name; bytes of tensors."""
    leaves = {"".join(map(str, path)): leaf for path, leaf in tree_flatten_with_path(ended)[0]}
    return {name: own.numpy().tobytes() if isinstance(own, Tensor) else own for name, own in leaves.items()}


class Items(nn.Module):
    def __init__(
        self, *, sparse: bool = False, tied: bool = False, frozen: bool = False, by_freq: bool = False
    ) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0, sparse=sparse, scale_grad_by_freq=by_freq)
        self.other = nn.Embedding(ROWS, DIM, sparse=sparse)
        if tied:
            self.other.weight = self.item.weight
        self.other.weight.requires_grad_(not frozen)
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        items = self.item(x).mean(1) + self.item(x + 1).mean(1) + self.item(y).mean(1)
        scores: Tensor = self.top(torch.cat([items, self.other(y).sum(1)], 1))
        return scores.squeeze(1)
