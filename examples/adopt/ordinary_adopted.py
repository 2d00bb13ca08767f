"""An ordinary click model in plain PyTorch, with all that such a script has around its loop.

python -m examples.adopt.ordinary_adopted --epochs 8
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import rowcast

ROWS = {"user": 20_000, "item": 5_000, "shop": 50, "hour": 24}
CONFIGS = [
    rowcast.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name], init="normal:1")
    for name, rows in ROWS.items()
]
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


def open_clicks(samples: int) -> Any:
    def batches(split: str, epoch: int) -> Any:
        if split == "eval":
            return DataLoader(Clicks("validation", samples // 4), BATCH, collate_fn=collate, num_workers=2)
        shuffle = torch.Generator().manual_seed(epoch)
        return DataLoader(
            Clicks("train", samples), BATCH, shuffle=True, generator=shuffle, collate_fn=collate, num_workers=2
        )

    return batches


class Model(nn.Module):
    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.bags = rowcast.EmbeddingBagCollection(CONFIGS, optimizer=rule, capacity="400KB")
        self.top = nn.Sequential(nn.Linear(1 + 8 * len(ROWS), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        logits: Tensor = self.top(torch.cat([dense, self.bags(sparse).values()], dim=1))
        return logits.squeeze(1)


def train(epochs: int, folder: Path, start: Path | None = None, samples: int = 4_000) -> list[float]:
    """Returns the loss of each step."""
    torch.manual_seed(0)
    decay = {"kind": "cosine", "decay_steps": epochs * samples // BATCH}
    model = Model({"kind": "adam", "lr": 0.01, "schedule": decay})
    if start is not None:
        model.load_state_dict(torch.load(start, weights_only=True))
    optimizers: list[Any] = [torch.optim.Adam(model.top.parameters(), lr=0.003)]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs) for optimizer in optimizers]
    loader = rowcast.connect(
        model.bags,
        "examples.adopt.ordinary_adopted:open_clicks",
        epochs=epochs,
        options={"samples": samples},
        evaluate=True,
        save_every="epoch",
        fresh=True,
    )
    losses: list[float] = []
    best, best_epoch = float("inf"), 0
    for epoch in loader.epochs:
        for batch in loader:
            dense, sparse, labels = batch
            if batch.kind == "eval":
                model.eval()
                loader.record(logits=model(dense, sparse))
                model.train()
                continue
            loss = nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.top.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        assert loader.evaluation is not None
        found = loader.evaluation.logloss
        assert found is not None, "logits were recorded"
        print(f"epoch {epoch}: validation loss {found:.6f}")
        if found < best:
            best, best_epoch = found, epoch
            torch.save(model.state_dict(), folder / "best.pt")
        elif epoch - best_epoch >= PATIENCE:
            loader.stop("no better validation loss")
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
