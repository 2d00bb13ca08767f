"""Embedding tables as a script would hold them itself, with every row in memory: what the adopted scripts replace."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import rowcast


class EmbeddingBags(nn.Module):
    """One nn.EmbeddingBag per table; ids i64 [B, F] -> f32 [B, D] per feature, by name."""

    def __init__(self, configs: Sequence[rowcast.EmbeddingBagConfig]) -> None:
        super().__init__()
        self.features = [config.feature_names[0] for config in configs]
        self.embedding_bags = nn.ModuleDict(
            {
                config.name: nn.EmbeddingBag(config.num_embeddings, config.embedding_dim, mode="sum")
                for config in configs
            }
        )

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        bags = zip(self.features, self.embedding_bags.values(), ids.split(1, dim=1), strict=True)
        return {feature: bag(column) for feature, bag, column in bags}


class Embeddings(nn.Module):
    """One nn.Embedding per table, rows added in the order of the ids; feature -> ids i64 [B, L] -> f32 [B, D]."""

    def __init__(self, configs: Sequence[rowcast.EmbeddingBagConfig]) -> None:
        super().__init__()
        self.features = [config.feature_names[0] for config in configs]
        self.embedding_bags = nn.ModuleDict(
            {config.name: nn.Embedding(config.num_embeddings, config.embedding_dim) for config in configs}
        )

    def forward(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            feature: pooled(table, ids[feature])
            for feature, table in zip(self.features, self.embedding_bags.values(), strict=True)
        }


class JaggedEmbedding(nn.Module):
    """One nn.Embedding for several features; feature -> ids i64 [B, L] -> rows f32 [B * L, D] of each."""

    def __init__(self, config: rowcast.EmbeddingConfig) -> None:
        super().__init__()
        self.features, self.table = config.feature_names, config.name
        self.embeddings = nn.ModuleDict({config.name: nn.Embedding(config.num_embeddings, config.embedding_dim)})

    def forward(self, ids: Mapping[str, Tensor]) -> dict[str, rowcast.JaggedTensor]:
        every = torch.stack([ids[feature] for feature in self.features])
        _, size, length = every.shape
        rows = self.embeddings[self.table](every.flatten()).view(len(self.features), size * length, -1)
        offsets = torch.arange(0, size * length + 1, length, dtype=torch.int32)
        return {feature: rowcast.JaggedTensor(own, offsets) for feature, own in zip(self.features, rows, strict=True)}


def pooled(table: nn.Module, ids: Tensor) -> Tensor:
    """Pools as examples/plain_loop.py does."""
    rows = table(ids.reshape(-1))
    bags = ids.new_tensor(range(len(ids))).repeat_interleave(ids.shape[1])
    sums: Tensor = rows.new_zeros(len(ids), rows.shape[1]).index_add(0, bags, rows)
    return sums
