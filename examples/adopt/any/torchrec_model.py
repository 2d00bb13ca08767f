"""TorchRec's DLRM, trained on TorchRec's batches: several ids a bag, and empty bags."""

from collections.abc import Iterator
from typing import Any

import torch
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import rowcast

CONFIGS = [
    EmbeddingBagConfig(name="articles", num_embeddings=20_000, embedding_dim=8, feature_names=["article"]),
    EmbeddingBagConfig(name="tags", num_embeddings=3_000, embedding_dim=8, feature_names=["tag", "past_tag"]),
]


def open_clicks(batches: int = 30, size: int = 128) -> Iterator[Batch]:
    """Clicked where the last article is even."""
    random = torch.Generator().manual_seed(1)
    for _ in range(batches):
        lengths = torch.cat([torch.ones(size, dtype=torch.long), torch.randint(4, (2 * size,), generator=random)])
        articles = (torch.rand(size, generator=random) ** 3 * 20_000).long()
        tags = torch.randint(3_000, (int(lengths[size:].sum()),), generator=random)
        sparse = KeyedJaggedTensor(
            keys=["article", "tag", "past_tag"], values=torch.cat([articles, tags]), lengths=lengths
        )
        yield Batch(
            dense_features=torch.rand(size, 4, generator=random),
            sparse_features=sparse,
            labels=(articles % 2 == 0).long(),
        )


def main(capacity: str) -> dict[str, Any]:
    torch.manual_seed(0)
    embeddings = EmbeddingBagCollection(tables=CONFIGS)
    model = DLRMTrain(
        DLRM(embeddings, dense_in_features=4, dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1])
    )
    if capacity:
        rowcast.adopt(model, capacity)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    losses = []
    for batch in rowcast.ahead(open_clicks()) if capacity else open_clicks():
        loss, _ = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
