"""A next-item model on TorchRec's EmbeddingCollection: histories with times, a positive and a negative an item."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import rowcast

LR, DIM, LENGTH, FEATURES = 0.05, 16, 20, ["history", "positive", "negative"]
CONFIGS = [EmbeddingConfig(name="item", num_embeddings=20_000, embedding_dim=DIM, feature_names=FEATURES)]


def open_visits(batches: int = 30, size: int = 64) -> Iterator[dict[str, Any]]:
    """Histories of 1 to LENGTH items, the time between two in seconds."""
    random = torch.Generator().manual_seed(1)
    for _ in range(batches):
        lengths = torch.randint(1, LENGTH + 1, (size,), generator=random)
        items = (torch.rand(3 * int(lengths.sum()), generator=random) ** 3 * 20_000).long()
        sparse = KeyedJaggedTensor(keys=FEATURES, values=items, lengths=lengths.repeat(3))
        yield {"sparse": sparse, "gap": torch.randint(1, 10**6, (int(lengths.sum()),), generator=random)}


class NextItem(nn.Module):
    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.place, self.gap = embeddings, nn.Embedding(LENGTH, DIM), nn.Embedding(20, DIM)
        self.block = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, 0.0, batch_first=True)

    def forward(self, sparse: Any, gap: Tensor) -> Tensor:
        """The loss."""
        found = self.embeddings(sparse)
        lengths = found["history"].lengths()
        history, positive, negative = (found[name].to_padded_dense(LENGTH) for name in FEATURES)
        is_item = torch.arange(LENGTH) < lengths[:, None]
        gaps = torch.zeros(len(lengths), LENGTH, dtype=torch.long)
        gaps[is_item] = gap.log2().long()
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.block(history + self.place.weight + self.gap(gaps), src_mask=mask)[is_item]
        logits = torch.cat([(x * positive[is_item]).sum(1), -(x * negative[is_item]).sum(1)])
        return -nn.functional.logsigmoid(logits).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a next-item model on made-up histories.")
    parser.add_argument("--start", type=Path, help="a state dict to begin with")
    parser.add_argument("--end", type=Path, help="where the state dict goes that it ends with, and the losses")
    options = parser.parse_args()
    torch.manual_seed(0)
    of = {"data.of": {"gap": "history"}}  # the array has an entry for each look-up
    rows = {"kind": "adagrad", "lr": LR}
    embeddings = rowcast.EmbeddingCollection(CONFIGS, optimizer=rows, capacity="400KB", job=of)
    model = NextItem(embeddings)
    if options.start:
        model.load_state_dict(load_file(options.start))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    loader = rowcast.connect(embeddings, "examples.adopt.torchrec_sequence_adopted:open_visits")
    losses = []
    for batch in loader:
        loss = model(batch["sparse"], batch["gap"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{len(losses)} steps, the last at loss {losses[-1]:.4f}")
    if options.end:
        save_file({**model.state_dict(), "losses": torch.tensor(losses)}, options.end)


if __name__ == "__main__":
    main()
