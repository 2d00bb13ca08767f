"""The model of complete.py, and scores by what it saved: plain PyTorch, which does not import rowcast."""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

ROWS = {"user": 4_000, "item": 3_000, "shop": 50}


class Model(nn.Module):
    """hour f32 [B, 1], ids i64 [B, 3] -> logits f32 [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(rows, 8) for name, rows in ROWS.items()})
        self.layers = nn.Sequential(nn.Linear(1 + 8 * len(ROWS), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, hour: Tensor, ids: Tensor) -> Tensor:
        rows = [table(column) for table, column in zip(self.tables.values(), ids.T, strict=True)]
        logits: Tensor = self.layers(torch.cat([hour, *rows], dim=1))
        return logits.squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Scores one sample with a saved model.")
    parser.add_argument("--model", type=Path, default=Path("best.pt"))
    for name in ROWS:
        parser.add_argument(f"--{name}", type=int, default=0)
    options = parser.parse_args()
    model = Model()
    model.load_state_dict(torch.load(options.model, mmap=True, weights_only=True))
    with torch.no_grad():
        logits = model(torch.tensor([[0.5]]), torch.tensor([[getattr(options, name) for name in ROWS]]))
    print(f"probability of a click: {torch.sigmoid(logits).item():.4f}")


if __name__ == "__main__":
    main()
