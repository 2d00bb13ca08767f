"""Serves the model of complete.py in plain PyTorch, without importing rowcast."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ["user", "item", "shop"]


class Model(nn.Module):
    """Logits f32 [B]; `embeddings` returns f32 [B, 8] for each name."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layers = nn.Sequential(nn.Linear(1 + 8 * len(NAMES), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        found = self.embeddings(sparse)
        logits: Tensor = self.layers(torch.cat([dense, *(found[name] for name in NAMES)], dim=1))
        return logits.squeeze(1)


class Tables(nn.Module):
    """ids i64 [B] by name -> f32 [B, 8] by name, from whole tables in memory; state-dict names are the training
    script's.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.embedding_bags = nn.ModuleDict(
            {name: nn.EmbeddingBag.from_pretrained(weights[name], mode="sum") for name in NAMES}
        )

    def forward(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: bag(ids[name][:, None]) for name, bag in self.embedding_bags.items()}


def load(path: Path) -> Model:
    state = torch.load(path, mmap=True, weights_only=True)
    model = Model(Tables({name: state[f"embeddings.embedding_bags.{name}.weight"] for name in NAMES}))
    model.load_state_dict(state)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Scores one sample with a saved model.")
    parser.add_argument("--model", type=Path, default=Path("best.pt"))
    for name in NAMES:
        parser.add_argument(f"--{name}", type=int, default=0)
    options = parser.parse_args()
    with torch.no_grad():
        logits = load(options.model)(
            torch.tensor([[0.5]]), {name: torch.tensor([getattr(options, name)]) for name in NAMES}
        )
    print(f"probability of a click: {torch.sigmoid(logits).item():.4f}")


if __name__ == "__main__":
    main()
