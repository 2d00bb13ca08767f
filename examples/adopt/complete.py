"""A complete training script: a schedule, a validation set, early stopping, the best model, and resuming after a kill.

python -m examples.adopt.complete                       the same command goes on after a kill or a reboot
python -m examples.adopt.inference --model best.pt      the best model, in plain PyTorch
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rowcast
from examples.adopt.inference import ROWS, Model

SAMPLES, BATCH, EVERY = 4_000, 100, 15  # steps from one save to the next
PATIENCE = 2  # epochs without a better validation loss


def clicks(split: str, samples: int) -> TensorDataset:
    """Mostly clicked if the user's number is even: hour f32 [1], ids i64 [3], clicked f32 []."""
    random = torch.Generator().manual_seed(["train", "validation"].index(split))
    ids = torch.stack([(torch.rand(samples, generator=random) ** 3 * rows).long() for rows in ROWS.values()], dim=1)
    clicked = (ids[:, 0] % 2 == 0) ^ (torch.rand(samples, generator=random) < 0.1)
    return TensorDataset(torch.rand(samples, 1, generator=random), ids, clicked.float())


class Best:
    """The best validation loss so far, which a save holds too."""

    def __init__(self) -> None:
        self.loss, self.epoch = float("inf"), -1

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on made-up clicks, and keeps the best model.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path(), help="where saves, best.pt and last.pt go")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = rowcast.adopt(Model(), capacity="100KB")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule, best = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5), Best()
    train = DataLoader(clicks("train", SAMPLES), BATCH, shuffle=True)
    validation = DataLoader(clicks("validation", SAMPLES // 4), BATCH)
    whole = model, optimizer, schedule, best
    step = rowcast.restore(options.folder / "saves", *whole)
    for epoch in range(step // len(train), options.epochs):
        if epoch > best.epoch + PATIENCE:
            break
        for hour, ids, clicked in rowcast.ahead(train, skip=step % len(train)):
            loss = nn.functional.binary_cross_entropy_with_logits(model(hour, ids), clicked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0 and step % len(train):
                rowcast.save(options.folder / "saves", *whole, step=step)
        validation_loss = validated(model, validation)
        if validation_loss < best.loss:
            best.loss, best.epoch = validation_loss, epoch
            torch.save(model.state_dict(), options.folder / "best.pt")
        schedule.step()
        print(f"epoch {epoch}: validation loss {validation_loss:.6f}, best in epoch {best.epoch}", flush=True)
        rowcast.save(options.folder / "saves", *whole, step=step)
    torch.save(model.state_dict(), options.folder / "last.pt")
    print(f"best validation loss {best.loss:.6f}, in epoch {best.epoch}")


def validated(model: nn.Module, validation: DataLoader[Any]) -> float:
    """The mean loss of a sample."""
    losses = []
    with torch.no_grad():
        for hour, ids, clicked in validation:
            losses.append(nn.functional.binary_cross_entropy_with_logits(model(hour, ids), clicked))
    return torch.stack(losses).mean().item()


if __name__ == "__main__":
    main()
