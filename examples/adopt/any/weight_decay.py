"""Adam with weight decay moves every row at every step; ids get offsets in `forward`; the best model is saved."""

import io
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import rowcast

FIELDS = (700, 250)
OFFSETS = np.array([0, *np.cumsum(FIELDS)[:-1]])


class FactorizationMachine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(sum(FIELDS), 8)
        self.biases = nn.Embedding(sum(FIELDS), 1)
        nn.init.xavier_uniform_(self.vectors.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.new_tensor(OFFSETS).unsqueeze(0)
        rows = self.vectors(x)
        products = 0.5 * (rows.sum(1) ** 2 - (rows**2).sum(1)).sum(1)
        logits: Tensor = products + self.biases(x).sum((1, 2))
        return logits


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Any]) -> float:
    model.eval()
    return sum(float(F.binary_cross_entropy_with_logits(model(x), y)) for x, y in loader) / len(loader)


def main(capacity: str) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.stack([(torch.rand(1200) ** 2 * rows).long() for rows in FIELDS], dim=1)
    parts = random_split(TensorDataset(x, (x.sum(1) % 2).float()), (1000, 100, 100))
    train, valid, test = (DataLoader(own, 64, num_workers=1) for own in parts)
    model = FactorizationMachine()
    if capacity:
        rowcast.adopt(model, capacity)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
    losses, best = [], (float("inf"), b"")
    for _ in range(3):
        model.train()
        for fields, target in train:
            loss = F.binary_cross_entropy_with_logits(model(fields), target)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        losses.append(evaluate(model, valid))
        if losses[-1] > best[0]:
            break
        torch.save(model.state_dict(), file := io.BytesIO())
        best = losses[-1], file.getvalue()
    model.load_state_dict(torch.load(io.BytesIO(best[1]), weights_only=True))
    losses.append(evaluate(model, test))
    return {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
