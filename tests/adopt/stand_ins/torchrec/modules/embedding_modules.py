from torch import Tensor, nn

from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class KeyedTensor:
    def __init__(self, features: dict[str, Tensor]) -> None:
        self._features = features

    def to_dict(self) -> dict[str, Tensor]:
        return self._features


class EmbeddingBagCollection(nn.Module):
    def __init__(self, tables: list[EmbeddingBagConfig]) -> None:
        super().__init__()
        self._configs = tables
        self.embedding_bags = nn.ModuleDict(
            {
                own.name: nn.EmbeddingBag(own.num_embeddings, own.embedding_dim, mode="sum", include_last_offset=True)
                for own in tables
            }
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        found = {}
        for config in self._configs:
            for feature in config.feature_names:
                ids, offsets = features.of(feature)
                found[feature] = self.embedding_bags[config.name](ids, offsets)
        return KeyedTensor(found)


class EmbeddingCollection(nn.Module):
    def __init__(self, tables: list[EmbeddingConfig]) -> None:
        super().__init__()
        self._configs = tables
        self.embeddings = nn.ModuleDict(
            {own.name: nn.Embedding(own.num_embeddings, own.embedding_dim) for own in tables}
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        found = {}
        for config in self._configs:
            for feature in config.feature_names:
                ids, offsets = features.of(feature)
                found[feature] = JaggedTensor(self.embeddings[config.name](ids), offsets.diff())
        return found
