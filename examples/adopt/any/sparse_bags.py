"""Bags of ids with offsets, sparse gradients, SGD with a schedule; evaluation is in the middle of an epoch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import rowcast

ROWS, DIM, BATCH = (900, 300, 9), 8, 32


class Clicks(Dataset[Any]):
    """Each item is a batch: dense f32 [B, 4], ids and offsets of each table, labels f32 [B]."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, at: int) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
        random = torch.Generator().manual_seed(at)
        counts = [torch.randint(1, 5, (BATCH,), generator=random) for _ in ROWS]
        draws = [torch.rand(int(own.sum()), generator=random) ** 2 for own in counts]
        ids = [(own * rows).long() for own, rows in zip(draws, ROWS, strict=True)]
        offsets = [own.cumsum(0) - own for own in counts]
        return torch.rand(BATCH, 4, generator=random), ids, offsets, torch.rand(BATCH, generator=random).round()


class Interaction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for rows in ROWS)
        self.bottom, self.top = nn.Linear(4, DIM), nn.Linear(16, 1)

    def forward(self, dense: Tensor, ids: list[Tensor], offsets: list[Tensor]) -> Tensor:
        rows = [table(*own) for table, *own in zip(self.tables, ids, offsets, strict=True)]
        vectors = torch.stack([self.bottom(dense), *rows], dim=1)
        return self.top(torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)).squeeze(1)  # type: ignore[no-any-return]


def wrapped(model: nn.Module, batch: Any) -> Tensor:
    dense, ids, offsets, labels = batch
    return F.binary_cross_entropy_with_logits(model(torch.log(dense + 1), ids, offsets), labels)


def main(capacity: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Interaction()
    if capacity:
        rowcast.adopt(model, capacity)
    train, valid = (DataLoader(Clicks(batches), batch_size=None) for batches in (20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    losses = []
    for _ in range(2):
        for step, batch in enumerate(train):
            loss = wrapped(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if step % 8 == 7:
                with torch.no_grad():
                    losses += [wrapped(model, own).item() for own in valid]
    return {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
