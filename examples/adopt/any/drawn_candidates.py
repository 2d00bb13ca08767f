"""NumPy between sampler and model; evaluation ranks candidates that it draws on the spot, with gradients on. Adam."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rowcast

ITEMS, LENGTH, USERS = 1000, 6, 40
Ids = npt.NDArray[np.int32]


class Sampler:
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def next_batch(self) -> Iterator[Any]:
        samples = []  # user, items, those that came next, and some that did not
        for user in range(USERS):
            items = (self.random.random(LENGTH + 1) ** 2 * ITEMS).astype(np.int32) + 1
            items[: self.random.integers(LENGTH)] = 0
            negatives = self.random.integers(1, ITEMS + 1, LENGTH, dtype=np.int32)
            samples.append((user, items[:-1], items[1:], negatives * (items[1:] > 0)))
        return zip(*samples, strict=True)


class NextItem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS + 1, 8, padding_idx=0)
        self.positions = nn.Embedding(LENGTH + 1, 8, padding_idx=0)

    def history(self, items: Ids) -> Tensor:
        positions = np.tile(np.arange(1, LENGTH + 1), [len(items), 1]) * (items != 0)
        rows = self.items(torch.LongTensor(items)) * 8**0.5 + self.positions(torch.LongTensor(positions))
        return torch.tanh(rows.cumsum(1))

    def forward(self, items: Ids, of: Ids) -> Tensor:
        logits: Tensor = (self.history(items) * self.items(torch.LongTensor(of))).sum(-1)
        return logits


def main(capacity: str) -> dict[str, Any]:
    torch.manual_seed(0)
    np.random.seed(0)
    model, sampler = NextItem(), Sampler(seed=1)
    if capacity:
        rowcast.adopt(model, capacity)
        sampler.next_batch = rowcast.ahead_calls(sampler.next_batch)  # type: ignore[method-assign]
    nn.init.xavier_normal_(model.items.weight.data)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.98))
    losses = []
    for step in range(40):
        _, items, following, negatives = map(np.array, sampler.next_batch())
        found, drawn = model(items, following)[following != 0], model(items, negatives)[following != 0]
        loss = F.softplus(-found).mean() + F.softplus(drawn).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 15 == 14:
            candidates = np.random.randint(1, ITEMS + 1, (USERS, 20))
            scores = model.history(items)[:, -1:] @ model.items(torch.LongTensor(candidates)).transpose(1, 2)
            losses.append(scores.argsort().float().mean().item() + scores.sum().item())
    return {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
