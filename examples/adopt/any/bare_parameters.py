"""Tables are bare Parameters. Two loaders take turns and draw negatives. A new Adam follows, with a smaller rate."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import rowcast

ENTITIES, RELATIONS, NEGATIVES = 600, 4, 5


class Triples(Dataset[Any]):
    def __init__(self, triples: Tensor, kind: str) -> None:
        self.triples, self.kind, self.random = triples, kind, np.random.default_rng(1)

    def __len__(self) -> int:
        return len(self.triples)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor, str]:
        return self.triples[at], torch.from_numpy(self.random.integers(ENTITIES, size=NEGATIVES)), self.kind


def alternating(triples: Tensor) -> Iterator[Any]:
    loaders = [DataLoader(Triples(triples, kind), 16, shuffle=True) for kind in ("tails", "heads")]
    while True:
        for batches in zip(*loaders, strict=True):
            yield from batches


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entities = nn.Parameter(torch.rand(ENTITIES, 8) - 0.5)
        self.relations = nn.Parameter(torch.rand(RELATIONS, 8) - 0.5)

    def forward(self, triples: Tensor, others: Tensor, kind: str) -> Tensor:
        relation = torch.index_select(self.relations, 0, triples[:, 1]).unsqueeze(1)
        given = torch.index_select(self.entities, 0, triples[:, 0 if kind == "tails" else 2]).unsqueeze(1)
        other = torch.index_select(self.entities, 0, others.reshape(-1)).view(*others.shape, -1)
        difference = given + relation - other if kind == "tails" else other + relation - given
        return -difference.abs().sum(2)


def main(capacity: str) -> dict[str, Any]:
    torch.manual_seed(0)
    triples = torch.stack([torch.randint(most, (200,)) for most in (ENTITIES, RELATIONS, ENTITIES)], dim=1)
    model, batches, losses = Translation(), alternating(triples), []
    if capacity:
        rowcast.adopt(model, capacity, tables=["entities"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(60):
        positive, negatives, (kind, *_) = next(batches)
        true = model(positive, positive[:, 2 if kind == "tails" else 0][:, None], kind)
        loss = F.softplus(-true).mean() + F.softplus(model(positive, negatives, kind)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 30:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
        if step % 20 == 0:
            with torch.no_grad():  # each of ten heads with every entity
                losses += model(triples[:10], torch.arange(ENTITIES).expand(10, -1), "tails").argmax(1).tolist()
    return {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
