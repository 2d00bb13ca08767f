"""The loop is in a library: `fit` reads one float matrix whose first columns are ids. Adagrad, dense gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rowcast

ROWS, DIM, DENSE = (900, 400, 7), 4, 3


class Classifier(nn.Module):
    """As a library would have it."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in ROWS)
        self.biases = nn.ModuleList(nn.Embedding(rows, 1) for rows in ROWS)
        self.layers = nn.Sequential(nn.Linear(len(ROWS) * DIM + DENSE, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        rows = [table(x[:, at : at + 1].long()).squeeze(1) for at, table in enumerate(self.tables)]
        biases = [bias(x[:, at : at + 1].long()).squeeze(1) for at, bias in enumerate(self.biases)]
        logits: Tensor = self.layers(torch.cat([*rows, x[:, len(ROWS) :]], dim=1)) + sum(biases)
        return logits.squeeze(1)

    def fit(self, x: Tensor, y: Tensor, batch_size: int, epochs: int) -> list[float]:
        self.optimizer = torch.optim.Adagrad(self.parameters(), lr=0.05)
        split = len(x) * 4 // 5
        losses = []
        for _ in range(epochs):
            self.train()
            for own, label in DataLoader(TensorDataset(x[:split], y[:split]), batch_size, shuffle=True):
                loss = F.binary_cross_entropy_with_logits(self(own), label)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                losses.append(loss.item())
            losses.append(float(F.binary_cross_entropy_with_logits(self.predict(x[split:], batch_size), y[split:])))
        return losses

    @torch.no_grad()
    def predict(self, x: Tensor, batch_size: int) -> Tensor:
        self.eval()
        return torch.cat([self(own) for (own,) in DataLoader(TensorDataset(x), batch_size)])


def main(capacity: str) -> dict[str, Any]:
    torch.manual_seed(0)
    ids = torch.stack([(torch.rand(800) ** 2 * rows).floor() for rows in ROWS], dim=1)
    x, y = torch.cat([ids, torch.rand(800, DENSE)], dim=1), (ids[:, 0] % 2 == 0).float()
    model = Classifier()
    if capacity:
        rowcast.adopt(model, capacity)
    losses = model.fit(x, y, batch_size=32, epochs=3)
    return {"losses": losses, "model": model.state_dict(), "optimizer": model.optimizer.state_dict()}
