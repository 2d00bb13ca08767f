"""A complete training script: a schedule, a validation set, early stopping, the best model, and resuming after a kill.

python -m examples.adopt.complete                       the same command resumes after a kill, a Ctrl-C or a reboot
python -m examples.adopt.inference --model best.pt      the best model, in plain PyTorch
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import rowcast
from examples.adopt.inference import Model

ROWS = {"user": 4_000, "item": 3_000, "shop": 50}
CONFIGS = [
    rowcast.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name], init="normal:0.1")
    for name, rows in ROWS.items()
]
PATIENCE = 2  # epochs without a better validation loss


class Clicks(Dataset[dict[str, Any]]):
    """Mostly clicked if the user's number is even. Samples of the two splits differ."""

    def __init__(self, split: str, samples: int) -> None:
        random = torch.Generator().manual_seed(["train", "eval"].index(split))
        self.ids = {name: (torch.rand(samples, generator=random) ** 3 * rows).long() for name, rows in ROWS.items()}
        self.hour = torch.rand(samples, 1, generator=random)
        self.clicked = (self.ids["user"] % 2 == 0) ^ (torch.rand(samples, generator=random) < 0.1)

    def __len__(self) -> int:
        return len(self.hour)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "dense": self.hour[i],
            "sparse": {name: own[i] for name, own in self.ids.items()},
            "labels": self.clicked[i].float(),
        }


def open_clicks(samples: int = 4_000) -> Callable[[str, int], Iterable[Any]]:
    """Both splits. Each epoch has its own order, the same every time it is opened."""
    train, validation = Clicks("train", samples), Clicks("eval", samples // 4)

    def batches(split: str, epoch: int) -> DataLoader[dict[str, Any]]:
        if split == "eval":
            return DataLoader(validation, batch_size=200)
        return DataLoader(train, batch_size=100, shuffle=True, generator=torch.Generator().manual_seed(epoch))

    return batches


class Best:
    """The best validation loss so far; saved with the checkpoints, so that a resumed run knows it."""

    def __init__(self) -> None:
        self.loss, self.epoch = float("inf"), -1

    def is_beaten_by(self, loss: float, epoch: int) -> bool:
        is_better = loss < self.loss
        if is_better:
            self.loss, self.epoch = loss, epoch
        return is_better

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.epoch = state["loss"], state["epoch"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on made-up clicks, and keeps the best model.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path(), help="where best.pt and last.pt go")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = {"kind": "adagrad", "lr": 0.03, "schedule": {"kind": "linear", "decay_steps": 480}}
    embeddings = rowcast.EmbeddingBagCollection(CONFIGS, optimizer=rows, capacity="200KB")
    model = Model(embeddings)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    best = Best()
    loader = rowcast.connect(
        embeddings,
        "examples.adopt.complete:open_clicks",
        epochs=options.epochs,
        evaluate=True,
        save_every="epoch",
        dense=(model, optimizer, schedule, best),
    )
    for epoch in loader.epochs:
        if epoch > best.epoch + PATIENCE:
            loader.stop(f"no better validation loss since epoch {best.epoch}")
            break
        for batch in loader:
            if batch.kind == "train":
                train(model, optimizer, batch)
            else:
                model.eval()
                loader.record(logits=model(batch.dense_features, batch.sparse_features))
                model.train()
        if loader.stopped:  # Ctrl-C: starting the script again continues this epoch
            break
        found = loader.evaluation
        assert found is not None, "each epoch ends with an evaluation"
        assert found.logloss is not None, "logits were recorded"
        if best.is_beaten_by(found.logloss, epoch):
            torch.save(model.state_dict(), options.folder / "best.pt")
        print(
            f"epoch {epoch}: validation loss {found.logloss:.6f}, AUC {found.auc:.4f}, best in epoch {best.epoch}",
            flush=True,
        )
        schedule.step()
    torch.save(model.state_dict(), options.folder / "last.pt")
    print(f"best validation loss {best.loss:.6f}, in epoch {best.epoch}")


def train(model: Model, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    logits: Tensor = model(batch.dense_features, batch.sparse_features)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


if __name__ == "__main__":
    main()
