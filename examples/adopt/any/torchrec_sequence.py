"""A next-item model on TorchRec's EmbeddingCollection: histories with times, a positive and a negative an item."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import rowcast

DIM, LENGTH, FEATURES = 16, 20, ["history", "positive", "negative"]
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


def main(capacity: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = NextItem(EmbeddingCollection(tables=CONFIGS))
    if capacity:
        rowcast.adopt(model, capacity)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    losses = []
    for batch in rowcast.ahead(open_visits()) if capacity else open_visits():
        loss = model(batch["sparse"], batch["gap"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
