from typing import Any

import torch
from torch import Tensor, nn

from torchrec.datasets.utils import Batch


class DLRM(nn.Module):
    """Takes the module's configs and its result by the names that TorchRec's DLRM uses; the arithmetic is simpler."""

    def __init__(
        self,
        embedding_bag_collection: Any,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        configs = embedding_bag_collection.embedding_bag_configs()
        self._features = [feature for config in configs for feature in config.feature_names]
        self.dense_arch = nn.Sequential(nn.Linear(dense_in_features, dense_arch_layer_sizes[-1]), nn.ReLU())
        width = dense_arch_layer_sizes[-1] + configs[0].embedding_dim * len(self._features)
        self.over_arch = nn.Sequential(
            nn.Linear(width, over_arch_layer_sizes[0]), nn.ReLU(), nn.Linear(over_arch_layer_sizes[0], 1)
        )

    def forward(self, dense_features: Tensor, sparse_features: Any) -> Tensor:
        found = self.embedding_bag_collection(sparse_features).to_dict()
        vectors = [self.dense_arch(dense_features), *(found[feature] for feature in self._features)]
        logits: Tensor = self.over_arch(torch.cat(vectors, dim=1))
        return logits


class DLRMTrain(nn.Module):
    def __init__(self, dlrm_module: DLRM) -> None:
        super().__init__()
        self.model = dlrm_module
        self.loss_fn = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = self.loss_fn(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())
