"""A small DLRM in stock PyTorch, trained on (dense, ids, labels) tuples; one Adagrad for everything."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rowcast
from examples.adopt.in_memory import EmbeddingBags

DIM, LR = 8, 0.05
ROWS = [40_000, 5_000, 100]
CONFIGS = [
    rowcast.EmbeddingBagConfig(name=f"t_{i}", num_embeddings=rows, embedding_dim=DIM, feature_names=[f"cat_{i}"])
    for i, rows in enumerate(ROWS)
]


def open_clicks(batches: int = 30, size: int = 256) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """dense f32 [B, 4], ids i64 [B, 3], labels f32 [B]: clicked where the first id is even."""
    random = torch.Generator().manual_seed(1)
    for _ in range(batches):
        ids = torch.stack([(torch.rand(size, generator=random) ** 4 * rows).long() for rows in ROWS], dim=1)
        yield torch.rand(size, 4, generator=random), ids, (ids[:, 0] % 2 == 0).float()


class DLRM(nn.Module):
    """Products of all pairs of the features' vectors, the dense features' one among them."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.bottom = nn.Sequential(nn.Linear(4, DIM), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(DIM + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        found = self.embeddings(sparse)
        x = self.bottom(dense)
        vectors = torch.stack([x, *(found[f"cat_{i}"] for i in range(len(ROWS)))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        i, j = torch.triu_indices(len(ROWS) + 1, len(ROWS) + 1, 1)
        logits: Tensor = self.top(torch.cat([x, products[:, i, j]], dim=1))
        return logits.squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small DLRM on made-up clicks.")
    parser.add_argument("--start", type=Path, help="a state dict to begin with")
    parser.add_argument("--end", type=Path, help="where the state dict goes that it ends with, and the losses")
    options = parser.parse_args()
    torch.manual_seed(0)
    embeddings = EmbeddingBags(CONFIGS)
    model = DLRM(embeddings)
    if options.start:
        model.load_state_dict(load_file(options.start))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    loader = open_clicks()
    losses = []
    for dense, ids, labels in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{len(losses)} steps, the last at loss {losses[-1]:.4f}")
    if options.end:
        save_file({**model.state_dict(), "losses": torch.tensor(losses)}, options.end)


if __name__ == "__main__":
    main()
