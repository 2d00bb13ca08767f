"""Lightning calls `optimizer.step(closure)`: its Trainer is as it was, and `adopt` is the only line more."""

from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rowcast

USERS, ITEMS = 900, 600


class Ratings(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.top = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8), nn.Linear(8, 1)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        users, items, ratings = batch
        loss = F.mse_loss(self.top(self.users(users) * self.items(items)).squeeze(1), ratings)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(capacity: str) -> dict[str, Any]:
    lightning.seed_everything(0, verbose=False)
    ids = [(torch.rand(1280) ** 2 * rows).long() for rows in (USERS, ITEMS)]
    model = rowcast.adopt(Ratings(), capacity) if capacity else Ratings()
    clip = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, **clip)
    trainer.fit(model, DataLoader(TensorDataset(*ids, torch.rand(1280)), 32, shuffle=True))
    return {"losses": model.losses, "model": model.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
