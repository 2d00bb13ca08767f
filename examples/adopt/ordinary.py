"""An ordinary click model in plain PyTorch, with all that such a script has around its loop.

python -m examples.adopt.ordinary --epochs 8
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

ROWS = {"user": 20_000, "item": 5_000, "shop": 50, "hour": 24}
LARGE = [name for name, rows in ROWS.items() if rows > 1_000]
SMALL = [name for name in ROWS if name not in LARGE]
PATIENCE = 2  # epochs without a better validation loss
BATCH = 100


class Clicks(Dataset[Any]):
    """Each sample has one to three ids of every feature; it is mostly clicked if its first shop is even."""

    def __init__(self, split: str, samples: int) -> None:
        random = torch.Generator().manual_seed(["train", "validation"].index(split))
        self.age = torch.rand(samples, 1, generator=random)
        self.bags = {
            name: [
                (torch.rand(int(size), generator=random) ** 3 * rows).long()
                for size in torch.randint(1, 4, (samples,), generator=random)
            ]
            for name, rows in ROWS.items()
        }
        is_even = torch.tensor([int(bag[0]) % 2 == 0 for bag in self.bags["shop"]])
        self.clicked = (is_even ^ (torch.rand(samples, generator=random) < 0.1)).float()

    def __len__(self) -> int:
        return len(self.age)

    def __getitem__(self, i: int) -> Any:
        return self.age[i], {name: bags[i] for name, bags in self.bags.items()}, self.clicked[i]


def collate(samples: list[Any]) -> Any:
    dense, bags, labels = zip(*samples, strict=True)
    sparse = {}
    for name in ROWS:
        own = [sample[name] for sample in bags]
        lengths = torch.tensor([0] + [len(bag) for bag in own[:-1]])
        sparse[name] = (torch.cat(own), lengths.cumsum(0))
    return torch.stack(dense), sparse, torch.stack(labels)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {name: nn.EmbeddingBag(rows, 8, mode="sum", sparse=True) for name, rows in ROWS.items()}
        )
        self.top = nn.Sequential(nn.Linear(1 + 8 * len(ROWS), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        pooled = [self.bags[name](*sparse[name]) for name in ROWS]
        logits: Tensor = self.top(torch.cat([dense, *pooled], dim=1))
        return logits.squeeze(1)


def validate(model: Model, loader: Any) -> float:
    model.eval()
    total = 0.0
    with torch.no_grad():
        for dense, sparse, labels in loader:
            logits = model(dense, sparse)
            total += float(nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum"))
    model.train()
    return total / len(loader.dataset)


def train(epochs: int, folder: Path, start: Path | None = None, samples: int = 4_000) -> list[float]:
    """Returns the loss of each step."""
    torch.manual_seed(0)
    model = Model()
    if start is not None:
        model.load_state_dict(torch.load(start, weights_only=True))
    optimizers: list[Any] = [
        torch.optim.SparseAdam([w for name in LARGE for w in model.bags[name].parameters()], lr=0.01),
        torch.optim.Adagrad([w for name in SMALL for w in model.bags[name].parameters()], lr=0.05),
        torch.optim.Adam(model.top.parameters(), lr=0.003),
    ]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs) for optimizer in optimizers]
    shuffle = torch.Generator().manual_seed(0)
    loader = DataLoader(
        Clicks("train", samples), BATCH, shuffle=True, generator=shuffle, collate_fn=collate, num_workers=2
    )
    validation = DataLoader(Clicks("validation", samples // 4), BATCH, collate_fn=collate, num_workers=2)
    losses: list[float] = []
    best, best_epoch = float("inf"), 0
    for epoch in range(epochs):
        for dense, sparse, labels in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.top.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        found = validate(model, validation)
        print(f"epoch {epoch}: validation loss {found:.6f}")
        if found < best:
            best, best_epoch = found, epoch
            torch.save(model.state_dict(), folder / "best.pt")
        elif epoch - best_epoch >= PATIENCE:
            break
        for schedule in schedules:
            schedule.step()
    print(f"best validation loss {best:.6f}, in epoch {best_epoch}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains on made-up clicks, and keeps the best model.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path(), help="where best.pt goes")
    options = parser.parse_args()
    train(options.epochs, options.folder)
